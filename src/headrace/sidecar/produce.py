"""The produce use case: a request's JSON in, an outcome for each record out.

Every record is encoded before the first is sent, so a request with a bad record leaves nothing in Kafka. Source:
sidecar.md 5.1 (request), 5.5 (answer), 5.6 (record headers); decisions.md 2-4, 12.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal, NamedTuple, NoReturn, Protocol, TypeVar

from headrace import errors
from headrace.config.internal_topics import InternalTopics
from headrace.config.model import HeadraceConfig
from headrace.config.producer import ProducerConfig
from headrace.formats.codec import Codec
from headrace.formats.codec_json import JsonCodec
from headrace.formats.codecs import Codecs, SchemaChoice, SchemaRules, format_name
from headrace.lifecycle import next_slice
from headrace.records import Header, OutgoingRecord, Produced, is_reserved
from headrace.sidecar.produce_answer import ProduceAnswer, answer_of
from headrace.sidecar.produce_limits import check_depth
from headrace.sidecar.produce_request import (
    ParsedRequest,
    ProduceRecord,
    ProduceRequest,
    Slice,
    check_partitions,
    choice_of,
    parse_request,
    slices_of,
)
from headrace.telemetry.audit import Audit
from headrace.telemetry.correlation import new_correlation_ids

_CORRELATION: Final = "X-Correlation-Id"
_TRACEABILITY: Final = "X-Traceability-Id"
_TRACE_PARENT: Final = "traceparent"
_OWN_HEADERS: Final = (_CORRELATION.lower(), _TRACEABILITY.lower())
_NAMED_INDEXES: Final = 20
LONG_BODY_BYTES: Final = 32_768
"""Larger bodies are decoded in a slice of their own."""
_AT_ONCE_RECORDS: Final = 1000
"""So many go to the client without a pause."""

H = TypeVar("H", str | None, bytes | None)
Part = Literal["key", "value"]
Result = Produced | errors.HeadraceError
"""Where a record was written, or why it was not."""


class RequestIds(NamedTuple):
    """What the HTTP request's own headers say, None for absent ones."""

    correlation_id: bytes | None = None
    traceability_id: bytes | None = None
    authorization: bytes | None = None
    traceparent: bytes | None = None
    """Of W3C Trace Context; passed on as it is."""


class Prepared(NamedTuple):
    """A request's records, encoded."""

    records: list[OutgoingRecord]
    key_schema_id: int | None
    """None where no schema was needed."""
    value_schema_id: int | None
    size_bytes: int | None = None
    """What the records count for; None to have them counted."""
    ignored_fields: Sequence[str] = ()
    """Fields of the request that are not known, where that is allowed."""


class Producing(Protocol):
    """The part of the Kafka producer that is used here."""

    async def produce(self, records: Sequence[OutgoingRecord], sliced: bool = False) -> list[Result]:
        """Write records, other requests are served between slices; one result per record."""

    def send(
        self,
        records: Sequence[OutgoingRecord],
        done: Callable[[list[Result]], None],
        partitions: int = 0,
        size_bytes: int | None = None,
    ) -> None:
        """Write records without waiting; `done` gets one result per record."""

    def check_room(self, topic: str, size_bytes: int) -> None:
        """Raise early what `send` would for want of room."""


class Topics(Protocol):
    """The part of the topic directory that is used here."""

    async def partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has."""

    def known(self, topic: str) -> int | None:
        """Return the same, if that needs no question."""


class ProduceService:
    """Serves `POST /producers/{topic}`."""

    def __init__(
        self,
        settings: ProducerConfig,
        codecs: Codecs,
        producer: Producing,
        topics: Topics,
        audit: Audit | None = None,
        max_records: int = 10_000,
        internal: InternalTopics | None = None,
    ) -> None:
        self._internal = internal or InternalTopics(HeadraceConfig())
        self._max_records = max_records
        self._settings = settings
        self._codecs = codecs
        self._producer = producer
        self._topics = topics
        self._audit = audit
        self._default_formats: tuple[tuple[Part, str], ...]
        self._default_formats = (("key", settings.key_format), ("value", settings.value_format))
        self._rules = SchemaRules(settings.subject_strategy, settings.auto_register, settings.format_from_subject)

    def check_writable(self, topic: str, *, admin: bool) -> None:
        """Return if a caller may write to a topic, by what the topic is; see `InternalTopics.check_writable`."""
        self._internal.check_writable(topic, admin=admin)

    def own_headers(self, topic: str, headers: Iterable[tuple[str, H]]) -> list[tuple[str, H]]:
        """Return the headers of a record without reserved ones, which only a dead letter may have.

        Raises:
            InvalidRequest: A name holds NUL: Kafka's client would cut it there.
        """
        headers = list(headers)
        if odd := [name for name, _ in headers if "\0" in name]:
            raise errors.InvalidRequest(
                f"a record has a header whose name holds NUL: leave NUL out of {odd[0][:100]!r}"
            )
        if self._internal.kind_of(topic) == "dead_letter":
            return headers
        return [header for header in headers if not is_reserved(header[0])]

    async def produce(self, topic: str, body: bytes, ids: RequestIds) -> ProduceAnswer:
        """Write the records of one request.

        If cancelled, the records may still be written.

        Args:
            topic: Name as it came in the path.
            body: JSON text of the request.
            ids: What the request's headers say.

        Raises:
            RequestError: The request cannot be served as it is; nothing was sent.
            FormatError: A key or value does not fit, or its schema is not usable; nothing was sent.
            RegistryUnavailable: A schema is needed that is not known here; nothing was sent.
            KafkaUnavailable: The topic is not known here and Kafka does not answer; nothing was sent.
            ProducerQueueFull: The byte budget is used up; nothing was sent.
        """
        return await self.send(await self.prepare_body(topic, body, ids))

    async def prepare_body(self, topic: str, body: bytes, ids: RequestIds) -> Prepared:
        """Return the records of one request as they go to Kafka; raises what `produce` raises before it sends."""
        if len(body) > LONG_BODY_BYTES:
            await next_slice()
        request, ignored = self._parse(body)
        return (await self.prepare(topic, request, ids))._replace(ignored_fields=ignored)

    def _parse(self, body: bytes) -> ParsedRequest:
        return parse_request(body, self._max_records, self._settings.unknown_fields)

    def produce_at_once(
        self,
        topic: str,
        body: bytes,
        ids: RequestIds,
        admit: Callable[[], None],
        done: Callable[[Prepared, list[Result]], None],
    ) -> bool:
        """Begin to write the records of a request for which nobody must be asked.

        Args:
            topic, body, ids: As for `produce`.
            admit: Called before anything is sent; may raise, and then nothing is.
            done: Called once on the loop, with what `answer` needs; must not raise.

        Returns:
            Whether it was begun; if not, or if this raises, nothing was sent, and the request is one for `produce`.
        """
        if self._topics.known(topic) is None:
            return False
        if len(body) > LONG_BODY_BYTES and body.count(b"{") > 2 * _AT_ONCE_RECORDS + 1:  # it is decoded in a slice
            return False
        request, ignored = self._parse(body)
        if ignored or len(slices_of(request.records)) > 1:
            return False
        if len(request.records) > 1 and request.records[0].partition is None:
            self._producer.check_room(topic, len(body))
        for part, default in self._default_formats:
            choice = choice_of(request, part, self._settings.format_codes)
            if not self._codecs.needs_no_schema(choice, default, self._rules):
                return False
        return self.write_at_once(topic, request, ids, len(body), admit, done)

    def write_at_once(
        self,
        topic: str,
        request: ProduceRequest,
        ids: RequestIds,
        size_bytes: int,
        admit: Callable[[], None],
        done: Callable[[Prepared, list[Result]], None],
        complete: Callable[[Prepared], Prepared] = lambda prepared: prepared,
    ) -> bool:
        """Begin to write a request that needs no schema; see `produce_at_once`.

        Args:
            topic, request, ids, admit, done: As there.
            size_bytes: What came. It stands for what goes: a record's own headers are among it.
            complete: Makes the records that go to Kafka of those that were prepared.
        """
        partitions = self._topics.known(topic)
        if partitions is None:
            return False
        try:
            self.prepare(topic, request, ids).send(None)
        except StopIteration as ended:  # as every coroutine ends that has not had to wait
            prepared: Prepared = complete(ended.value)
        admit()
        size = size_bytes + len(prepared.records) * sum(map(len, filter(None, ids)))
        prepared = prepared._replace(size_bytes=size)
        self._producer.send(prepared.records, lambda results: done(prepared, results), partitions, size)
        return True

    async def send(self, prepared: Prepared) -> ProduceAnswer:
        """Write prepared records and return what to answer."""
        if len(prepared.records) > _AT_ONCE_RECORDS:
            results = await self._producer.produce(prepared.records, sliced=True)
            await next_slice()
            return self.answer(prepared, results)
        return self.answer(prepared, await self._producer.produce(prepared.records))

    def answer(self, prepared: Prepared, results: list[Result]) -> ProduceAnswer:
        """Return what to answer, and have it audited."""
        keys, values, settings = prepared.key_schema_id, prepared.value_schema_id, self._settings
        answer = answer_of(results, keys, values, settings.always_200, settings.acks, prepared.ignored_fields)
        if self._audit:
            self._audit.produced(prepared.records, results, answer.written_records, prepared.size_bytes)
        return answer

    def write(self, records: Sequence[OutgoingRecord], size_bytes: int, done: Callable[[list[Result]], None]) -> None:
        """Write prepared records without waiting; `done` gets their results. For those who call `note` themselves.

        Args:
            records: One or more, or none.
            size_bytes: What they count for in the byte budget; what came stands for what goes.
            done: As in `Producing.send`.

        Raises:
            ProducerQueueFull: The byte budget is used up; nothing was sent.
        """
        self._producer.send(records, done, 0, size_bytes)

    @property
    def acks(self) -> Literal["all", 1, 0]:
        """How many replicas `ok` stands for."""
        return self._settings.acks

    def note(self, records: Sequence[OutgoingRecord], results: Sequence[Result]) -> int:
        """Have the results of `write` audited, and return how many records are certainly written."""
        written = sum(isinstance(result, Produced) for result in results)
        if self._audit and records:
            self._audit.produced(records, results, written)
        return written

    def not_sent(self, topic: str, error: errors.HeadraceError, count: int = 0) -> None:
        """Have it audited that a request, or `count` lines of a stream, were refused before anything was sent."""
        if self._audit:
            self._audit.not_sent(topic, error, count)

    async def check(self, topic: str, request: ProduceRequest, ids: RequestIds) -> None:
        """Raise what `prepare` would, as far as it can be said before there are records."""
        await self.prepare(topic, request, ids)
        for part, default in self._default_formats:
            choice = choice_of(request, part, self._settings.format_codes)
            if choice != SchemaChoice():
                await self._codecs.for_writing(choice, default, f"{topic}-{part}", self._rules)

    async def prepare(self, topic: str, request: ProduceRequest, ids: RequestIds) -> Prepared:
        """Return a request's records as they go to Kafka; raises what `produce` raises before it sends."""
        if not self._settings.enabled:
            raise errors.ProducerNotEnabled()
        partitions = await self._topics.partitions_of(topic)
        records: list[OutgoingRecord] = []
        key_schema_id = value_schema_id = None
        slices = slices_of(request.records)
        for part in slices:
            if len(slices) > 1:
                await next_slice()
            check_partitions(part.records, topic, partitions, part.first)
            keys, key_id = await self._encode("key", request, part, topic)
            values, value_id = await self._encode("value", request, part, topic)
            records += self._outgoing(topic, part.records, keys, values, ids)
            key_schema_id, value_schema_id = key_schema_id or key_id, value_schema_id or value_id
        return Prepared(records, key_schema_id, value_schema_id)

    async def _encode(
        self, part: Part, request: ProduceRequest, some: Slice, topic: str
    ) -> tuple[list[bytes | None], int | None]:
        default_format = self._settings.key_format if part == "key" else self._settings.value_format
        choice = choice_of(request, part, self._settings.format_codes)
        raws = [record.key if part == "key" else record.value for record in some.records]
        texts = [None if not raw or (text := bytes(raw)) == b"null" else text for raw in raws]
        check_depth(texts, some.first)
        if not any(texts):  # nothing to encode needs no schema
            format_name(choice.format or default_format)
            return texts, None
        codec, schema_id = await self._codecs.for_writing(choice, default_format, f"{topic}-{part}", self._rules)
        if isinstance(codec, JsonCodec):
            return texts, None  # it keeps the text as it came
        try:
            return [None if text is None else codec.encode(text) for text in texts], schema_id
        except errors.EncodeError:
            _name_misfits(part, texts, codec, some.first)

    def _outgoing(
        self,
        topic: str,
        records: list[ProduceRecord],
        keys: list[bytes | None],
        values: list[bytes | None],
        ids: RequestIds,
    ) -> list[OutgoingRecord]:
        first: list[Header] = []
        if self._settings.forward_authorization and ids.authorization is not None:
            first.append(("authorization", ids.authorization))
        if self._settings.caller_id:
            first.append(("caller_id", self._settings.caller_id.encode()))
        given, trace = ids.correlation_id, ids.traceability_id
        usual = first if trace is None else [*first, (_TRACEABILITY, trace)]
        last: list[Header] = [] if ids.traceparent is None else [(_TRACE_PARENT, ids.traceparent)]
        shared = [*usual, (_CORRELATION, given), *last] if given else None  # one list for all records, if alike
        correlations = [given] * len(records) if given else new_correlation_ids(len(records))
        return [
            OutgoingRecord(
                topic,
                key,
                value,
                _headers_of(record, self.own_headers(topic, _named(record)), first, correlation, trace, last)
                if record.headers or record.correlation_id is not None or record.traceability_id is not None
                else shared or [*usual, (_CORRELATION, correlation), *last],
                record.partition,
                stamp if (stamp := record.timestamp) and stamp > 0 else 0,
            )
            for record, key, value, correlation in zip(records, keys, values, correlations, strict=True)
        ]


def _name_misfits(part: str, texts: Sequence[bytes | None], codec: Codec, number: int) -> NoReturn:
    """Raise an error that names every record of a slice whose key or value does not fit; `number` is the first's."""
    indexes: list[int] = []
    first: errors.EncodeError | None = None
    for index, text in enumerate(texts, number):
        try:
            if text is not None:
                codec.encode(text)
        except errors.EncodeError as misfit:
            indexes.append(index)
            first = first or misfit
    named = ", ".join(map(str, indexes[:_NAMED_INDEXES])) + (", ..." if len(indexes) > _NAMED_INDEXES else "")
    raise errors.EncodeError(
        f"{len(indexes)} of {len(texts)} records have a {part} that cannot be encoded, nothing was sent. "
        f"Record {indexes[0]}: {first}. All of them: {named}",
        part=part,
        index=indexes[0],
        indexes=indexes[:_NAMED_INDEXES],
    ) from first


def _named(record: ProduceRecord) -> Iterable[tuple[str, str | None]]:
    return record.headers.items() if isinstance(record.headers, dict) else record.headers or ()


def _headers_of(
    record: ProduceRecord,
    own: Sequence[tuple[str, str | None]],
    first: list[Header],
    correlation: bytes,
    traceability: bytes | None,
    last: list[Header],
) -> list[Header]:
    headers = first.copy()
    if record.traceability_id is not None:
        traceability = record.traceability_id.encode()
    if traceability is not None:
        headers.append((_TRACEABILITY, traceability))
    if record.correlation_id is not None:
        correlation = record.correlation_id.encode()
    headers.append((_CORRELATION, correlation))
    if last and not any(name.lower() == _TRACE_PARENT for name, _ in own):
        headers += last
    headers += [
        (name, None if text is None else text.encode()) for name, text in own if name.lower() not in _OWN_HEADERS
    ]
    return headers
