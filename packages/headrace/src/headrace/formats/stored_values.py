"""Decides what a stored key or value is: of a chosen format, of the schema that it names, or what its bytes read as."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import msgspec

from headrace.config.format_list import STRINGS
from headrace.errors import FormatError, RegistryUnavailable
from headrace.formats.choice import Codecs
from headrace.formats.plain import schema_id_of, unframe
from headrace.formats.schema_codec import PLAIN_CODECS

AUTO: Final = "auto"
"""In place of a format: the one that fits each key or value."""
Shown = str | msgspec.Raw | bytes | None
"""A text, JSON, bytes that are not text, or null. In JSON it is the value, with bytes in base64."""
_PATIENCE_SECONDS: Final = 10.0
_MOST_UNKNOWN: Final = 20
_decode_text = msgspec.json.Decoder(str).decode


class StoredValue(NamedTuple):
    """A key or value."""

    format: str
    """The chosen format, `schema` with the id of one that the registry has, `json`, `string`, `binary` or `null`."""
    shown: Shown

    @property
    def text(self) -> bytes | None:
        """What is shown, in JSON; None for null."""
        return None if self.shown is None else msgspec.json.encode(self.shown)


def by_bytes(data: bytes, *, finds_json: bool = True) -> StoredValue:
    """Return what bytes are that name no schema: text, also of JSON's objects and arrays, else binary."""
    if finds_json and data[:1] in (b"{", b"["):
        with contextlib.suppress(FormatError):
            return StoredValue("json", msgspec.Raw(PLAIN_CODECS["json"].decode(data)))
    try:
        return StoredValue("string", str(data, "utf-8"))
    except UnicodeDecodeError:
        return StoredValue("binary", data)


def texts_of(payloads: Sequence[bytes | None]) -> list[Shown]:
    """Return texts as they are stored."""
    return [None if data is None else str(data, "utf-8") for data in payloads]


class StoredValues:
    """Decodes the keys, or the values, of records; await `prepare` first.

    Bytes may begin like those with a schema by accident, so a schema that is not there is not an error.
    """

    def __init__(
        self,
        codecs: Codecs,
        format_name: str = AUTO,
        *,
        is_strict: bool = True,
        finds_json: bool = False,
        as_rows: bool = False,
        report: Callable[[str], object] | None = None,
    ) -> None:
        """Prepare.

        Args:
            is_strict: Whether each must be of the chosen format; otherwise another one may fit.
            finds_json: Whether text that is an object or an array is JSON.
            as_rows: Whether values of a schema are for columns of SQL.
            report: Gets a sentence if the registry does not respond.
        """
        self._codecs = codecs
        self._name = format_name
        self._reader = None if format_name == AUTO else codecs.for_reading(format_name)
        self._is_strict = is_strict
        self._is_text = format_name in STRINGS
        self._finds_json = finds_json
        self._as_rows = as_rows
        self._report = report
        self._unknown: set[int] = set()
        self._ask_at = 0.0

    async def prepare(self, payloads: Sequence[bytes | None]) -> None:
        """Fetch the schemas that these bytes name.

        Raises:
            RegistryUnavailable: One is needed for the chosen format, and the registry does not respond.
        """
        if self._reader and self._is_strict:
            await self._reader.prepare(payloads)
            return
        named = {schema_id_of(data) for data in payloads if data and not data[0]}
        for schema_id in named - self._unknown:
            if schema_id is None or self._codecs.loaded(schema_id):
                continue
            now = asyncio.get_running_loop().time()
            if len(self._unknown) >= _MOST_UNKNOWN or now < self._ask_at:
                return
            try:
                await self._codecs.load(schema_id)
            except RegistryUnavailable as cause:
                if self._report and not self._ask_at:
                    self._report(f"values that name schema id {schema_id} are shown as bytes: {cause}")
                self._ask_at = now + _PATIENCE_SECONDS
                return
            if not self._codecs.loaded(schema_id):
                self._unknown.add(schema_id)

    def shown(self, payloads: Sequence[bytes | None]) -> list[Shown]:
        """Return what is shown for each payload.

        Raises:
            DecodeError: One is not of the chosen format, and must be.
        """
        if self.text_of(payloads) is not None:
            return texts_of(payloads)
        if self._reader and self._is_strict:
            return [None if text is None else self._of_format(text) for text in self._reader.texts(payloads)]
        return [self.find(data).shown for data in payloads]

    def text_of(self, payloads: Sequence[bytes | None]) -> bytes | None:
        """Return payloads, joined by line ends and `null` for null, if each is text that is shown as it is stored.

        `prepare` is not needed for that.
        """
        if self._reader and not self._is_text:
            return None
        try:
            joined = b"\n".join(payloads)  # type: ignore[arg-type]
        except TypeError:
            joined = b"\n".join([b"null" if data is None else data for data in payloads])
        if not self._is_text and b"\0" in joined:  # it may name a schema
            return None
        try:
            return joined if joined.isascii() or str(joined, "utf-8") else None
        except UnicodeDecodeError:
            return None

    def find(self, data: bytes | None) -> StoredValue:
        """Return what a key or value is: of the chosen format if it fits, else of another."""
        if data is None:
            return StoredValue("null", None)
        try:
            if self._reader and (text := self._reader.decode(data)) is not None:
                return StoredValue(self._name, self._of_format(text))
        except FormatError:
            pass
        schema_id = schema_id_of(data)
        if schema_id is not None and (codec := self._codecs.loaded(schema_id)):
            try:
                decode = codec.decode_row if self._as_rows else codec.decode
                return StoredValue(f"schema {schema_id}", msgspec.Raw(decode(unframe(data)[1])))
            except FormatError:
                pass
        return by_bytes(data, finds_json=self._finds_json)

    def _of_format(self, text: bytes) -> str | msgspec.Raw:
        return _decode_text(text) if self._is_text else msgspec.Raw(text)
