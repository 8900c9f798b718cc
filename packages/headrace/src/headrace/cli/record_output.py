"""Records as `headrace consume` prints them: lines of text, a template with kcat's tokens, or JSON."""

import re
from collections.abc import Callable, Sequence
from itertools import chain, repeat, zip_longest
from typing import Any, Final, NamedTuple

import msgspec

from headrace.formats.plain import schema_id_of
from headrace.formats.stored_values import Shown
from headrace.kafka.timestamps import iso_ms
from headrace.records import Header, RecordBatch
from headrace.runtime.invisible import INVISIBLE, escaped

_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "\\": "\\"}
TOKENS: Final = "topic %t, partition %p, offset %o, key %k, value %s, headers %h, time in ms %T, lengths %K %S"


class ShownBatch(NamedTuple):
    """Records of one partition with their decoded keys and values."""

    batch: RecordBatch
    keys: Sequence[Shown]
    """Empty if keys are not shown."""
    values: Sequence[Shown]
    """Empty if values are not shown, or if they are as stored."""
    has_append_times: bool = False


RecordRenderer = Callable[[ShownBatch], bytes]
"""Writes records in one way: returns what is printed."""


def for_terminal(text: str) -> str:
    """Return a text whose invisible characters are escaped, except line ends and tabs: it may be of an attacker."""
    return INVISIBLE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    try:
        if not "\ud800" <= found[0] <= "\udfff":
            return ascii(found[0])[1:-1]
        return f"\\x{found[0].encode(errors='surrogateescape')[0]:02x}"
    except UnicodeEncodeError:
        return "\ufffd"


def unescaped(text: str) -> str:
    r"""Return a text with `\n`, `\r`, `\t`, `\0`, `\\` and `\xHH` as the characters that they mean.

    Raises:
        ValueError: Another character follows a backslash.
    """

    def character(found: re.Match[str]) -> str:
        if found[2]:
            return bytes([int(found[2], 16)]).decode(errors="surrogateescape")
        if found[1] not in _ESCAPES:
            raise ValueError(f"\\{found[1]} is not a valid escape; write \\n, \\r, \\t, \\0, \\\\ or \\xHH")
        return _ESCAPES[found[1]]

    return re.sub(r"\\(x([0-9A-Fa-f]{2})|.|$)", character, text, flags=re.DOTALL)


def line_of(value: Shown) -> str:
    """Return a value as text: a text without quotes, JSON as it is, escaped bytes, `null` for none.

    A text that would look like `null` has quotes.
    """
    if value is None:
        return "null"
    if isinstance(value, str):
        return msgspec.json.encode(value).decode() if value.strip('\\"') == "null" else value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return bytes(value).decode()


def headers_of(headers: Sequence[Header] | None) -> str:
    """Return headers as kcat prints them: `name=value,...`."""
    return ",".join(f"{name}={_header_text(value)}" for name, value in headers or ())


def _header_text(value: bytes | None) -> str:
    return "NULL" if value is None else value.decode(errors="backslashreplace")


class TextLines:
    """One line per record: time, key, value, as far as they were chosen."""

    def __init__(self, columns: Sequence[str], *, stored: bool, terminal: bool) -> None:
        """Prepare; `stored` is whether values are text as they are stored."""
        self._columns = columns
        self._terminal = terminal
        self._is_plain = stored and not terminal and [*columns] == ["value"]

    def fast(self, batch: RecordBatch) -> bytes | None:
        """Return the lines of values that are plain text; None if one of them is not, or if more is shown."""
        if not self._is_plain:
            return None
        try:
            data = b"\n".join(batch.values)  # type: ignore[arg-type]
            if b"\0" in data or b"null" in data:
                return None
            str(data, "utf-8")
        except (TypeError, UnicodeDecodeError):  # a null, or bytes that are not text
            return None
        return data + b"\n"

    def __call__(self, shown: ShownBatch) -> bytes:
        cells = [self._cells(name, shown) for name in self._columns]
        lines = ["\t".join(row) + "\n" for row in zip(*cells, strict=True)]
        return "".join(lines).encode(errors="backslashreplace")

    def _cells(self, name: str, shown: ShownBatch) -> list[str]:
        found = _column(name, shown)
        return [for_terminal(text) for text in found] if self._terminal else found


def _column(name: str, shown: ShownBatch) -> list[str]:
    batch = shown.batch
    makers: dict[str, Callable[[], list[str]]] = {
        "topic": lambda: [batch.topic_partition.topic] * len(batch),
        "partition": lambda: [str(batch.topic_partition.partition)] * len(batch),
        "offset": lambda: [*map(str, batch.offsets)],
        "time": lambda: [*map(iso_ms, batch.timestamps_ms)],
        "key": lambda: [*map(line_of, shown.keys)],
        "headers": lambda: [*map(headers_of, batch.headers or repeat(None, len(batch)))],
        "value": lambda: [*map(line_of, shown.values)],
    }
    return makers[name]()


class Template:
    """A text per record, with kcat's tokens."""

    def __init__(self, template: str, *, terminal: bool) -> None:
        """Compile a template.

        Raises:
            ValueError: It has an unknown token or escape.
        """
        self._terminal = terminal
        parts = re.split(r"%(.|$)", unescaped(template), flags=re.DOTALL)
        self._literals, self._tokens = parts[::2], parts[1::2]
        if unknown := [token for token in self._tokens if not token or token not in "tpokshTKS%"]:
            raise ValueError(f"%{unknown[0]} is not a token of a template; use {TOKENS}, and %%")
        self.needs_keys, self.needs_values = "k" in self._tokens, "s" in self._tokens

    def __call__(self, shown: ShownBatch) -> bytes:
        columns: list[Any] = []
        for literal, token in zip_longest(self._literals, self._tokens):
            columns.append(repeat(literal, len(shown.batch)))
            if token:
                columns.append(self._texts(token, shown))
        return "".join(chain.from_iterable(zip(*columns, strict=True))).encode(errors="surrogateescape")

    def _texts(self, token: str, shown: ShownBatch) -> Any:
        found = _template_column(token, shown)
        return map(for_terminal, found) if self._terminal else found


def _template_column(token: str, shown: ShownBatch) -> Any:
    batch = shown.batch
    if token == "%":
        return repeat("%", len(batch))
    if token in "ks":
        return map(_exact, shown.keys if token == "k" else shown.values)
    if token in "KS":
        return [str(-1 if data is None else len(data)) for data in (batch.keys if token == "K" else batch.values)]
    if token == "T":
        return map(str, batch.timestamps_ms)
    return _column({"t": "topic", "p": "partition", "o": "offset", "h": "headers"}[token], shown)


def _exact(value: Shown) -> str:
    """Return a value as kcat prints it: null is empty, and bytes stay as they are."""
    if isinstance(value, bytes):
        return value.decode(errors="surrogateescape")
    return "" if value is None else value if isinstance(value, str) else bytes(value).decode()


class JsonRecord(msgspec.Struct, omit_defaults=True, gc=False):
    """One record in JSON; `headrace produce --input ndjson` takes it again."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: str
    """`create_time`, or `log_append_time`: that of the broker."""
    key: Shown
    headers: list[tuple[str, str | None]]
    value: Shown
    """Bytes that are not text are base64, and then the format is `binary`."""
    key_format: str | None = None
    value_format: str | None = None
    key_schema_id: int | None = None
    value_schema_id: int | None = None


_NO_HEADERS: Final[list[tuple[str, str | None]]] = []


class JsonLines:
    """One JSON object per record."""

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        self._encode = msgspec.json.Encoder().encode_lines

    def __call__(self, shown: ShownBatch) -> bytes:
        batch = shown.batch
        topic, partition = batch.topic_partition
        kind = "log_append_time" if shown.has_append_times else "create_time"
        headers = [_pairs(found) for found in batch.headers] if batch.headers else repeat(_NO_HEADERS, len(batch))
        rows = zip(batch.offsets, batch.timestamps_ms, shown.keys, headers, shown.values, strict=True)
        records = [JsonRecord(topic, partition, at, ms, kind, key, pairs, value) for at, ms, key, pairs, value in rows]
        if not {*map(type, shown.keys), *map(type, shown.values)} <= {str, type(None)}:
            self._describe(records, batch)
        data = self._encode(records)
        return escaped(data.decode()).encode() if self._terminal else data

    def _describe(self, records: Sequence[JsonRecord], batch: RecordBatch) -> None:
        for record, key, value in zip(records, batch.keys, batch.values, strict=True):
            record.key_format, record.key_schema_id = _described(record.key, key)
            record.value_format, record.value_schema_id = _described(record.value, value)


def _described(shown: Any, data: bytes | None) -> tuple[str | None, int | None]:
    return "binary" if isinstance(shown, bytes) else None, schema_id_of(data) if isinstance(
        shown, msgspec.Raw
    ) and data else None


def _pairs(headers: Sequence[Header] | None) -> list[tuple[str, str | None]]:
    return [(name, None if data is None else data.decode(errors="backslashreplace")) for name, data in headers or ()]
