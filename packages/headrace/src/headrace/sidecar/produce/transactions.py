"""`POST /transactions`: records for several topics; consumers at read_committed see all or none."""

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Annotated, Final, NamedTuple

import msgspec

from headrace import errors
from headrace.config.producer_config import ProducerConfig
from headrace.kafka import GroupOffsets, TransactionalProducers
from headrace.kafka.transactions.transaction_job import LastRecord
from headrace.kafka.write_request import failures_of
from headrace.records import OutgoingRecord
from headrace.runtime.telemetry.audit import Audit
from headrace.sidecar.active.instance import ActiveInstance
from headrace.sidecar.active.requests import Position
from headrace.sidecar.produce.produce import ProduceService, RequestIds
from headrace.sidecar.produce.produce_request import (
    CountedRecord,
    ParsedRequest,
    ProduceRequest,
    check_present,
    explained,
    parse_counted,
)
from headrace.sidecar.produce.produce_response import (
    EncodedResponse,
    Prepared,
    ProduceResponse,
    Result,
    entries_of,
    reason_of,
    response_of,
    with_reason,
)

_GRACE_SECONDS: Final = 1.0
"""Added to the limit of a request, so that a transaction that has not begun fails as such first."""
_MAX_TOPICS: Final = 100


class TopicRequest(ProduceRequest, kw_only=True, rename="camel", gc=False):
    """The records of a transaction for one topic."""

    topic: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9._-]{1,249}$")]
    records: list[CountedRecord]  # type: ignore[assignment]  # they are only read


class ConsumerOffsets(msgspec.Struct, rename="camel", forbid_unknown_fields=True, gc=False):
    """Offsets of the last processed records of an instance, as in its commits."""

    group: str
    instance_id: str
    offsets: Annotated[list[Position], msgspec.Meta(min_length=1)]


class TransactionRequest(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """The body of `POST /transactions`."""

    topics: Annotated[list[TopicRequest], msgspec.Meta(min_length=1, max_length=_MAX_TOPICS)]
    consumer: ConsumerOffsets | None = None
    """What was processed to make the records; committed together with them, or not at all."""


class TopicResponse(ProduceResponse, kw_only=True):
    """The outcome of one part of a transaction."""

    topic: str


class TransactionResponse(msgspec.Struct):
    """The outcome of a transaction, in the order of the request's parts."""

    topics: list[TopicResponse]


class PreparedTransaction(NamedTuple):
    """The records of one transaction, and its response."""

    records: list[OutgoingRecord]
    response_of: Callable[[Sequence[Result]], EncodedResponse]
    """Makes the response from one result per record; may be called on any thread, and repeatedly."""
    group: GroupOffsets | None = None
    committed: Callable[[], None] = lambda: None
    """Called when the transaction is committed."""
    last_record: LastRecord | None = None
    """Makes the entry of a request with a key."""
    settled: Callable[[Sequence[Result] | None], None] = lambda results: None
    """Called with the results once they are known; with None if nothing was sent."""


_decode = msgspec.json.Decoder(TransactionRequest).decode
_encode_json = msgspec.json.Encoder().encode
_FIELDS: Final = [
    field.encode_name
    for kind in (TransactionRequest, TopicRequest, CountedRecord, ConsumerOffsets, Position)
    for field in msgspec.structs.fields(kind)
]


def parse_transaction(body: bytes, max_records: int) -> TransactionRequest:
    """Parse the JSON text of a request; unknown fields are rejected whatever the settings.

    Raises:
        RequestBodyMissing, ContentTypeMismatch, InvalidRequest, TooManyRecords: It is not a transaction, or too large.
    """
    try:
        request = parse_counted(body, _decode, max_records)
    except msgspec.ValidationError as cause:
        raise errors.InvalidRequest(f"the body is not a valid transaction: {explained(str(cause), _FIELDS)}") from cause
    for part in request.topics:
        try:
            check_present(part.records)
        except errors.InvalidRequest as error:
            error.parameters["topic"] = part.topic
            raise
    return request


@dataclasses.dataclass(eq=False)
class Transactions:
    """Prepares requests, and writes each as one transaction."""

    _settings: ProducerConfig
    _produce: ProduceService
    _producers: TransactionalProducers
    _audit: Audit | None = None

    def __post_init__(self) -> None:
        self.internal = self._produce.internal
        """The topics that are reserved for Headrace."""

    def of_produce(self, prepared: Prepared) -> PreparedTransaction:
        """Return a transaction with the records and the response of a produce request."""
        always_200 = self._settings.always_200
        return PreparedTransaction(prepared.records, lambda results: response_of(prepared, results, always_200))

    async def prepare(
        self, request: TransactionRequest, ids: RequestIds, instance: ActiveInstance | None = None
    ) -> PreparedTransaction:
        """Prepare the records of all topics, and the offsets of the instance that the request names.

        Raises:
            RequestError, FormatError, RegistryUnavailable, KafkaUnavailable: As for a produce request; the error names
                the topic. Nothing was sent.
            InstanceState, CommitRefused: The instance may not commit these offsets.
        """
        parts: list[tuple[str, Prepared]] = []
        for part in request.topics:
            try:
                parts.append((part.topic, await self._produce.load(part.topic, ParsedRequest(part), ids)))
            except (errors.RequestError, errors.FormatError) as error:
                error.parameters.setdefault("topic", part.topic)
                raise
        records = [record for _, prepared in parts for record in prepared.records]
        if not records:
            raise errors.InvalidRequest(
                "the transaction has no records; to commit only offsets, use the commit of the instance"
            )
        prepared = PreparedTransaction(records, functools.partial(_response_of, parts))
        if request.consumer is None or instance is None:
            return prepared
        group, committed = await instance.for_transaction([one.processed() for one in request.consumer.offsets])
        return prepared._replace(group=group, committed=committed)

    def do(self, prepared: PreparedTransaction, done: Callable[[Sequence[Result]], None]) -> None:
        """Write a transaction. `done` is called once, when its outcome is known or the deadline is over.

        Raises:
            ProducerQueueFull: Too many transactions wait; nothing was sent.
        """
        try:
            outcome = self._producers.submit(prepared.records, prepared.last_record, prepared.group)
        except BaseException:
            prepared.settled(None)
            raise
        waiting = [done]

        def respond(results: Sequence[Result]) -> None:
            deadline.cancel()
            if waiting:
                waiting.pop()(results)

        def settled(_: object) -> None:
            if outcome.cancelled():  # it is unknown
                return respond(unknown)
            results = outcome.result()
            if not failures_of(results):
                prepared.committed()
            prepared.settled(results)
            return respond(results)

        unknown = [errors.KafkaTimeout("the transaction may or may not have been committed")] * len(prepared.records)
        seconds = self._settings.delivery_timeout_seconds + _GRACE_SECONDS
        deadline = asyncio.get_running_loop().call_later(seconds, respond, unknown)
        outcome.add_done_callback(settled)

    def respond(self, prepared: PreparedTransaction, results: Sequence[Result]) -> EncodedResponse:
        """Return the response for the results of a transaction; audit them."""
        if prepared.last_record:
            kind = errors.KafkaTimeout
            results = [kind(one.description, keyed=True) if isinstance(one, kind) else one for one in results]
        response = prepared.response_of(results)
        if self._audit:
            self._audit.produced(prepared.records, results)
        return response


def _response_of(parts: Sequence[tuple[str, Prepared]], results: Sequence[Result]) -> EncodedResponse:
    bodies = []
    first = 0
    failures = failures_of(results)
    for topic, prepared in parts:
        own = results[first : first + len(prepared.records)]
        part = _encode_json(entries_of(prepared, own, failures_of(own), failed=bool(failures)))
        bodies.append(b'{"topic":' + _encode_json(topic) + b"," + part[1:])
        first += len(own)
    body = b'{"topics":[' + b",".join(bodies) + b"]}"
    reason = reason_of(failures) if failures else None
    return with_reason(body, reason, len(results), 0 if failures else len(results))
