"""Keys and values of records as a command shows them: text, JSON, or bytes that are neither."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Final, Protocol

import msgspec

from headrace.config.format_list import STRINGS
from headrace.config.kafka import SchemaRegistryConfig
from headrace.errors import DecodeError, FormatError, RegistryUnavailable
from headrace.formats.choice import Codecs, Reader
from headrace.formats.plain import schema_id_of, unframe
from headrace.formats.registry import SchemaRegistry
from headrace.runtime import SystemClock

AUTO: Final = "auto"
Shown = str | msgspec.Raw | bytes | None
"""A text, JSON, bytes that are not text, or null."""
_PATIENCE_SECONDS: Final = 10.0
_MOST_UNKNOWN: Final = 20


class Values(Protocol):
    """Decodes the keys, or the values, of records."""

    async def prepare(self, payloads: Sequence[bytes | None]) -> None:
        """Fetch the schemas that these bytes name."""

    def shown(self, payloads: Sequence[bytes | None]) -> list[Shown]:
        """Return what is shown for each payload.

        Raises:
            DecodeError: One is not of the format.
        """


class FormatValues:
    """Values of one format; others end the command."""

    def __init__(self, reader: Reader, name: str) -> None:
        self._reader = reader
        self._is_text = name in STRINGS

    async def prepare(self, payloads: Sequence[bytes | None]) -> None:
        await self._reader.prepare(payloads)

    def shown(self, payloads: Sequence[bytes | None]) -> list[Shown]:
        decode = self._reader.decode
        found = [decode(data) for data in payloads]
        if self._is_text:
            return [None if text is None else msgspec.json.decode(text, type=str) for text in found]
        return [None if text is None else msgspec.Raw(text) for text in found]


class AutoValues:
    """Values that are decoded by the schema that they name, and otherwise are text, or bytes.

    A value may begin like one with a schema by accident, so a schema that is not there is no error.
    """

    def __init__(self, codecs: Codecs, report: Callable[[str], None]) -> None:
        """Prepare; `report` gets a sentence if the registry does not respond."""
        self._codecs = codecs
        self._report = report
        self._unknown: set[int] = set()
        self._ask_at = 0.0

    async def prepare(self, payloads: Sequence[bytes | None]) -> None:
        named = {schema_id_of(data) for data in payloads if data and not data[0]}
        for schema_id in named - self._unknown:
            if schema_id is None or self._codecs.loaded(schema_id):
                continue
            if len(self._unknown) >= _MOST_UNKNOWN or time.monotonic() < self._ask_at:
                return
            try:
                await self._codecs.load(schema_id)
            except RegistryUnavailable as cause:
                if not self._ask_at:
                    self._report(f"values that name schema id {schema_id} are shown as bytes: {cause}")
                self._ask_at = time.monotonic() + _PATIENCE_SECONDS
                return
            if not self._codecs.loaded(schema_id):
                self._unknown.add(schema_id)

    def shown(self, payloads: Sequence[bytes | None]) -> list[Shown]:
        with contextlib.suppress(TypeError, UnicodeDecodeError):  # most are text, and none is null
            if b"\0" not in b"".join(payloads):  # type: ignore[arg-type]
                return [str(data, "utf-8") for data in payloads]  # type: ignore[arg-type]
        return [None if data is None else self._show(data) for data in payloads]

    def _show(self, data: bytes) -> Shown:
        if data[:1] == b"\0" and (text := self._decoded(data)) is not None:
            return msgspec.Raw(text)
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            return data

    def _decoded(self, data: bytes) -> bytes | None:
        schema_id = schema_id_of(data)
        if schema_id is None or (codec := self._codecs.loaded(schema_id)) is None:
            return None
        try:
            return codec.decode(unframe(data)[1])
        except FormatError:
            return None


def values_of(codecs: Codecs, name: str, report: Callable[[str], None]) -> Values:
    """Return what decodes a format; `auto` finds it for each value."""
    return AutoValues(codecs, report) if name == AUTO else FormatValues(codecs.for_reading(name), name)


def first_problem(values: Values, payloads: Sequence[bytes | None]) -> tuple[int, DecodeError] | None:
    """Return the index of the first payload that is not of the format, and its error."""
    for at, data in enumerate(payloads):
        try:
            values.shown([data])
        except DecodeError as cause:
            return at, cause
    return None


@contextlib.asynccontextmanager
async def open_codecs(registry: SchemaRegistryConfig) -> AsyncIterator[Codecs]:
    """Provide the codecs for a command; only formats with a schema use the registry."""
    client = SchemaRegistry(registry, SystemClock())
    try:
        yield Codecs(client, plain_unions=registry.avro_unions == "plain")
    finally:
        await client.close()
