"""What `headrace produce` reads: lines or JSON objects, each of which becomes a record."""

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import IO, Any, Final, NamedTuple

import msgspec

from headrace.config.format_list import STRINGS
from headrace.errors import EncodeError, HeadraceError, InvalidRequest
from headrace.formats.choice import Codecs, SchemaChoice
from headrace.formats.plain import BinaryCodec, JsonCodec, ValueEncoder
from headrace.kafka.timestamps import milliseconds, parse_time
from headrace.records import Header, OutgoingRecord
from headrace.runtime import run_blocking

_CHUNK_BYTES: Final = 1_048_576
MAX_LINE_BYTES: Final = 16_777_216
_BINARY: Final = "binary"


class Encoding(NamedTuple):
    """How texts and JSON values become keys or values."""

    of_text: Callable[[bytes], bytes]
    """Encodes a text. Raises HeadraceError if it does not fit the format."""
    of_json: Callable[[bytes], bytes]
    """Encodes a JSON value that is not null; raises as well."""

    @classmethod
    async def find(cls, codecs: Codecs, name: str | None, subject: str, schema: SchemaChoice) -> "Encoding":
        """Return the encoding of a format, with its newest schema unless another is chosen.

        Without a format, a text is stored as it is; of JSON, a string is its text, and another value its JSON.
        """
        if name is None and schema == SchemaChoice():
            return cls(_checked_text, _plain)
        codec = (await codecs.for_writing(schema._replace(format=name), name or "string", subject)).codec
        return cls(functools.partial(_encoded, codec, name in STRINGS), codec.encode)


def _checked_text(text: bytes) -> bytes:
    try:
        str(text, "utf-8")
    except UnicodeDecodeError as cause:
        raise EncodeError("not UTF-8 text") from cause
    return text


def _plain(value: bytes) -> bytes:
    return msgspec.json.decode(value, type=str).encode() if value[:1] == b'"' else value


def _encoded(codec: ValueEncoder, is_text: bool, text: bytes) -> bytes:
    return codec.encode(msgspec.json.encode(_checked_text(text).decode()) if is_text else JsonCodec().decode(text))


class RecordFields(NamedTuple):
    """What the options say of each record."""

    topic: str
    values: Encoding
    keys: Encoding
    key: bytes | None = None
    """The key of records that have none of their own."""
    key_separator: bytes | None = None
    """Between key and value of a line; None if lines have no key."""
    headers: Sequence[Header] = ()
    partition: int | None = None
    timestamp_ms: int = 0
    tombstones: bool = False
    """Whether an empty value is null."""

    def record(self, key: bytes | None, value: bytes | None, **own: Any) -> OutgoingRecord:
        """Return a record with these fields where it has none of its own."""
        headers = [*self.headers, *own.get("headers", ())]
        partition = self.partition if own.get("partition") is None else own["partition"]
        return OutgoingRecord(
            self.topic, key, value, headers or None, partition, own.get("timestamp_ms") or self.timestamp_ms
        )


class NdjsonRecord(msgspec.Struct, forbid_unknown_fields=True):
    """One line of NDJSON. It takes what `headrace consume --output json` prints, and uses what a record can have."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    key: msgspec.Raw = msgspec.Raw(b"null")
    headers: dict[str, str | None] | list[tuple[str, str | None]] = []
    partition: int | None = None
    timestamp: int | str = 0
    """Milliseconds since the epoch, or ISO 8601."""
    timestamp_ms: int = 0
    key_format: str | None = None
    value_format: str | None = None
    """`binary`: it is base64, whatever the format of the others."""
    topic: str = ""
    offset: int = 0
    timestamp_type: str = ""
    key_schema_id: int | None = None
    value_schema_id: int | None = None


_decode_object = msgspec.json.Decoder(NdjsonRecord).decode


def of_line(fields: RecordFields, line: bytes) -> OutgoingRecord | None:
    """Return the record of a line; None for an empty one.

    Raises:
        HeadraceError: It has no separator, or does not fit the format.
    """
    if not line:
        return fields.record(fields.key, None) if fields.tombstones and fields.key is not None else None
    if fields.key_separator is None:
        return fields.record(fields.key, fields.values.of_text(line))
    key, separator, value = line.partition(fields.key_separator)
    if not separator and not fields.tombstones:
        name = "tab" if fields.key_separator == b"\t" else repr(fields.key_separator.decode(errors="replace"))
        raise InvalidRequest(f"--keys requires a {name} between key and value")
    is_null = fields.tombstones and not value
    return fields.record(fields.keys.of_text(key), None if is_null else fields.values.of_text(value))


def of_object(fields: RecordFields, line: bytes) -> OutgoingRecord | None:
    """Return the record of a line of NDJSON; raises as `of_line`."""
    if not line.strip():
        return None
    try:
        found = _decode_object(line)
        written = milliseconds(parse_time(found.timestamp)) if isinstance(found.timestamp, str) else found.timestamp
    except (msgspec.DecodeError, ValueError) as cause:  # a ValidationError of msgspec is a DecodeError
        raise InvalidRequest(f"not a JSON object of a record: {cause}") from None
    key = _from_json(fields.keys, found.key, found.key_format)
    value = _from_json(fields.values, found.value, found.value_format)
    pairs = found.headers.items() if isinstance(found.headers, dict) else found.headers
    headers = [(name, None if text is None else text.encode()) for name, text in pairs]
    return fields.record(
        fields.key if key is None else key,
        None if fields.tombstones and not value else value,
        headers=headers,
        partition=found.partition,
        timestamp_ms=written or found.timestamp_ms,
    )


def _from_json(encoding: Encoding, raw: msgspec.Raw, name: str | None) -> bytes | None:
    text = bytes(raw)
    if text == b"null":
        return None
    return BinaryCodec().encode(text) if name == _BINARY else encoding.of_json(text)


def encode_lines(
    fields: RecordFields,
    make: Callable[[RecordFields, bytes], OutgoingRecord | None],
    lines: Iterable[bytes],
    before: int,
) -> tuple[list[OutgoingRecord], HeadraceError | None]:
    """Return the records up to the first invalid line, and the error of that one.

    `before` is the number of earlier lines, for the number in the error.
    """
    records: list[OutgoingRecord] = []
    for number, line in enumerate(lines, before + 1):
        try:
            if (record := make(fields, line)) is not None:
                records.append(record)
        except HeadraceError as cause:
            text = f"line {number}: {cause}. This line and later ones were not sent"
            return records, InvalidRequest(text, line=number)
    return records, None


async def read_lines(file: IO[bytes], separator: bytes = b"\n") -> AsyncIterator[list[bytes]]:
    """Yield the available lines without waiting for more, so that lines of a slow pipe are sent at once.

    Raises:
        InvalidRequest: A line is too long.
    """
    rest = b""
    while data := await run_blocking(file.read1, _CHUNK_BYTES):  # type: ignore[attr-defined]
        *lines, rest = (rest + data).split(separator)
        if len(rest) > MAX_LINE_BYTES:
            raise InvalidRequest(f"a line is longer than {MAX_LINE_BYTES} bytes: the input must be lines of text")
        if lines:
            yield [line.removesuffix(b"\r") for line in lines] if separator == b"\n" else lines
        await asyncio.sleep(0)
    if rest:
        yield [rest]
