"""`/v1.0/publish` and `/v1.0-alpha1/publish/bulk` of Dapr: each event becomes one record of a topic."""

import base64
import binascii
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.errors import HeadraceError, InvalidRequest, PathNotFound
from headrace.http.auth.principals import WRITE
from headrace.http.endpoint import JSON, KAFKA, RECORDS_BODY, Endpoint, Errors, Rule, is_admin
from headrace.http.messages import HttpResponse, error_response, query_of, read_body, read_json
from headrace.http.request import HttpRequest, RequestHead
from headrace.http.request_checks import IDEMPOTENCY_KEY
from headrace.records import OutgoingRecord, Produced
from headrace.runtime import Clock, next_slice
from headrace.runtime.telemetry.metrics import Metrics
from headrace.sidecar.produce.produce import ProduceService
from headrace.sidecar.produce.produce_request import parse_json
from headrace.sidecar.produce.produce_response import Prepared, Result
from headrace.sidecar.produce.record_ids import end_write, record_ids
from headrace_dialects.dapr.published import Publication, metadata_of, record_of

_TRACE: Final = ("traceparent", "tracestate")
_ERRORS: Final[Errors] = (PathNotFound, errors.TopicInternal, errors.ProducerNotEnabled, *RECORDS_BODY, *KAFKA)
_METADATA: Final = "The query has `metadata.partitionKey`, `metadata.rawPayload` and headers of the record."


class BulkEntry(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """One event of a request."""

    entry_id: str
    """Names it in the response; distinct in the request."""
    event: msgspec.Raw
    content_type: str = "text/plain"
    metadata: dict[str, str] | None = None


_AT_ONCE: Final = 500
"""Entries that are read in one turn of the event loop."""
_decode_entries = msgspec.json.Decoder(list[BulkEntry]).decode


class _Publishing(NamedTuple):
    """What `do` needs: the records, and the ids of a bulk request."""

    prepared: Prepared
    entry_ids: Sequence[str] | None = None


class PublishRoute:
    """Publishes the events of Dapr applications."""

    def __init__(
        self, pubsubs: Collection[str], service: ProduceService, metrics: Metrics, clock: Clock, settings: HttpConfig
    ) -> None:
        self._pubsubs = pubsubs
        self._service = service
        self._metrics = metrics
        self._clock = clock
        self._settings = settings
        self.steps = {PublishRoute.publish.id: self, PublishRoute.bulk.id: self}
        """What serves an endpoint in steps, by endpoint id."""

    def accepts(self, head: RequestHead) -> bool:
        return False

    def needs(self, request: HttpRequest) -> None:
        return None

    @Endpoint(
        "POST",
        "/v1.0/publish/{pubsub}/{topic}",
        "daprPublish",
        "Write one event of a Dapr application to a topic",
        Rule((WRITE,), "produce", "topic"),
        {204: ()},
        request={"*/*": f"The data of one event, or a whole CloudEvent. {_METADATA}"},
        errors=_ERRORS,
        whole=True,
    )
    async def publish(self, request: HttpRequest) -> _Publishing:
        target = self._target(request)
        body = await read_body(request, self._settings)
        kind = request.head.headers.get(b"content-type", b"").decode("latin-1")
        record = record_of(target, body, kind, metadata_of(query_of(request)))
        return _Publishing(await self._prepare(request, [record]))

    @Endpoint(
        "POST",
        "/v1.0-alpha1/publish/bulk/{pubsub}/{topic}",
        "daprPublishBulk",
        "Write events of a Dapr application to a topic",
        Rule((WRITE,), "produce", "topic"),
        {204: ()},
        request={JSON: list[BulkEntry]},
        errors=_ERRORS,
        whole=True,
    )
    async def bulk(self, request: HttpRequest) -> _Publishing:
        target, shared = self._target(request), metadata_of(query_of(request))
        entries = _entries_of(await read_json(request, self._settings), self._settings.max_records)
        records = []
        for index, entry in enumerate(entries):
            if index % _AT_ONCE == _AT_ONCE - 1:
                await next_slice(started=True)
            records.append(_record_of(target, entry, {**shared, **(entry.metadata or {})}))
        return _Publishing(await self._prepare(request, records), [entry.entry_id for entry in entries])

    def do(self, needed: _Publishing, done: Callable[[Sequence[Result]], None]) -> None:
        self._service.do(needed.prepared, done)

    def respond(self, needed: _Publishing, results: Sequence[Result]) -> HttpResponse:
        response = self._service.respond(needed.prepared, results)  # the audit too
        self._metrics.produced(response.requested_records, response.written_records)
        if needed.prepared.write:
            end_write(needed.prepared.write, results)
        failed = {index: result for index, result in enumerate(results) if not isinstance(result, Produced)}
        if not failed:
            return HttpResponse(b"", 204)
        first: HeadraceError = next(iter(failed.values()))
        if needed.entry_ids is None:
            return error_response(first)
        entries = [{"entryId": needed.entry_ids[index], "error": error.description} for index, error in failed.items()]
        body = {**first.body(), "statusCode": 500, "failedEntries": entries, "errorCode": "ERR_PUBSUB_PUBLISH_MESSAGE"}
        return HttpResponse(body, 500)

    def _target(self, request: HttpRequest) -> Publication:
        parameters, headers = request.head.route.parameters, request.head.headers
        pubsub, topic = parameters["pubsub"], parameters["topic"]
        if pubsub not in self._pubsubs:
            names = ", ".join(self._pubsubs) or "none"
            raise PathNotFound(f"{pubsub[:100]!r} is not in dapr.pubsubs ({names}): add it in headrace.yaml")
        if IDEMPOTENCY_KEY in headers:
            raise InvalidRequest("Idempotency-Key has no effect here: send it to POST /producers/{topic}")
        self._service.internal.check_writable(topic, admin=is_admin(request))
        trace = {name: headers[name.encode()].decode("latin-1") for name in _TRACE if name.encode() in headers}
        return Publication(pubsub, topic, self._clock.time(), trace)

    async def _prepare(self, request: HttpRequest, records: Sequence[OutgoingRecord]) -> Prepared:
        ids, topic = record_ids(request, records[0].topic), records[0].topic
        parts = []
        for index, record in enumerate(records):
            if index % _AT_ONCE == _AT_ONCE - 1:
                await next_slice(started=True)
            own = self._service.own_headers(topic, record.headers or ())
            parts.append(await self._service.load(topic, msgspec.structs.replace(record, headers=own), ids))
        whole = [part.records[0] for part in parts]
        size = sum(part.size_bytes or 0 for part in parts)
        return Prepared(whole, size_bytes=size, partitions=parts[0].partitions, write=ids.write)


def _entries_of(body: bytes, limit: int) -> list[BulkEntry]:
    try:
        entries = parse_json(body, _decode_entries)
    except msgspec.ValidationError as cause:
        raise InvalidRequest(f"the body is not an array of entries: {str(cause)[:200]}") from cause
    if not entries:
        raise InvalidRequest("the body has no entries: send an array with at least one")
    if len(entries) > limit:
        raise errors.TooManyRecords(f"more than {limit} entries in one request: send several", limit_records=limit)
    if len({entry.entry_id for entry in entries}) < len(entries):
        raise InvalidRequest("an entryId is repeated: name each entry differently")
    return entries


def _record_of(target: Publication, entry: BulkEntry, metadata: Mapping[str, str]) -> OutgoingRecord:
    """Return the record of one entry; a string is text, or bytes in base64."""
    value: Any = msgspec.json.decode(entry.event)
    data = bytes(entry.event)
    if isinstance(value, str) and entry.content_type.startswith("application/octet-stream"):
        try:
            data = base64.b64decode(value, validate=True)
        except binascii.Error as cause:
            raise InvalidRequest(f"the event of {entry.entry_id[:100]!r} is not base64: encode it") from cause
    elif isinstance(value, str) and not entry.content_type.partition(";")[0].strip().endswith("json"):
        data = value.encode()
    return record_of(target, data, entry.content_type, metadata)
