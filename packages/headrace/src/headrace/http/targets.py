"""What the target of a request tells before its endpoint is found, as the endpoints of a listener declare it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import unquote_to_bytes

from headrace.http.endpoint import ServedEndpoint

_ORIGIN: Final = rb"(?:[^/]*//[^/]*)?"
"""Beginning of a target in absolute form."""
_QUERY: Final = re.compile(rb"[?#]")
_PARAMETER: Final = re.compile(r"{\w+}")


class Targets:
    """Recognizes the targets of some of the endpoints of a listener."""

    def __init__(self, endpoints: Sequence[ServedEndpoint]) -> None:
        long_polls = [one.endpoint.path for one in endpoints if one.endpoint.long_poll]
        patterns = b"|".join(map(_pattern, long_polls))
        self._long_poll = re.compile(_ORIGIN + b"(?:%b)" % patterns) if long_polls else None
        direct = {_beginning(one.endpoint.path) for one in endpoints if one.steps}
        polled = [*map(_beginning, long_polls)]
        self.direct = tuple(begins.encode() for begins in direct if not any(_overlap(begins, one) for one in polled))
        """Beginnings of targets of endpoints with steps. No long poll begins so."""
        self._producing = [one.endpoint for one in endpoints if one.endpoint.produces]

    def is_long_poll(self, target: bytes) -> bool:
        """Return whether a request with this target may wait for records, whatever its method is."""
        return self._long_poll is not None and bool(
            self._long_poll.fullmatch(unquote_to_bytes(_QUERY.split(target, 1)[0]))
        )

    def topic_of(self, method: str, path: str) -> str | None:
        """Return the topic to which a request produces; empty if its body names it, None if it does not produce."""
        for endpoint in self._producing:
            begins = _beginning(endpoint.path)
            if endpoint.method == method and path.startswith(begins):
                return path.removeprefix(begins).rpartition("/")[2] if endpoint.parameters else ""
        return None


def _pattern(path: str) -> bytes:
    return "[^/]+".join(map(re.escape, _PARAMETER.split(path))).encode()


def _beginning(path: str) -> str:
    """Return a path up to its first parameter."""
    return path.partition("{")[0]


def _overlap(one: str, other: str) -> bool:
    return one.startswith(other) or other.startswith(one)
