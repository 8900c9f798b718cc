"""The produce use case: takes a request's JSON, and returns an outcome for each record.

All records are encoded before the first is sent, so a request with a bad record writes nothing to Kafka.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeVar

import msgspec

from headrace import errors
from headrace.config.model import HeadraceConfig
from headrace.config.producer_config import ProducerConfig
from headrace.formats.choice import Codecs, Encoder, SchemaChoice, format_name
from headrace.formats.plain import JsonCodec, ValueEncoder
from headrace.kafka import Producer, TopicDirectory
from headrace.kafka.internal_topics import InternalTopics
from headrace.records import CORRELATION_ID, TRACEABILITY_ID, Header, OutgoingRecord, Produced, is_reserved
from headrace.runtime import next_slice
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.correlation import new_correlation_ids
from headrace.runtime.telemetry.tracing import TraceSpan
from headrace.sidecar.produce.produce_request import (
    SHALLOW_BYTES,
    SHORT_RECORDS,
    ParsedRequest,
    ProduceRecord,
    SchemaChoices,
    Slice,
    check_depth,
    check_partitions,
    choice_of,
    parse_request,
    slices_of,
)
from headrace.sidecar.produce.produce_response import EncodedResponse, Prepared, Result, response_of

_OWN_HEADERS: Final = (CORRELATION_ID.lower(), TRACEABILITY_ID.lower())
_NAMED_INDEXES: Final = 20
LONG_BODY_BYTES: Final = 32_768
"""Larger bodies are decoded in a separate turn of the event loop."""
MOST_AT_ONCE: Final = 1000
"""Most records that are passed to the Kafka client in one turn."""

H = TypeVar("H", str | None, bytes | None)
Part = Literal["key", "value"]
Requested = ParsedRequest | OutgoingRecord
"""What a request asks for: its JSON, or the one record that its body is the value of."""
_PARTS: Final[tuple[Part, ...]] = ("key", "value")


class RequestIds(msgspec.Struct, frozen=True, gc=False):
    """The headers of the HTTP request that its records get."""

    correlation_id: bytes = b""
    """Empty for a new id per record."""
    traceability_id: bytes | None = None
    trace: Sequence[Header] = ()
    """Headers of a trace, for records that have none of them."""
    write: TraceSpan | None = None
    """The span of the write, if it is traced."""


class Encoders(NamedTuple):
    """What must be known to encode the records of a request."""

    partitions: int
    """Of the topic."""
    keys: Encoder
    values: Encoder


@dataclasses.dataclass(eq=False)
class ProduceService:
    """Serves `POST /producers/{topic}`: `needs` or `load` encodes the records of a request, then `do` writes them."""

    _settings: ProducerConfig
    _codecs: Codecs
    _producer: Producer
    _topics: TopicDirectory
    _audit: Audit | None = None
    _max_records: int = 10_000
    internal: InternalTopics = dataclasses.field(default_factory=lambda: InternalTopics(HeadraceConfig()))
    """The topics that are reserved for Headrace."""

    def __post_init__(self) -> None:
        settings = self._settings
        self.acks = settings.acks
        """The replicas that must have a record before it is acknowledged."""
        self._auto_register = settings.auto_register
        self.parse = functools.partial(parse_request, self._max_records, settings.unknown_fields)
        """Parses the JSON text of a request."""
        self._plain: dict[int, Encoders | None] = {}
        """By number of partitions: what encodes the records of a request that names no format."""

    def own_headers(self, topic: str, headers: Iterable[tuple[str, H]]) -> list[tuple[str, H]]:
        """Return the headers of a record without reserved ones; only dead letter topics may have those.

        Raises:
            InvalidRequest: A name contains NUL; Kafka's client would truncate it there.
        """
        headers = list(headers)
        for name, _ in headers:
            if "\0" in name:
                raise errors.InvalidRequest(f"the name of a record header contains NUL: remove it from {name[:100]!r}")
        if self.internal.kind_of(topic) == "dead_letter":
            return headers
        return [header for header in headers if not is_reserved(header[0])]

    def needs(self, topic: str, requested: Requested, ids: RequestIds) -> Prepared | None:
        """Return the encoded records of a request; None if `load` must wait: for its topic, a schema, or many records.

        Raises:
            HeadraceError: See `load`; also `ProducerQueueFull` if the byte budget is used up.
        """
        partitions = self._topics.known(topic)
        if partitions is None or not self._settings.enabled:
            return None
        if isinstance(requested, OutgoingRecord):
            return self._completed(requested, partitions, ids)
        request, records = requested.request, requested.request.records
        if len(records) > SHORT_RECORDS and len(slices_of(records)) > 1:
            return None
        if len(records) > 1 and records[0].partition is None:
            self._producer.check_capacity(topic, requested.size_bytes or 0)  # before the work of encoding
        if requested.has_choice:
            encoders = self._without_schema(partitions, request)
        elif (encoders := self._plain.get(partitions)) is None:
            encoders = self._plain[partitions] = self._without_schema(partitions, SchemaChoices())
        if encoders is None:
            return None
        if len(records) == 1:
            return _prepared([self._encode_one(topic, records[0], encoders, ids)], requested, encoders, ids)
        return _prepared(self._encode(topic, Slice(0, records), encoders, ids), requested, encoders, ids)

    async def load(self, topic: str, requested: Requested, ids: RequestIds) -> Prepared:
        """Return the encoded records of a request, and wait for what that needs.

        Raises:
            RequestError: The request cannot be served; nothing was sent.
            FormatError: A key or value does not fit, or its schema is not usable; nothing was sent.
            RegistryUnavailable: A schema is not cached, and the registry does not respond; nothing was sent.
            KafkaUnavailable: The topic is not cached, and Kafka does not respond; nothing was sent.
        """
        if isinstance(requested, OutgoingRecord):
            return self._completed(requested, await self._partitions_of(topic), ids)
        request, slices = requested.request, slices_of(requested.request.records)
        has_keys, has_values = (any(_is_given(getattr(record, part)) for record in request.records) for part in _PARTS)
        encoders = await self._encoders(topic, request, has_keys, has_values)
        records: list[OutgoingRecord] = []
        for part in slices:
            if len(slices) > 1:
                await next_slice(started=True)
            records += self._encode(topic, part, encoders, ids)
        return _prepared(records, requested, encoders, ids)

    async def check(self, topic: str, choices: SchemaChoices) -> None:
        """Raise the errors of `load` that would affect every record of a stream."""
        codes = self._settings.format_codes
        has_keys, has_values = (choice_of(choices, part, codes) != SchemaChoice() for part in _PARTS)
        await self._encoders(topic, choices, has_keys, has_values)

    def do(self, prepared: Prepared, done: Callable[[Sequence[Result]], None]) -> None:
        """Pass prepared records to Kafka's client, many in several turns.

        `done` is called once, on the loop, with a result per record, and must not raise.

        Raises:
            ProducerQueueFull: The byte budget is used up; nothing was sent.
            KafkaUnavailable: No broker has responded for some time; nothing was sent.
        """
        records = prepared.records
        self._producer.send(records, done, prepared.partitions, prepared.size_bytes, sliced=len(records) > MOST_AT_ONCE)

    def respond(self, prepared: Prepared, results: Sequence[Result]) -> EncodedResponse:
        """Return the response for the results of a request; audit them."""
        if self._audit:
            self._audit.produced(prepared.records, results, size_bytes=prepared.size_bytes)
        return response_of(prepared, results, self._settings.always_200, self.acks)

    def audit(self, records: Sequence[OutgoingRecord], results: Sequence[Result]) -> int:
        """Audit the results of a stream's records; return how many are certainly written."""
        written = sum(isinstance(result, Produced) for result in results)
        if self._audit and records:
            self._audit.produced(records, results)
        return written

    def not_sent(self, topic: str, error: errors.HeadraceError, count: int = 0) -> None:
        """Audit the rejection of a request, or of `count` lines of a stream."""
        if self._audit:
            self._audit.not_sent(topic, error, count)

    def _without_schema(self, partitions: int, choices: SchemaChoices) -> Encoders | None:
        """Return what encodes the records of a request; None if a schema must be looked up."""
        settings = self._settings
        keys, values = (
            self._codecs.without_schema(choice_of(choices, part, settings.format_codes), default)
            for part, default in zip(_PARTS, (settings.key_format, settings.value_format), strict=True)
        )
        return Encoders(partitions, Encoder(keys), Encoder(values)) if keys and values else None

    async def _partitions_of(self, topic: str) -> int:
        if not self._settings.enabled:
            raise errors.ProducerNotEnabled()
        return await self._topics.partitions_of(topic)

    async def _encoders(self, topic: str, choices: SchemaChoices, has_keys: bool, has_values: bool) -> Encoders:
        partitions = await self._partitions_of(topic)
        keys = await self._encoder("key", choices, topic, has_keys)
        return Encoders(partitions, keys, await self._encoder("value", choices, topic, has_values))

    async def _encoder(self, part: Part, choices: SchemaChoices, topic: str, needed: bool) -> Encoder:
        default = self._settings.key_format if part == "key" else self._settings.value_format
        choice = choice_of(choices, part, self._settings.format_codes)
        if not needed:  # no keys or no values, so no schema
            format_name(choice.format or default)
            return _NOTHING
        subject = f"{topic}-{part}"
        return await self._codecs.for_writing(choice, default, subject, auto_register=self._auto_register)

    def _encode(self, topic: str, part: Slice, encoders: Encoders, ids: RequestIds) -> list[OutgoingRecord]:
        first, records = part
        check_partitions(records, topic, encoders.partitions, first)
        keys = _encoded("key", [record.key for record in records], encoders.keys.codec, first)
        values = _encoded("value", [record.value for record in records], encoders.values.codec, first)
        given, trace = ids.correlation_id, ids.traceability_id
        last = [*ids.trace]
        shared = [*_id_headers(given, trace), *last] if given else None  # one list for all records
        correlations = [given] * len(records) if given else new_correlation_ids(len(records))
        return [
            OutgoingRecord(
                topic,
                key,
                value,
                _record_headers(record, self.own_headers(topic, _named(record)), correlation, trace, last)
                if record.headers or record.correlation_id is not None or record.traceability_id is not None
                else shared or [*_id_headers(correlation, trace), *last],
                record.partition,
                stamp if (stamp := record.timestamp) and stamp > 0 else 0,
            )
            for record, key, value, correlation in zip(records, keys, values, correlations, strict=True)
        ]

    def _encode_one(self, topic: str, record: ProduceRecord, encoders: Encoders, ids: RequestIds) -> OutgoingRecord:
        """Do the same for the only record of a request, without lists."""
        if record.partition is not None:
            check_partitions([record], topic, encoders.partitions)
        key = _encoded_one("key", record.key, encoders.keys.codec)
        value = _encoded_one("value", record.value, encoders.values.codec)
        correlation, traceability = ids.correlation_id or new_correlation_ids(1)[0], ids.traceability_id
        if record.headers or record.correlation_id is not None or record.traceability_id is not None:
            own = self.own_headers(topic, _named(record))
            headers = _record_headers(record, own, correlation, traceability, [*ids.trace])
        else:
            headers = [*_id_headers(correlation, traceability), *ids.trace]
        stamp = record.timestamp
        return OutgoingRecord(topic, key, value, headers, record.partition, stamp if stamp and stamp > 0 else 0)

    def _completed(self, record: OutgoingRecord, partitions: int, ids: RequestIds) -> Prepared:
        """Add the headers of the request to a record whose value is the body."""
        check_partitions([record], record.topic, partitions)
        own = record.headers or []
        headers = _id_headers(ids.correlation_id or new_correlation_ids(1)[0], ids.traceability_id)
        if ids.trace and not _is_traced(own, ids.trace):
            headers += ids.trace
        whole = OutgoingRecord(
            record.topic, record.key, record.value, [*headers, *own], record.partition, record.timestamp_ms
        )
        return Prepared([whole], size_bytes=whole.size_bytes, partitions=partitions, write=ids.write)


def _prepared(records: list[OutgoingRecord], requested: ParsedRequest, encoders: Encoders, ids: RequestIds) -> Prepared:
    """Return the records of a request with what their response and the byte budget need."""
    partitions, keys, values = encoders
    size = requested.size_bytes if keys.schema_id is None and values.schema_id is None else None
    if size is not None:  # without a schema, whose defaults may be large, the body's size is an estimate
        per_record = len(ids.correlation_id) + len(ids.traceability_id or b"")
        if ids.trace:
            per_record += sum([len(value) for _, value in ids.trace if value])
        size += len(records) * per_record
    return Prepared(records, keys.schema_id, values.schema_id, size, requested.ignored, partitions, ids.write)


_NOTHING: Final = Encoder(JsonCodec())


def _is_given(raw: bytes) -> bool:
    return bool(raw) and bytes(raw) != b"null"


def _encoded(part: Part, raws: list[Any], codec: ValueEncoder, first: int) -> list[bytes | None]:
    texts = [None if not raw or (text := bytes(raw)) == b"null" else text for raw in raws]
    check_depth(texts, first)
    if type(codec) is JsonCodec:
        return texts  # stored unchanged
    try:
        return [None if text is None else codec.encode(text) for text in texts]
    except errors.EncodeError:
        _name_misfits(part, texts, codec, first)


def _encoded_one(part: Part, raw: Any, codec: ValueEncoder) -> bytes | None:
    text = bytes(raw)
    if not text or text == b"null":
        return None
    if len(text) >= SHALLOW_BYTES:  # it may be nested too deeply
        return _encoded(part, [raw], codec, 0)[0]
    if type(codec) is JsonCodec:
        return text
    try:
        return codec.encode(text)
    except errors.EncodeError:
        _name_misfits(part, [text], codec, 0)


def _name_misfits(part: Part, texts: Sequence[bytes | None], codec: ValueEncoder, first: int) -> NoReturn:
    """Raise an error that names all records of a slice whose key or value does not fit."""
    misfits: dict[int, errors.EncodeError] = {}
    for index, text in enumerate(texts, first):
        try:
            if text is not None:
                codec.encode(text)
        except errors.EncodeError as misfit:
            misfits[index] = misfit
    indexes = [*misfits][:_NAMED_INDEXES]
    named = ", ".join(map(str, indexes)) + (", ..." if len(misfits) > _NAMED_INDEXES else "")
    raise errors.EncodeError(
        f"failed to encode the {part} of {len(misfits)} of {len(texts)} records; nothing was sent. "
        f"Record {indexes[0]}: {misfits[indexes[0]]}. All of them: {named}",
        part=part,
        index=indexes[0],
        indexes=indexes,
    ) from misfits[indexes[0]]


def _named(record: ProduceRecord) -> Iterable[tuple[str, str | None]]:
    return record.headers.items() if isinstance(record.headers, dict) else record.headers or ()


def _id_headers(correlation: bytes, traceability: bytes | None) -> list[Header]:
    ids: list[Header] = [(CORRELATION_ID, correlation)]
    return ids if traceability is None else [(TRACEABILITY_ID, traceability), *ids]


def _is_traced(own: Iterable[tuple[str, object]], trace: Sequence[Header]) -> bool:
    """Return whether a record has one of these headers of a trace itself."""
    names = [name for name, _ in trace]
    return any(name.lower() in names for name, _ in own)


def _record_headers(
    record: ProduceRecord,
    own: Sequence[tuple[str, str | None]],
    correlation: bytes,
    traceability: bytes | None,
    last: list[Header],
) -> list[Header]:
    """Return the headers of a record that has ids or headers; its ids override those of the request."""
    if record.traceability_id is not None:
        traceability = record.traceability_id.encode()
    if record.correlation_id is not None:
        correlation = record.correlation_id.encode()
    headers = _id_headers(correlation, traceability)
    if last and not _is_traced(own, last):
        headers += last
    headers += [
        (name, None if text is None else text.encode()) for name, text in own if name.lower() not in _OWN_HEADERS
    ]
    return headers
