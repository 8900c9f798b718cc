"""`POST /producers/{topic}`: JSON, lines of JSON, or the value of one record, depending on the Content-Type.

A value is written byte for byte, with its Content-Type as a record header. Key and record headers are taken from HTTP
headers without decoding. Bytes that an HTTP header cannot contain (CR, LF, NUL) need the JSON request. Source of
CloudEvents: 1.0.2, HTTP binding (3.1, binary mode), Kafka binding.
"""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple
from urllib.parse import unquote_to_bytes

from headrace.config.http import HttpConfig
from headrace.errors import ContentTypeMismatch, InvalidRequest, PathNotFound
from headrace.http import endpoint
from headrace.http.auth.principals import WRITE
from headrace.http.endpoint import Endpoint, Rule, is_admin
from headrace.http.messages import JSON, media_type, read_body, read_json, unknown_name
from headrace.http.request import CORRELATION, TRACEABILITY, Headers, HttpRequest, RequestHead
from headrace.http.request_checks import IDEMPOTENCY_KEY
from headrace.records import Header, OutgoingRecord, Produced
from headrace.runtime import next_slice
from headrace.runtime.telemetry.metrics import Metrics
from headrace.sidecar.produce.ndjson_route import NDJSON, StreamProduceRoute
from headrace.sidecar.produce.produce import LONG_BODY_BYTES, MOST_AT_ONCE, ProduceService, Requested
from headrace.sidecar.produce.produce_request import ProduceRequest
from headrace.sidecar.produce.produce_response import EncodedResponse, Prepared, ProduceError, ProduceResponse, Result
from headrace.sidecar.produce.record_ids import end_write, record_ids
from headrace.sidecar.produce.transaction_routes import KEYED_HEADERS, WRITE_ERRORS, Writing
from headrace.sidecar.produce.transactions import PreparedTransaction

PATH: Final = "/producers/{topic}"
_LINES: Final = (
    "A `ProduceRecord` per line, any number of them. Each line gets a line in response while the request is sent. The "
    "fields of `ProduceRequest` other than `records` are query parameters."
)
_RAW_HEADERS: Final = {
    "X-Headrace-Key": "Key of the record, if the body is not JSON.",
    "X-Headrace-Partition": "Its partition.",
    "X-Headrace-Timestamp": "Its timestamp, in milliseconds.",
    "X-Headrace-Tombstone": "`true`: it has no value, and the request no body.",
    "ce-id": "With `ce-specversion`, `ce-source`, `ce-type`: the body is the data of a CloudEvent.",
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
_EVENT: Final = b"ce-"
_EVENTS: Final = b"application/cloudevents"
_ATTRIBUTE: Final = re.compile(r"(?!(?:data|datacontenttype)$)[a-z0-9]{1,100}")
_QUOTED: Final = re.compile(rb'"((?:[^"\\]|\\.)*)"')
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
        self.do = service.do
        self.steps = {ProduceRoute.load.id: self}
        """What serves an endpoint in steps, by endpoint id."""

    def accepts(self, head: RequestHead) -> bool:
        headers = head.headers
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or not _UNUSUAL.isdisjoint(headers) or head.query or not head.keep_alive:
            return False
        if headers.get(b"content-type") not in _JSON_TYPES and media_type(headers) in _NOT_RAW:
            return False
        return len(headers) == len(head.fields) and 0 < int(length) <= self._settings.max_body_bytes

    def needs(self, request: HttpRequest) -> Prepared | None:
        topic, body = request.head.route.parameters["topic"], b"".join(request.body.chunks)
        self._service.internal.check_writable(topic, admin=is_admin(request))
        if len(body) > LONG_BODY_BYTES and body.count(b"{") > 2 * MOST_AT_ONCE + 1:
            return None
        return self._service.needs(topic, self._requested(request, topic, body), record_ids(request, topic))

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
    )
    async def load(self, request: HttpRequest) -> Prepared | PreparedTransaction | EncodedResponse | None:
        topic, headers = request.head.route.parameters["topic"], request.head.headers
        kind = _kind(headers)
        self._service.internal.check_writable(topic, admin=is_admin(request))
        if kind in NDJSON:
            await self.stream(topic, request)
            return None
        body = await (read_json if kind in (JSON, b"") else read_body)(request, self._settings)
        if await self._writing.forward_key(request, topic, body):
            return None
        if len(body) > LONG_BODY_BYTES:
            await next_slice()
        key = headers.get(IDEMPOTENCY_KEY)
        if key is not None:
            request.head.route = request.head.route._replace(steps=self._writing)  # it is a transaction
            return await self._load_keyed(key, request, topic, body)
        requested = self._requested(request, topic, body)
        return await self._service.load(topic, requested, record_ids(request, topic))

    def respond(self, needed: Prepared, results: Sequence[Result]) -> EncodedResponse:
        response = self._service.respond(needed, results)
        if needed.write:
            end_write(needed.write, results)
        return self._writing.counted(response)

    def _requested(self, request: HttpRequest, topic: str, body: bytes) -> Requested:
        head = request.head
        if head.parsed is None:  # found once for all requests with this head
            head.parsed = _IS_JSON if _kind(head.headers) in (JSON, b"") else RawHead.of(_own_fields(head))
        is_json = head.parsed is _IS_JSON
        return self._service.parse(body) if is_json else raw_record(self._service, topic, head.parsed, body)

    async def _load_keyed(
        self, key: bytes, request: HttpRequest, topic: str, body: bytes
    ) -> PreparedTransaction | EncodedResponse:

        async def prepare() -> PreparedTransaction:
            requested = self._requested(request, topic, body)
            return self._writing.transactions.of_produce(
                await self._service.load(topic, requested, record_ids(request))
            )

        compared = body
        if _kind(request.head.headers) not in (JSON, b""):
            parts = sorted(one for one in _own_fields(request.head) if one[0].startswith((_PREFIX, _EVENT)))
            fields = [name + b":" + value for name, value in parts]
            compared = b"\n".join([request.head.headers.get(b"content-type", b""), *fields, b"", body])
        return await self._writing.idempotency.load(key, topic, compared, prepare)


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
        kind, content_type, key = media_type(headers), headers.get(b"content-type", b""), headers.get(_KEY)
        if is_event(headers):
            attributes = event_attributes(fields)
            own += [(f"ce_{name}", text.encode()) for name, text in attributes.items()]
            key = attributes["partitionkey"].encode() if key is None and "partitionkey" in attributes else key
        return RawHead(content_type, kind, key, own, partition, timestamp_ms, tombstone == b"true")


_IS_JSON: Final = object()
"""In place of a `RawHead`: the body is a request with records."""


def _kind(headers: dict[bytes, bytes]) -> bytes:
    """Return the media type that says how a body is read; that of an event in binary mode is the type of a value."""
    return b"*/*" if is_event(headers) else media_type(headers)


def is_event(headers: dict[bytes, bytes]) -> bool:
    """Return whether the headers are those of a CloudEvent in binary mode, complete or not."""
    return any(name.startswith(_EVENT) for name in headers) and not media_type(headers).startswith(_EVENTS)


def event_attributes(fields: Headers) -> dict[str, str]:
    """Return the attributes of a CloudEvent in binary mode; InvalidRequest if it is not a whole one."""
    found: dict[str, str] = {}
    for header, value in fields:
        name = header.removeprefix(_EVENT).decode("latin-1")
        if header.startswith(_EVENT):
            if not _ATTRIBUTE.fullmatch(name) or name in found:
                raise InvalidRequest(f"ce-{name[:60]} is repeated, or not an attribute of a CloudEvent: remove it")
            quoted = _QUOTED.fullmatch(value)
            try:
                text = (re.sub(rb"\\(.)", rb"\1", quoted[1]) if quoted else value).decode("ascii")
                found[name] = unquote_to_bytes(text).decode()
            except UnicodeDecodeError as cause:
                raise InvalidRequest(f"ce-{name} is not percent-encoded UTF-8: encode all but visible ASCII") from cause
    if missing := [f"ce-{name}" for name in ("specversion", "id", "source", "type") if not found.get(name)]:
        raise InvalidRequest(f"the CloudEvent is not complete: send also {', '.join(missing)}")
    if found["specversion"] != "1.0":
        raise InvalidRequest(f"ce-specversion is {found['specversion'][:20]!r}: send events of version 1.0")
    return found


def _own_fields(head: RequestHead) -> Headers:
    """Return the headers that the client sent, in order."""
    return [field for field in head.fields if field[0] != _FORWARDED]


def raw_record(service: ProduceService, topic: str, head: RawHead, body: bytes) -> OutgoingRecord:
    """Return the record of a request.

    Raises:
        InvalidRequest, ContentTypeMismatch: The body does not fit the head.
    """
    own = service.own_headers(topic, head.own) if head.own else ()
    _check_kind(head.kind, body)
    if body and head.is_tombstone:
        raise InvalidRequest("a tombstone has no value: send no body with X-Headrace-Tombstone: true")
    if not (head.content_type or head.is_tombstone):
        raise ContentTypeMismatch("Content-Type is missing: send that of the data, or X-Headrace-Tombstone: true")
    headers = [*([("content-type", head.content_type)] if head.content_type else ()), *own]
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
