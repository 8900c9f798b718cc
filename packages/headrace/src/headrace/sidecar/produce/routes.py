"""`POST /producers/{topic}`: JSON, lines of JSON, or the value of one record, depending on the Content-Type.

A value is written byte for byte, with its Content-Type as a record header. Key and record headers are taken from HTTP
headers without decoding. Bytes that an HTTP header cannot contain (CR, LF, NUL) need the JSON request.
"""

import re
from collections.abc import Callable
from typing import Final, NamedTuple

from headrace.config.http import HttpConfig
from headrace.errors import ContentTypeMismatch, InvalidRequest, PathNotFound
from headrace.http import endpoint
from headrace.http.auth.principals import WRITE
from headrace.http.endpoint import Endpoint, Rule, is_admin
from headrace.http.messages import (
    CORRELATION,
    JSON,
    TRACEABILITY,
    HttpResponse,
    media_type,
    read_body,
    read_json,
    unknown_name,
)
from headrace.http.request import Headers, HttpRequest
from headrace.http.request_checks import IDEMPOTENCY_KEY
from headrace.records import Header, OutgoingRecord, Produced
from headrace.runtime.telemetry.metrics import Metrics
from headrace.sidecar.produce.ndjson_route import NDJSON, StreamProduceRoute
from headrace.sidecar.produce.produce import ProduceService
from headrace.sidecar.produce.produce_request import ProduceRequest
from headrace.sidecar.produce.produce_response import Prepared, ProduceError, ProduceResponse, Result
from headrace.sidecar.produce.transaction_routes import KEYED_HEADERS, WRITE_ERRORS, Writing, record_ids

PATH: Final = "/producers/{topic}"
_LINES: Final = (
    "A `ProduceRecord` per line, any number of them. Each line gets a line in response while the request is sent. The "
    "fields of `ProduceRequest` other than `records` are query parameters."
)
_FOREIGN_PATHS: Final = {
    "Confluent REST Proxy 2": ("/topics/{topic}", "/topics/{topic}/partitions/{partition}"),
    "Confluent REST Proxy 3": ("/v3/clusters/{cluster}/topics/{topic}/records",),
    "Dapr": ("/v1.0/publish/{pubsub}/{topic}", "/v1.0-alpha1/publish/bulk/{pubsub}/{topic}"),
}
"""Where other products take records; the response names the path of Headrace."""
_RAW_HEADERS: Final = {
    "X-Headrace-Key": "Key of the record, if the body is not JSON.",
    "X-Headrace-Partition": "Its partition.",
    "X-Headrace-Timestamp": "Its timestamp, in milliseconds.",
    "X-Headrace-Tombstone": "`true`: it has no value, and the request no body.",
}

_PREFIX: Final = b"x-headrace-"
_HEADER: Final = b"x-headrace-header-"
_KEY: Final = b"x-headrace-key"
_FORWARDED: Final = b"x-headrace-forwarded"
_PARTITION: Final = b"x-headrace-partition"
_TIMESTAMP: Final = b"x-headrace-timestamp"
_TOMBSTONE: Final = b"x-headrace-tombstone"
_KNOWN: Final = ("X-Headrace-Key", "X-Headrace-Partition", "X-Headrace-Timestamp", "X-Headrace-Tombstone")
_ONCE: Final = {name.lower().encode() for name in _KNOWN}
_ENVELOPE: Final = b"application/vnd.kafka."
_TEXT: Final = b"text/plain"
_ENVELOPE_TEXT: Final = re.compile(rb'\s*\{\s*"(?:records|(?:key|value)(?:Format|Schema\w*))"\s*:')
_JSON_TYPES: Final = (b"application/json", b"application/json; charset=utf-8")
_NOT_RAW: Final = (JSON, b"", *NDJSON)
_UNUSUAL: Final = frozenset(
    b"""
    content-encoding expect idempotency-key origin sec-fetch-site transfer-encoding upgrade x-headrace-forwarded
    x-scope-token
    """.split()
)
_FORM: Final = b"application/x-www-form-urlencoded"


class ProduceRoute:
    """Writes records to a topic."""

    described_types = Produced, ProduceError
    """Types that only descriptions of its responses name."""

    def __init__(self, service: ProduceService, writing: Writing, metrics: Metrics, settings: HttpConfig) -> None:
        self._service = service
        self._writing = writing
        self._settings = settings
        self.stream = StreamProduceRoute(service, metrics, settings)
        self.direct = {ProduceRoute.produce.id: DirectProduce(service, writing, settings)}
        """Direct handlers by endpoint id."""

    @Endpoint(
        "POST",
        PATH,
        "postData",
        "Write records to a topic",
        Rule((WRITE,), "produce", "topic"),
        {200: (ProduceResponse, endpoint.NDJSON)},
        request={endpoint.JSON: ProduceRequest, endpoint.NDJSON: _LINES, "*/*": "The value of one record."},
        example={
            "keyFormat": "string",
            "valueFormat": "json",
            "records": [{"key": "alice", "value": {"count": 2}, "headers": {"source": "crm"}}, {"value": 1}],
        },
        headers={**KEYED_HEADERS, **_RAW_HEADERS},
        errors=(*WRITE_ERRORS, PathNotFound),
        error_fields=ProduceResponse,
        whole=True,
        foreign_paths=sum(_FOREIGN_PATHS.values(), ()),
    )
    async def produce(self, request: HttpRequest) -> None:
        topic, headers = request.parameters["topic"], request.headers
        self._service.check_writable(topic, admin=is_admin(request))
        if headers.get(b"content-type") != JSON and media_type(headers) not in (JSON, b""):
            other = self.stream if media_type(headers) in NDJSON else self._produce_raw
            await other(topic, request)
            return
        body = await read_json(request, self._settings)
        if (key := headers.get(IDEMPOTENCY_KEY)) is not None:
            if await self._writing.forward_key(request, topic, body):
                return
            ids = record_ids(request)
            await self._writing.produce_once(request, key, topic, body, lambda: self._service.prepare(topic, body, ids))
            return
        prepared = await self._service.prepare(topic, body, record_ids(request, topic))
        await self._writing.send_response(request, await self._service.write(prepared))

    async def _produce_raw(self, topic: str, request: HttpRequest) -> None:
        headers = request.headers
        body = await read_body(request, self._settings)
        if await self._writing.forward_key(request, topic, body):
            return
        fields = [one for one in request.fields if one[0] != _FORWARDED]
        record = raw_record(self._service, topic, RawHead.of(fields), body)
        key = headers.get(IDEMPOTENCY_KEY)
        prepared = await self._service.prepare_record(record, record_ids(request, "" if key else topic))
        if key is None:
            await self._writing.send_response(request, await self._service.write(prepared))
            return

        async def as_prepared() -> Prepared:
            return prepared

        parts = sorted(part for part in fields if part[0].startswith(_PREFIX))
        compared = b"\n".join([headers[b"content-type"], *(name + b":" + value for name, value in parts), b"", body])
        await self._writing.produce_once(request, key, topic, compared, as_prepared)


class DirectProduce:
    """Serves the usual request: JSON or one value of known length, in formats without a schema, to a known topic."""

    def __init__(self, service: ProduceService, writing: Writing, settings: HttpConfig) -> None:
        self._service = service
        self._writing = writing
        self._settings = settings

    def accepts(self, request: HttpRequest) -> bool:
        headers = request.headers
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or not _UNUSUAL.isdisjoint(headers) or request.query or not request.keep_alive:
            return False
        if headers.get(b"content-type") not in _JSON_TYPES and media_type(headers) in _NOT_RAW:
            return False
        return len(headers) == len(request.fields) and 0 < int(length) <= self._settings.max_body_bytes

    def prepare(self, request: HttpRequest) -> Prepared | None:
        topic, body, head = request.parameters["topic"], b"".join(request.chunks), request.direct_head
        self._service.check_writable(topic, admin=is_admin(request))
        ids = record_ids(request, topic)
        if head is None:
            if request.headers.get(b"content-type") in _JSON_TYPES:
                return self._service.begin(topic, body, ids)
            head = request.direct_head = RawHead.of(request.fields)
        return self._service.begin_record(raw_record(self._service, topic, head, body), ids)

    def start(self, prepared: Prepared, done: Callable[[list[Result]], None]) -> None:
        self._service.hand_over(prepared, done)

    def response(self, prepared: Prepared, results: list[Result]) -> HttpResponse:
        return self._writing.response(self._service.answer(prepared, results))


class RawHead(NamedTuple):
    """What the head of a request says about the record whose value is the body."""

    content_type: bytes
    kind: bytes
    """The media type in it."""
    key: bytes | None
    own: list[Header]
    """The record headers, in order."""
    partition: int | None
    timestamp_ms: int
    is_tombstone: bool

    @staticmethod
    def of(fields: Headers) -> "RawHead":
        """Return it for the HTTP headers, in order; InvalidRequest if one is not valid."""
        headers = dict(fields)
        own = _check(fields)
        tombstone = headers.get(_TOMBSTONE, b"false").lower()
        if tombstone not in (b"true", b"false"):
            raise InvalidRequest("X-Headrace-Tombstone is not valid: send true or false")
        partition, timestamp_ms = _number(headers, _PARTITION, 2**31), _number(headers, _TIMESTAMP, 2**63) or 0
        kind = media_type(headers)
        return RawHead(
            headers[b"content-type"], kind, headers.get(_KEY), own, partition, timestamp_ms, tombstone == b"true"
        )


def raw_record(service: ProduceService, topic: str, head: RawHead, body: bytes) -> OutgoingRecord:
    """Return the record of a request.

    Raises:
        InvalidRequest, ContentTypeMismatch: The body does not fit the head.
    """
    own = service.own_headers(topic, head.own) if head.own else ()
    _check_kind(head.kind, body)
    if body and head.is_tombstone:
        raise InvalidRequest("a tombstone has no value: send no body with X-Headrace-Tombstone: true")
    headers = [("content-type", head.content_type), *own]
    value = None if head.is_tombstone else body
    return OutgoingRecord(topic, head.key, value, headers, head.partition, head.timestamp_ms)


def _check(headers: Headers) -> list[Header]:
    """Return the record headers in a request, in order."""
    own = [(name, value) for name, value in headers if name.startswith(_PREFIX)]
    once = [name for name, _ in own if not name.startswith(_HEADER)]
    for name in once:
        if name not in _ONCE:
            raise unknown_name("the header", name.decode("latin-1"), [*_KNOWN, "X-Headrace-Header-<name>"])
        if once.count(name) > 1:
            raise InvalidRequest(f"the header {name.decode()} is repeated: send it once")
    named = [(name.removeprefix(_HEADER), value) for name, value in own if name.startswith(_HEADER)]
    if any(not name for name, _ in named):
        raise InvalidRequest("X-Headrace-Header- must be followed by the name of the record header")
    return [(name.decode("latin-1"), value) for name, value in named if name not in (CORRELATION, TRACEABILITY)]


def _check_kind(kind: bytes, body: bytes) -> None:
    """Return if the body can be a value."""
    if kind == _FORM and body.lstrip()[:1] == b"{":
        text = "Content-Type is a form, but the body looks like JSON"
    elif kind == _TEXT and _ENVELOPE_TEXT.match(body):
        text = "Content-Type is text, but the body looks like a request with records"
    elif kind.startswith(_ENVELOPE):
        text = "records in the envelope of another API are not accepted"
    else:
        return
    raise ContentTypeMismatch(
        f"{text}: send Content-Type: application/json and a body as for POST /producers/{{topic}}"
    )


def _number(headers: dict[bytes, bytes], name: bytes, limit: int) -> int | None:
    text = headers.get(name)
    if text is None:
        return None
    if not text.isdigit() or len(text) > 19 or int(text) >= limit:
        raise InvalidRequest(f"{name.decode()} is not valid: send a whole number from 0 to {limit - 1}")
    return int(text)
