"""`/consumers/deadLetter/active`: clients fetch dead letters, and write records that they cannot process.

Source: light-4j kafka-sidecar, its handlers of these operations.
"""

import base64
import contextlib
import dataclasses
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Final

import msgspec

from headrace import errors
from headrace.config.active import ActiveConsumersConfig
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.consumers.running_consumer import RunningConsumer, RunningConsumers
from headrace.delivery.dead_letter import STACK_TRACE, DeadLetterTopic, headers_of, origin_of
from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.formats.choice import Codecs, SchemaChoice
from headrace.http.auth.principals import READ, WRITE
from headrace.http.endpoint import JSON, KAFKA, RECORDS_BODY, Call, Endpoint, Errors, Rule, owner_of, require
from headrace.http.messages import HttpResponse, decode_query
from headrace.http.request import HttpRequest
from headrace.kafka import Admin, ReadPolicy
from headrace.kafka.names import check_group, check_topic
from headrace.kafka.timestamps import parse_time
from headrace.records import Header, OutgoingRecord, Produce, Produced, Record, TopicPartition, is_reserved
from headrace.runtime import next_slice
from headrace.sidecar.active.instance import ActiveInstance
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.active.requests import ConsumedRecord, ExactHeader
from headrace.sidecar.active.routes import ActiveEndpoints, load_read, respond_read
from headrace.sidecar.active.spec import InstanceSpec, Topics

GROUP: Final = "active-replay"
INSTANCE: Final = "Active-Replay-1289990"
_ACCESS: Final = (READ, WRITE)
_FETCH: Final = Rule((READ,), "consume", also="group")
_ERRORS: Final[Errors] = (*ActiveEndpoints.records.errors, errors.InvalidTopicName, errors.InstanceExists)
_MOST_RECORDS: Final = 10_000
_MOST_WAIT_MS: Final = 30_000


class ActiveReplayQuery(msgspec.Struct, forbid_unknown_fields=True):
    """Which dead letters to fetch."""

    group: str = GROUP
    """Consumer group whose offsets store how far they were fetched."""
    topic: str | None = None
    """Origin topics, separated by commas; by default those of the reactive consumers."""
    timeout: int | None = None
    """How long to wait for dead letters, in milliseconds."""


class FailedRecord(msgspec.Struct, rename="camel"):
    """The record as it was fetched. Other fields are ignored."""

    topic: str
    partition: int
    offset: int
    timestamp: int = -1
    headers: dict[str, str | None] | None = None
    header_list: list[ExactHeader] | None = None
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    raw_value: str | None = None


class FailedResult(msgspec.Struct, rename="camel"):
    """A record that was not processed. Other fields are ignored."""

    record: FailedRecord | None = None
    consumer_record: FailedRecord | None = None
    """The same, under its name in the light-4j sidecar's document."""
    key: str | None = None
    """Key of the dead letter."""
    stacktrace: str | None = None
    correlation_id: str | None = None
    traceability_id: str | None = None


class WrittenDeadLetter(msgspec.Struct, rename="camel"):
    """Where a dead letter is."""

    topic: str
    partition_id: int
    offset: int
    timestamp: float
    """Seconds since the epoch."""
    serialize_key_size: int
    serialize_value_size: int


_split: Final = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode: Final = msgspec.json.Decoder(FailedResult).decode
_SLICE: Final = 50
"""Results that are handled before other work gets a turn."""


@dataclasses.dataclass(eq=False)
class ActiveDeadLetterEndpoints:
    """Dead letters, fetched and written by clients."""

    _settings: ActiveConsumersConfig
    _instances: ActiveInstances
    _admin: Admin
    _codecs: Codecs
    _consumers: RunningConsumers
    _produce: Produce
    _ensure: Callable[[str, str], Awaitable[None]] | None
    """Creates a dead letter topic."""
    _name: str = INSTANCE
    """The name of instances."""

    def __post_init__(self) -> None:
        self._writer = DeadLetterTopic("{topic}.dlq", self._produce, self._ensure)

    @Endpoint(
        "GET",
        "/consumers/deadLetter/active",
        "DLTopicReplayActive",
        "Fetch dead letters; the next call confirms them",
        _FETCH,
        {200: list[ConsumedRecord]},
        query=ActiveReplayQuery,
        errors=_ERRORS,
        effect=True,
        long_poll=True,
        whole=True,
    )
    async def fetch(self, request: HttpRequest) -> None:
        query = decode_query(request, ActiveReplayQuery)
        group = check_group(query.group)
        require(request, _FETCH.any_of, "group", group)
        named = [check_topic(name.strip()) for name in (query.topic or "").split(",") if name.strip()]
        origins = named or [topic for one in self._reactive() for topic in one.topics]
        if not origins:
            raise errors.InvalidTopicName(
                "no reactive consumer of this process names a topic; name the origin topics as topic=a,b"
            )
        topics = sorted({self._dead_letters_of(origin) for origin in origins})
        for topic in topics:
            require(request, _FETCH.any_of, "consume", topic)
        existing = await self._admin.topic_ids(topics, "Read")
        reads = Topics([topic for topic in topics if topic in existing])
        if not reads.names:
            await request.response.send(HttpResponse([]))
            return
        instance = await self._instance(group, origins[0], request)
        if reads != instance.membership.reads:
            await instance.membership.subscribe(reads)
            await instance.wait_assigned([])
        wait_ms = instance.spec.wait_seconds * 1000 if query.timeout is None else query.timeout
        read = await load_read(
            instance,
            instance.entries,
            request,
            max_bytes=instance.spec.max_read_bytes,
            max_records=_MOST_RECORDS,
            wait_seconds=max(0, min(wait_ms, _MOST_WAIT_MS)) / 1000,
        )
        await respond_read(self._instances, read, instance.entries, request)

    @Endpoint(
        "POST",
        "/consumers/deadLetter/active",
        "DLQProducer",
        "Write records that could not be processed as dead letters",
        Rule(_ACCESS, "consume"),
        request={JSON: list[FailedResult]},
        example=[{"record": {"topic": "t", "partition": 0, "offset": 7, "value": 1}, "processed": False, "key": "a"}],
        errors=(*RECORDS_BODY, *KAFKA, errors.DeadLetterNotTaken, errors.TooManyRecords, errors.RegistryUnavailable),
        decoded=False,
    )
    async def write(self, call: Call[bytes, None]) -> list[WrittenDeadLetter]:
        try:
            texts = _split(call.body)
        except (msgspec.MsgspecError, RecursionError) as cause:
            text = f"the body is not an array of results, nothing was written: {str(cause)[:200]}"
            raise errors.DeadLetterNotTaken(text) from None
        if len(texts) > _MOST_RECORDS:
            raise errors.TooManyRecords(
                f"{len(texts)} results exceed the limit of {_MOST_RECORDS} per request; send fewer"
            )
        outgoing = []
        origins = set()
        for index, each in enumerate(texts):
            if index % _SLICE == _SLICE - 1:
                await next_slice()
            try:
                result = _decode(each)
                record = result.record or result.consumer_record
                if record is None:
                    raise ValueError("it has no record; send the record as it was fetched")
                require(call.request, _ACCESS, "consume", check_topic(record.topic))
                outgoing.append(await self._dead_letter(result, record))
            except (msgspec.MsgspecError, RecursionError, ValueError, errors.FormatError) as cause:
                text = f"result {index} is not valid, nothing was written: {str(cause)[:300]}"
                raise errors.DeadLetterNotTaken(text, index=index) from cause
            origins.add(record.topic)
        for topic in origins:
            await self._writer_of(topic).prepare(topic)
        written = await self._produce(outgoing) if outgoing else []
        if failed := next((one for one in written if isinstance(one, errors.HeadraceError)), None):
            raise failed
        return [
            WrittenDeadLetter(
                record.topic, at.partition, at.offset, time.time(), len(record.key or b""), len(record.value or b"")
            )
            for record, at in zip(outgoing, written, strict=True)
            if isinstance(at, Produced)
        ]

    async def _dead_letter(self, result: FailedResult, record: FailedRecord) -> OutgoingRecord:
        topic = record.topic
        headers = _headers_of(record)
        now = time.time()
        consumer = self._consumer_of(topic)
        origin = origin_of(headers)
        if origin and self._dead_letters_of(origin.partition.topic) == topic:  # a dead letter that failed again
            partition = origin.partition
            offset = origin.offset
            attempts = origin.attempts + 1
            group = origin.group
            first = parse_time(origin.text("first_failure")).timestamp()
        else:
            partition = TopicPartition(topic, record.partition)
            offset = record.offset
            attempts = 1
            group = consumer.group if consumer else ""
            first = now
        own = {name: value for name, value in headers if not is_reserved(name) and name != STACK_TRACE}
        ids = {"X-Correlation-Id": result.correlation_id, "X-Traceability-Id": result.traceability_id}
        own |= {name: text.encode() for name, text in ids.items() if text is not None}
        reason = result.stacktrace or "the client did not process it"
        was = Record(*partition, offset, record.timestamp, None, None, lambda: list(own.items()))
        history = headers_of(DeadLetter(was, group, attempts, Reply("client", reason), first, now))
        key = None if result.key is None else result.key.encode()
        return OutgoingRecord(self._dead_letters_of(topic), key, await self._value(record, partition.topic), history)

    async def _value(self, record: FailedRecord, origin: str) -> bytes | None:
        """Return the stored bytes of a value, encoded in the format in which the client fetched it."""
        if record.raw_value is not None:
            return base64.b64decode(record.raw_value, validate=True)
        if record.value is msgspec.UNSET or bytes(record.value) == b"null":
            return None
        name = self._formats_of(origin)[1]
        encoder = await self._codecs.for_writing(SchemaChoice(name), name, f"{origin}-value")
        return encoder.codec.encode(bytes(record.value))

    def _reactive(self) -> Iterator[RunningConsumer]:
        return (one for one in self._consumers.values() if one.kind == "reactive")

    def _consumer_of(self, origin: str) -> RunningConsumer | None:
        return next((one for one in self._reactive() if one.reads(origin)), None)

    def _writer_of(self, origin: str) -> DeadLetterTopic:
        consumer = self._consumer_of(origin)
        return consumer.dead_letters if consumer and consumer.dead_letters else self._writer

    def _dead_letters_of(self, origin: str) -> str:
        return self._writer_of(origin).topic_for(origin)

    def _formats_of(self, origin: str) -> tuple[str, str]:
        delivery = getattr(self._consumer_of(origin), "delivery", None)
        formats = delivery if isinstance(delivery, ReactiveConsumerConfig) else self._settings
        return formats.key_format, formats.value_format

    async def _instance(self, group: str, origin: str, request: HttpRequest) -> ActiveInstance:
        owner = owner_of(request)
        settings = self._settings
        with contextlib.suppress(errors.InstanceNotFound):
            return self._instances.use(group, self._name, owner)
        key_format, value_format = self._formats_of(origin)
        spec = InstanceSpec(
            group=group,
            name=self._name,
            owner=owner,
            key_format=key_format,
            value_format=value_format,
            wait_seconds=settings.wait_seconds,
            min_bytes=-1,
            max_read_bytes=settings.max_read_bytes,
            auto_commit_seconds=settings.auto_commit_seconds,
            buffer_bytes=settings.buffer_bytes,
            policy=ReadPolicy("earliest", member=settings.consumer),
        )
        return await self._instances.create(spec)


def _headers_of(record: FailedRecord) -> list[Header]:
    if record.header_list is None:
        return [(name, None if text is None else text.encode()) for name, text in (record.headers or {}).items()]
    pairs = ((one.name, one.value) for one in record.header_list)
    return [(name, None if text is None else base64.b64decode(text, validate=True)) for name, text in pairs]
