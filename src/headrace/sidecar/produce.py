"""The produce use case: a request's JSON in, an outcome for each record out.

Every record is encoded before the first is sent, so a request with a bad record leaves nothing in Kafka. Source:
sidecar.md 5.1 (request), 5.5 (answer), 5.6 (record headers); decisions.md 2-4, 12.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, NamedTuple, NoReturn, Protocol

import msgspec

from headrace import errors
from headrace.config.producer import ProducerConfig
from headrace.formats.codec import Codec
from headrace.formats.codecs import Codecs, SchemaChoice, SchemaRules, format_name
from headrace.formats.registry import Reference
from headrace.records import Header, OutgoingRecord, Produced
from headrace.sidecar.produce_answer import ProduceAnswer, answer_of
from headrace.telemetry.correlation import new_correlation_ids

_CORRELATION: Final = "X-Correlation-Id"
_TRACEABILITY: Final = "X-Traceability-Id"
_OWN_HEADERS: Final = (_CORRELATION.lower(), _TRACEABILITY.lower())
_NULL: Final = msgspec.Raw(b"null")
_NAMED_INDEXES: Final = 20
_FORMAT_CODES: Final = ("binary", "avro", "json", "jsonschema", "protobuf", "string")

_Partition = Annotated[int, msgspec.Meta(ge=0)]
_Long = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Record(msgspec.Struct, rename="camel", gc=False):
    key: msgspec.Raw = msgspec.Raw()
    value: msgspec.Raw = msgspec.Raw()
    partition: _Partition | None = None
    timestamp: _Long | None = None
    traceability_id: str | None = None
    correlation_id: str | None = None
    headers: dict[str, str | None] | list[tuple[str, str | None]] | None = None


class _Choices(msgspec.Struct, rename="camel", gc=False):
    key_format: str | int | None = None
    value_format: str | int | None = None
    key_schema: str | None = None
    value_schema: str | None = None
    key_schema_id: int | None = None
    value_schema_id: int | None = None
    key_schema_version: int | None = None
    value_schema_version: int | None = None
    key_schema_subject: str | None = None
    value_schema_subject: str | None = None
    key_schema_references: tuple[Reference, ...] = ()
    value_schema_references: tuple[Reference, ...] = ()
    key_schema_message: str | None = None
    value_schema_message: str | None = None


class _Request(_Choices, kw_only=True, rename="camel", gc=False):
    records: list[_Record]


class _Outline(msgspec.Struct, gc=False):
    records: list[msgspec.Raw]


_decode_request = msgspec.json.Decoder(_Request).decode
_decode_outline = msgspec.json.Decoder(_Outline).decode
_decode_record = msgspec.json.Decoder(_Record).decode


class RequestIds(NamedTuple):
    """What the HTTP request's own headers say, None for absent ones."""

    correlation_id: bytes | None = None
    traceability_id: bytes | None = None
    authorization: bytes | None = None


class Producing(Protocol):
    """The part of the Kafka producer that is used here."""

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Produced | errors.HeadraceError]:
        """Write records; one result per record."""


class Topics(Protocol):
    """The part of the topic directory that is used here."""

    async def partitions_of(self, topic: str) -> int:
        """Return how many partitions a topic has."""


class ProduceService:
    """Serves `POST /producers/{topic}`."""

    def __init__(self, settings: ProducerConfig, codecs: Codecs, producer: Producing, topics: Topics) -> None:
        self._settings = settings
        self._codecs = codecs
        self._producer = producer
        self._topics = topics
        self._rules = SchemaRules(settings.subject_strategy, settings.auto_register, settings.format_from_subject)

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
        if not self._settings.enabled:
            raise errors.ProducerNotEnabled()
        request = _parse(body)
        _check_partitions(request.records, topic, await self._topics.partitions_of(topic))
        keys, key_schema_id = await self._encode_keys(topic, request)
        values, value_schema_id = await self._encode_values(topic, request)
        results = await self._producer.produce(self._outgoing(topic, request.records, keys, values, ids))
        return answer_of(results, key_schema_id, value_schema_id, self._settings.always_200)

    async def _encode_keys(self, topic: str, request: _Request) -> tuple[list[bytes | None], int | None]:
        choice = SchemaChoice(
            _format(request.key_format),
            request.key_schema,
            request.key_schema_id,
            request.key_schema_version,
            request.key_schema_subject,
            request.key_schema_references,
            request.key_schema_message,
        )
        raws = [record.key for record in request.records]
        return await self._encode("key", raws, choice, self._settings.key_format, topic)

    async def _encode_values(self, topic: str, request: _Request) -> tuple[list[bytes | None], int | None]:
        choice = SchemaChoice(
            _format(request.value_format),
            request.value_schema,
            request.value_schema_id,
            request.value_schema_version,
            request.value_schema_subject,
            request.value_schema_references,
            request.value_schema_message,
        )
        raws = [record.value for record in request.records]
        return await self._encode("value", raws, choice, self._settings.value_format, topic)

    async def _encode(
        self, part: str, raws: list[msgspec.Raw], choice: SchemaChoice, default_format: str, topic: str
    ) -> tuple[list[bytes | None], int | None]:
        texts = [None if not raw or raw == _NULL else bytes(raw) for raw in raws]
        if not any(texts):  # nothing to encode needs no schema
            format_name(choice.format or default_format)
            return texts, None
        codec, schema_id = await self._codecs.for_writing(choice, default_format, f"{topic}-{part}", self._rules)
        try:
            return [None if text is None else codec.encode(text) for text in texts], schema_id
        except errors.EncodeError:
            _name_misfits(part, texts, codec)

    def _outgoing(
        self,
        topic: str,
        records: list[_Record],
        keys: list[bytes | None],
        values: list[bytes | None],
        ids: RequestIds,
    ) -> list[OutgoingRecord]:
        first: list[Header] = []
        if self._settings.forward_authorization and ids.authorization is not None:
            first.append(("authorization", ids.authorization))
        if self._settings.caller_id:
            first.append(("caller_id", self._settings.caller_id.encode()))
        given = ids.correlation_id
        correlations = [given] * len(records) if given else new_correlation_ids(len(records))
        return [
            OutgoingRecord(
                topic,
                key,
                value,
                _headers_of(record, first, correlation, ids.traceability_id),
                record.partition,
                record.timestamp if record.timestamp and record.timestamp > 0 else 0,
            )
            for record, key, value, correlation in zip(records, keys, values, correlations, strict=True)
        ]


def _parse(body: bytes) -> _Request:
    if not body:
        raise errors.RequestBodyMissing()
    try:
        str(body, "utf-8")  # the decoder does not look into raw values
        return _decode_request(body)
    except msgspec.ValidationError as cause:
        raise _invalid(body, cause) from cause
    except (msgspec.DecodeError, UnicodeDecodeError) as cause:
        raise errors.ContentTypeMismatch(f"the body is not JSON text: {cause}") from cause
    except RecursionError as cause:
        raise errors.InvalidRequest("the body is nested too deeply: 900 levels are the most") from cause


def _invalid(body: bytes, cause: msgspec.ValidationError) -> errors.InvalidRequest:
    """Say which record does not fit; the decoder's own text has no index."""
    try:
        records = _decode_outline(body).records
    except msgspec.DecodeError:
        return errors.InvalidRequest(f"the body is no produce request: {cause}")
    for index, raw in enumerate(records):
        try:
            _decode_record(raw)
        except msgspec.ValidationError as misfit:
            return errors.InvalidRequest(f"record {index} of the request is not one: {misfit}", index=index)
    return errors.InvalidRequest(f"the body is no produce request: {cause}")


def _format(given: str | int | None) -> str | None:
    """Return a format's name; the codes are those of the seed document."""
    if not isinstance(given, int):
        return given
    if not 0 <= given < len(_FORMAT_CODES):
        raise errors.InvalidRequest(f"format {given} is not served: as a number, 0 to {len(_FORMAT_CODES) - 1} are")
    return _FORMAT_CODES[given]


def _check_partitions(records: list[_Record], topic: str, partitions: int) -> None:
    for index, record in enumerate(records):
        if record.partition is not None and record.partition >= partitions:
            raise errors.PartitionNotFound(
                f"record {index} names partition {record.partition}, and topic {topic} has {partitions}, "
                "counted from 0: nothing was sent",
                topic=topic,
                partition=record.partition,
                index=index,
            )


def _name_misfits(part: str, texts: Sequence[bytes | None], codec: Codec) -> NoReturn:
    """Raise an error that names every record whose key or value does not fit."""
    indexes: list[int] = []
    first: errors.EncodeError | None = None
    for index, text in enumerate(texts):
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


def _headers_of(record: _Record, first: list[Header], correlation: bytes, traceability: bytes | None) -> list[Header]:
    headers = first.copy()
    if record.traceability_id is not None:
        traceability = record.traceability_id.encode()
    if traceability is not None:
        headers.append((_TRACEABILITY, traceability))
    if record.correlation_id is not None:
        correlation = record.correlation_id.encode()
    headers.append((_CORRELATION, correlation))
    if record.headers:
        own = record.headers.items() if isinstance(record.headers, dict) else record.headers
        headers += [
            (name, None if text is None else text.encode()) for name, text in own if name.lower() not in _OWN_HEADERS
        ]
    return headers
