"""The body of a request: decoded keys and values, and an array of records; and the response as replies.

Source: light-4j kafka-sidecar, `/consumers` (the array of results).
"""

import re
from collections.abc import Sequence
from typing import Final

import msgspec

from headrace.config.format_list import FORMATS, SCHEMA_TYPES, STRINGS
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.errors import DestinationRefused
from headrace.formats.choice import Reader
from headrace.formats.plain import StringCodec
from headrace.records import RecordBatch
from headrace.sidecar.record_json import join_array, write_records

_REASON_CHARACTERS: Final = 8000
_NAME: Final = r"[A-Za-z_$][\w$]{,99}"
_TRACEBACK: Final = "Traceback (most recent call last):"
_ERROR_CLASS: Final = re.compile(rf"((?:{_NAME}\.){{,9}}(?:[A-Z][\w$]{{,99}}|{_NAME}(?:Error|Exception)))(?::|$)")
_decode_text = msgspec.json.Decoder(str).decode


class PayloadDecoder:
    """Decodes keys and values of one consumer's records."""

    def __init__(self, keys: Reader, key_format: str, values: Reader, value_format: str) -> None:
        self.keys = keys
        self._key_format = key_format
        self.values = values
        self._value_format = value_format
        self.content_type = FORMATS[value_format].media_type
        """Of what `body` returns."""

    @property
    def needs_schemas(self) -> bool:
        """Whether `load` must be awaited before anything else."""
        return self.keys.names_schemas or self.values.names_schemas

    async def load(self, records: RecordBatch) -> None:
        """Fetch the schemas that these records name.

        Raises:
            RegistryUnavailable: A schema is not cached, and the registry does not respond.
        """
        await self.keys.prepare(records.keys)
        await self.values.prepare(records.values)

    def key_text(self, key: bytes | None) -> str | None:
        """Return a key outside of JSON: text unchanged, bytes as base64, anything else as JSON text.

        Raises:
            DecodeError: It does not fit its format; also raised by `body`.
        """
        if key is None:
            return None
        if self._key_format == "string":
            return StringCodec.decode_python(key)  # `decode` would quote it
        found = self.keys.decode(key) or b""
        return _decode_text(found) if self._key_format in STRINGS else found.decode()

    def body(self, value: bytes | None) -> bytes:
        """Return a value as the body of a request; empty when it is null."""
        if value is None or self._value_format == "binary":
            return value or b""
        found = self.values.decode(value)
        return found or b"" if self._value_format in SCHEMA_TYPES else value


class _Echo(msgspec.Struct):
    """Coordinates of an echoed record; other fields are ignored."""

    topic: str | None = None
    partition: int | None = None
    offset: int | None = None


class _Result(msgspec.Struct):
    """One result in a backend's response; unknown fields are ignored."""

    processed: bool | None = None
    permanent: object = None
    record: _Echo | None = None
    consumer_record: _Echo | None = msgspec.field(default=None, name="consumerRecord")
    key: str | int | float | None = None
    stacktrace: str | None = None
    correlation_id: str | None = msgspec.field(default=None, name="correlationId")
    traceability_id: str | None = msgspec.field(default=None, name="traceabilityId")
    timestamp: int | None = None

    @property
    def position(self) -> tuple[str | None, int | None, int | None] | None:
        """Topic, partition and offset, if the result names any of them."""
        for echo in (self.record, self.consumer_record):
            if echo and (position := (echo.topic, echo.partition, echo.offset)) != (None, None, None):
                return position
        return None


_decode_results = msgspec.json.Decoder(list[_Result]).decode


def array_of(
    delivery: Delivery, records: RecordBatch, keys: Sequence[bytes | None], values: Sequence[bytes | None]
) -> bytes:
    """Return records as a JSON array; `keys` and `values` are JSON texts."""
    return join_array([write_records(delivery.group, delivery.partition, records, keys, values, delivery=delivery)])


def replies_of(response: bytes, sent: RecordBatch) -> list[Reply]:
    """Return one reply per sent record from a backend's response, matched by coordinates where it echoes them.

    Raises:
        DestinationRefused: The response is not one result per record.
    """
    try:
        results = _decode_results(response)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        raise DestinationRefused(
            f"the backend's response is not a JSON array of results ({cause}); return one object with "
            '"processed" per record, or set backend.mode: status'
        ) from cause
    if len(results) != len(sent):
        raise DestinationRefused(
            f"the backend answered {len(results)} results for {len(sent)} records; return one per record"
        )
    positions = [result.position for result in results]
    if any(positions):
        results = _by_position(results, positions, sent)
    return [ACK if result.processed else _failed(result) for result in results]


def _by_position(
    results: Sequence[_Result], positions: Sequence[tuple[object, ...] | None], sent: RecordBatch
) -> list[_Result]:
    """Return results in the order of the records: their number is the same, so without repeats each has its own."""
    found: dict[tuple[object, ...], _Result] = {}
    order = [(*sent.topic_partition, offset) for offset in sent.offsets]
    known = {*order}
    for index, (result, position) in enumerate(zip(results, positions, strict=True)):
        problem = ""
        if position is None or None in position:
            problem = "has no topic, partition and offset, but others have; echo all records or none"
        elif position not in known:
            where = f"{position[0]}-{position[1]} offset {position[2]}"
            problem = f"is for {where}, which was not sent; echo the record unchanged"
        elif position in found:
            problem = f"is the second for offset {position[2]}; return one per record"
        if problem or position is None:
            raise DestinationRefused(f"the backend's result {index} {problem}")
        found[position] = result
    return [found[position] for position in order]


def _failed(result: _Result) -> Reply:
    reason = (result.stacktrace or "the backend answered processed: false")[:_REASON_CHARACTERS]
    stack = ""
    if reason.lstrip().startswith(_TRACEBACK):  # the error is its last line, so the end is kept
        stack = (result.stacktrace or "").strip()[-_REASON_CHARACTERS:]
        reason = stack.splitlines()[-1]
    values = {
        "key": result.key,
        "correlation_id": result.correlation_id,
        "traceability_id": result.traceability_id,
        "result_timestamp": result.timestamp,
    }
    details = tuple((name, str(value)) for name, value in values.items() if value is not None)
    error = _class_of(result.stacktrace or "")
    return Reply(error, reason, details=details, stack=stack, permanent=result.permanent is True)


def _class_of(trace: str) -> str:
    """Return the error class in the first line of a stack trace, as in Java, or in the last one, as in Python."""
    lines = trace.strip().splitlines() or [""]
    found = _ERROR_CLASS.match(lines[0]) or _ERROR_CLASS.match(lines[-1])
    return found[1] if found else "not processed"
