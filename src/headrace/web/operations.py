"""What each endpoint takes and answers: the one table of which the API document is made.

Operation ids and names of types are the seed document's where it has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from headrace import errors
from headrace.records import Produced
from headrace.sidecar.produce_answer import ProduceError, ProduceResponse
from headrace.sidecar.produce_request import ProduceRequest
from headrace.sidecar.transactions import TransactionRequest, TransactionResponse
from headrace.web.operation import BODY, HTML, JSON, KAFKA, NDJSON, SCRIPT, STYLE, TEXT, YAML, Errors, Operation, below
from headrace.web.operations_audit import AUDIT_OPERATIONS
from headrace.web.operations_control import CONTROL_OPERATIONS
from headrace.web.operations_dead_letters import DEAD_LETTERS
from headrace.web.operations_jobs import JOB_OPERATIONS
from headrace.web.operations_registrations import REGISTRATION_OPERATIONS


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


class Index(msgspec.Struct):
    """What is served here, by path."""

    headrace: str
    """The version."""
    paths: dict[str, str]


class DocumentQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which spelling of the document is asked for."""

    version: Literal["3.1", "3.0"] = "3.1"


ASSETS: Final = "/specui/"
"""Below it are the parts of the page, which the document leaves out."""
PARTS: Final = (Produced, ProduceError)
"""Types that others name in words only."""
PARAMETERS: Final = {
    "topic": "Name of the topic.",
    "serviceId": "`audit.service_id`.",
    "name": "Name of the consumer.",
    "id": "What it was called in an earlier answer.",
    "job": "Id of the job.",
}
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


_FORMATS: Final[Errors] = (
    errors.EncodeError,
    errors.SchemaNotFound,
    errors.SchemaInvalid,
    *below(errors.SchemaConflict),
)
_KEYS: Final[Errors] = (errors.IdempotencyKeyReused, errors.IdempotencyKeyBusy)
_MISSING: Final[Errors] = (
    errors.ProducerNotEnabled,
    errors.RegistryUnavailable,
    errors.EnvironmentProblem,
)
_WRITING: Final[Errors] = (errors.TopicInternal, *BODY, *_FORMATS, *_MISSING, *KAFKA, *_KEYS)
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
    ("GET", "/health/{serviceId}"): Operation(
        "getHealth", f"{_READINESS}, in one word", {200: TEXT, 400: TEXT}, errors=(errors.PathNotFound,)
    ),
    ("GET", "/live"): Operation("getLive", _LIVENESS, {200: Liveness}),
    ("GET", "/ready"): Operation("getReady", _READINESS, _READY),
    ("GET", "/"): Operation("getIndex", "Where to read on", {200: Index}),
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
    **AUDIT_OPERATIONS,
    **CONTROL_OPERATIONS,
    **DEAD_LETTERS,
    **JOB_OPERATIONS,
    **REGISTRATION_OPERATIONS,
}
"""Every endpoint by method and path."""
