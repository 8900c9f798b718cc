"""What each endpoint takes and answers: the one table of which the API document is made.

Operation ids and names of types are the seed document's where it has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

import msgspec

from headrace import errors
from headrace.errors import HeadraceError
from headrace.records import Produced
from headrace.sidecar.produce_answer import ProduceError, ProduceResponse
from headrace.sidecar.produce_request import ProduceRequest
from headrace.sidecar.transactions import TransactionRequest, TransactionResponse

Errors = tuple[type[HeadraceError], ...]

_NONE: Final[Mapping[Any, Any]] = MappingProxyType({})
JSON, TEXT, HTML, YAML = "application/json", "text/plain", "text/html", "text/yaml"
NDJSON, SCRIPT, STYLE = "application/x-ndjson", "text/javascript", "text/css"


class Status(msgspec.Struct, rename="camel"):
    """Why a request was not served."""

    status_code: int
    code: str
    message: str
    description: str
    severity: Literal["ERROR"]
    metadata: dict[str, Any]


class Liveness(msgspec.Struct):
    """The process answers."""

    status: Literal["alive"]


class ServiceReadiness(msgspec.Struct):
    """Whether one service does its work, and if not, why."""

    ready: bool
    reason: str


class ReadinessReport(msgspec.Struct):
    """Whether every service does its work; which ones there are is told to known callers."""

    ready: bool
    services: dict[str, ServiceReadiness] | msgspec.UnsetType = msgspec.UNSET


class DocumentQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which spelling of the document is asked for."""

    version: Literal["3.1", "3.0"] = "3.1"


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


PARTS: Final = (Produced, ProduceError)
"""Types that others name in words only."""
PARAMETERS: Final = {"topic": "Name of the topic.", "serviceId": "Any name: the answer is the process's own."}
"""What stands in paths."""
_CORRELATION: Final = "Names the request; it comes back in the answer"
_IDS: Final = {
    "X-Correlation-Id": f"{_CORRELATION}, and is written into records that have none of their own.",
    "X-Traceability-Id": f"{_CORRELATION}, and is written into records that have none of their own.",
    "traceparent": "W3C Trace Context; it is written into records that have none of their own.",
}
_KEYED: Final = {
    **_IDS,
    "Idempotency-Key": "Names the request for its caller and topic: when it comes again, it writes nothing and is "
    "answered as before, with `Idempotency-Replayed: true`.",
}
_RAW: Final = {
    "X-Headrace-Key": "Key of the record that a body other than JSON is.",
    "X-Headrace-Partition": "Its partition.",
    "X-Headrace-Timestamp": "Its timestamp, in milliseconds.",
    "X-Headrace-Tombstone": "`true`: it has no value, and the request no body.",
}
_LINES: Final = (
    "A `ProduceRecord` per line, without an end; answered on the way with a line for each. What `ProduceRequest` has "
    "beside `records` stands in the query."
)


def _below(top: type[HeadraceError]) -> Errors:
    return top, *(error for below in top.__subclasses__() for error in _below(below))


_FORMATS: Final[Errors] = (
    errors.EncodeError,
    errors.SchemaNotFound,
    errors.SchemaInvalid,
    *_below(errors.SchemaConflict),
)
_KAFKA: Final[Errors] = (errors.TopicNotFound, errors.PartitionNotFound, *_below(errors.KafkaError))
_KEYS: Final[Errors] = (errors.IdempotencyKeyReused, errors.IdempotencyKeyBusy)
_BODY: Final[Errors] = (
    errors.InvalidRequest,
    errors.ContentTypeMismatch,
    errors.RequestBodyMissing,
    errors.PayloadTooLarge,
    errors.TooManyRecords,
    errors.EncodingRefused,
)
_MISSING: Final[Errors] = (
    errors.ProducerNotEnabled,
    errors.RegistryUnavailable,
    errors.EnvironmentProblem,
)
_WRITING: Final[Errors] = (*_BODY, *_FORMATS, *_MISSING, *_KAFKA, *_KEYS)
_LIVENESS: Final = "Whether the process lives"
_READINESS: Final = "Whether it does its work"
_READY: Final = {200: ReadinessReport, 503: ReadinessReport}
_DOCUMENT_ERRORS: Final = (errors.InvalidRequest,)

OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("POST", "/producers/{topic}"): Operation(
        "postData",
        "Write records to a topic",
        {200: (ProduceResponse, NDJSON)},
        request={JSON: ProduceRequest, NDJSON: _LINES, "*/*": "The value of one record."},
        example={
            "keyFormat": "string",
            "valueFormat": "json",
            "records": [{"key": "alice", "value": {"count": 2}, "headers": {"source": "crm"}}, {"value": 1}],
        },
        headers={**_KEYED, **_RAW},
        errors=(*_WRITING, errors.PathNotFound),
        beside=ProduceResponse,
    ),
    ("POST", "/transactions"): Operation(
        "postTransaction",
        "Write records to several topics, all of them or none",
        {200: TransactionResponse},
        request={JSON: TransactionRequest},
        example={"topics": [{"topic": "orders", "records": [{"key": "a", "value": {"count": 2}}]}]},
        headers=_KEYED,
        errors=_WRITING,
        beside=TransactionResponse,
    ),
    ("GET", "/health/liveness"): Operation("getLiveness", _LIVENESS, {200: Liveness}),
    ("GET", "/health/readiness"): Operation("getReadiness", _READINESS, _READY),
    ("GET", "/health/{serviceId}"): Operation("getHealth", f"{_READINESS}, in one word", {200: TEXT, 400: TEXT}),
    ("GET", "/live"): Operation("getLive", _LIVENESS, {200: Liveness}),
    ("GET", "/ready"): Operation("getReady", _READINESS, _READY),
    ("GET", "/metrics"): Operation("getMetrics", "Every number, for Prometheus", {200: TEXT}),
    ("GET", "/spec.yaml"): Operation(
        "getSpecification", "This document as YAML", {200: YAML}, query=DocumentQuery, errors=_DOCUMENT_ERRORS
    ),
    ("GET", "/openapi.json"): Operation(
        "getOpenApi", "This document as JSON", {200: JSON}, query=DocumentQuery, errors=_DOCUMENT_ERRORS
    ),
    ("GET", "/specui.html"): Operation("getSpecificationPage", "This document to read and to try out", {200: HTML}),
    ("GET", "/specui/start.js"): Operation("getStart", "Start of that page", {200: SCRIPT}),
    ("GET", "/specui/swagger-ui-bundle.js"): Operation("getCode", "Code of that page", {200: SCRIPT}),
    ("GET", "/specui/swagger-ui.css"): Operation("getStyle", "Style of that page", {200: STYLE}),
}
"""Every endpoint by method and path."""
