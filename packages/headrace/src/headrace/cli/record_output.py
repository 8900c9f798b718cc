"""Records as `headrace consume` prints them: lines of text, a template with kcat's tokens, or JSON."""

import re
from collections.abc import Iterable, Sequence
from itertools import chain, repeat
from typing import Any, Final, NamedTuple

import msgspec

from headrace.formats.plain import schema_id_of
from headrace.formats.stored_values import Shown, texts_of
from headrace.kafka.timestamps import iso_ms
from headrace.records import Header, RecordBatch
from headrace.runtime.invisible import INVISIBLE, escaped

_NULL: Final = re.compile(rb'null[\\"]*(\n|\Z)')
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "0": "\0", "\\": "\\"}
TOKENS: Final = "topic %t, partition %p, offset %o, key %k, value %s, headers %h, time in ms %T, lengths %K %S"


class ShownBatch(NamedTuple):
    """Records of one partition with their decoded keys and values."""

    batch: RecordBatch
    keys: list[Shown] | bytes | None
    """One text if all of them are text as it is stored (`StoredValues.text_of`); None if they are not shown."""
    values: list[Shown] | bytes | None
    """As keys."""
    has_append_times: bool = False


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


def _has_null(text: bytes) -> bool:
    """Return whether one of several texts may be `null`, or look like it; they are joined by line ends."""
    return b"null" in text and _NULL.search(text) is not None


def headers_of(headers: Sequence[Header] | None) -> str:
    """Return headers as kcat prints them: `name=value,...`."""
    return ",".join(f"{name}={'NULL' if text is None else text}" for name, text in _pairs(headers))


class Template:
    """A text per record, with kcat's tokens. The records of a batch are formatted together."""

    def __init__(self, template: str, *, terminal: bool, exact: bool = True) -> None:
        """Compile a template; if it is `exact`, keys and values are as kcat prints them, else as `line_of` does.

        Raises:
            ValueError: It has an unknown token or escape.
        """
        self._terminal = terminal
        self._exact = exact
        literals = re.split(r"%(.|$)", unescaped(template), flags=re.DOTALL)
        tokens, form = literals[1::2], literals[0]
        accepted = "tpokshTKS%" if exact else "ksD"  # D: the time as text
        if unknown := [token for token in tokens if not token or token not in accepted]:
            raise ValueError(f"%{unknown[0]} is not a token of a template; use {TOKENS}, and %%")
        for token, literal in zip(tokens, literals[2::2], strict=True):
            form += f"%{'%' if token == '%' else 'd' if token in 'poTKS' else 'b'}{literal}"
        self._form = form.encode(errors="surrogateescape")
        self._tokens = [token for token in tokens if token != "%"]
        self._is_line = self._form == b"%b\n" and self._tokens == ["s"] and not terminal
        self.needs_keys, self.needs_values = "k" in tokens, "s" in tokens

    def __call__(self, shown: ShownBatch) -> bytes:
        if self._is_line and isinstance(shown.values, bytes) and not _has_null(shown.values):
            return shown.values + b"\n"
        columns = [self._column(token, shown) for token in self._tokens]
        cells = columns[0] if len(columns) == 1 else chain.from_iterable(zip(*columns, strict=True))
        return self._form * len(shown.batch) % tuple(cells)

    def _column(self, token: str, shown: ShownBatch) -> Sequence[int] | Sequence[bytes | None]:
        batch = shown.batch
        if token in "KS":
            return [-1 if data is None else len(data) for data in (batch.keys if token == "K" else batch.values)]
        if token in "ks":
            stored, decoded = (batch.keys, shown.keys) if token == "k" else (batch.values, shown.values)
            return self._cells(stored, decoded)
        if token == "h":
            return self._encoded(map(headers_of, batch.headers or repeat(None, len(batch))))
        if token == "D":
            times = {ms: iso_ms(ms).encode() for ms in {*batch.timestamps_ms}}
            return [times[ms] for ms in batch.timestamps_ms]
        if token in "oT":
            return batch.offsets if token == "o" else batch.timestamps_ms
        topic, partition = batch.topic_partition
        return [topic.encode()] * len(batch) if token == "t" else [partition] * len(batch)

    def _cells(self, stored: Sequence[bytes | None], decoded: list[Shown] | bytes | None) -> Sequence[bytes | None]:
        if isinstance(decoded, bytes) and not self._terminal:
            if not _has_null(decoded):
                return stored
            if self._exact:
                return [data or b"" for data in stored]
        texts = decoded if isinstance(decoded, list) else texts_of(stored)
        return self._encoded(map(_exact if self._exact else line_of, texts))

    def _encoded(self, texts: Iterable[str]) -> list[bytes]:
        if self._terminal:
            texts = map(for_terminal, texts)
        return [text.encode(errors="surrogateescape") for text in texts]


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

    needs_keys = needs_values = True

    def __init__(self, *, terminal: bool) -> None:
        self._terminal = terminal
        self._encode = msgspec.json.Encoder().encode_lines

    def __call__(self, shown: ShownBatch) -> bytes:
        batch = shown.batch
        topic, partition = batch.topic_partition
        kind = "log_append_time" if shown.has_append_times else "create_time"
        headers = [_pairs(found) for found in batch.headers] if batch.headers else repeat(_NO_HEADERS, len(batch))
        keys = shown.keys if isinstance(shown.keys, list) else texts_of(batch.keys)
        values = shown.values if isinstance(shown.values, list) else texts_of(batch.values)
        rows = zip(batch.offsets, batch.timestamps_ms, keys, headers, values, strict=True)
        records = [JsonRecord(topic, partition, at, ms, kind, key, pairs, value) for at, ms, key, pairs, value in rows]
        if isinstance(shown.keys, list) or isinstance(shown.values, list):
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


RecordRenderer = Template | JsonLines
"""Writes records in one way: returns what is printed."""
