"""What an endpoint takes and answers, in the words of the API document; and what several of them may raise."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from headrace import errors
from headrace.errors import HeadraceError

Errors = tuple[type[HeadraceError], ...]

_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
JSON, TEXT, HTML, YAML = "application/json", "text/plain", "text/html", "text/yaml"
NDJSON, SCRIPT, STYLE = "application/x-ndjson", "text/javascript", "text/css"


class Operation(NamedTuple):
    """One endpoint, by method and path."""

    id: str
    summary: str
    answers: Mapping[int, type | str | tuple[type | str, ...]]
    """What it answers by itself, by status: a type as JSON, a media type, or several of them."""
    request: Mapping[str, type | str] = _NONE
    """What it takes, by media type: a type, or in words what the bytes are."""
    example: object = None
    """A request that works on a topic without schemas."""
    query: type | None = None
    headers: Mapping[str, str] = _NONE
    """Request headers it looks at, with their meaning."""
    errors: Errors = ()
    """What it raises, beside what the edge and the guard raise for every endpoint."""
    beside: type | None = None
    """What may stand in an error body beside its own fields."""
    effect: bool = False
    """Whether its GET changes something; every other method does."""

    def changes(self, method: str) -> bool:
        """Return whether a request with this method changes something."""
        return self.effect or method not in ("GET", "HEAD")


def below(top: type[HeadraceError]) -> Errors:
    """Return an error with all that are special cases of it."""
    return top, *(error for special in top.__subclasses__() for error in below(special))


OWN_BODY: Final[Errors] = (
    errors.InvalidRequest,
    errors.ContentTypeMismatch,
    errors.PayloadTooLarge,
    errors.EncodingRefused,
)
"""What a body of our own endpoints may be refused for."""
BODY: Final[Errors] = (*OWN_BODY, errors.RequestBodyMissing, errors.TooManyRecords)
"""What a body of records may be refused for."""
KAFKA: Final[Errors] = (errors.TopicNotFound, errors.PartitionNotFound, *below(errors.KafkaError))
"""What Kafka may answer."""
