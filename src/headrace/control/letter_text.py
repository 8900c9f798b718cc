"""A dead letter as people read it: its history, its own headers, and key and value decoded when that is possible."""

from __future__ import annotations

from typing import Final

import msgspec

from headrace.control.letter_scan import Letter
from headrace.control.selection import iso_ms
from headrace.delivery.dead_letter import REDRIVE_COUNT, STACK_TRACE, own_headers
from headrace.errors import DecodeError, RegistryUnavailable
from headrace.formats.codec import SCHEMA_TYPES, schema_id_of
from headrace.formats.codecs import Codecs

_ANY_SCHEMA: Final = "schema"
_TOLD: Final = ("group", "attempts", "first_failure", "last_failure", "error", "status", "reason", "excerpt")


class LetterOrigin(msgspec.Struct, frozen=True, rename="camel"):
    """The record that a letter was."""

    topic: str
    partition: int
    offset: int
    timestamp: str


class ResultNotes(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """What the backend's result said beside the failure."""

    key: str = ""
    correlation_id: str = ""
    traceability_id: str = ""
    timestamp: str = ""


class ShownLetter(msgspec.Struct, frozen=True, rename="camel"):
    """A dead letter and why it is one."""

    partition: int
    offset: int
    timestamp: str
    ended: bool
    """Whether it was redriven, dropped, put into quarantine or delivered again."""
    origin: LetterOrigin
    group: str
    attempts: int
    first_failure: str
    last_failure: str
    error: str
    status: str
    """HTTP status of the last answer; empty if none blamed the record."""
    reason: str
    excerpt: str
    stack_trace: str
    result: ResultNotes
    redrives: int
    """How often it went back before it failed again."""
    headers: list[tuple[str, str | None]]
    """The record's own; bytes that are no text are written as `\\\\xff`."""
    key_format: str
    """How the key was read: a format, `schema` for any that the registry has, `binary` for base64, `null`."""
    key: msgspec.Raw
    value_format: str
    value: msgspec.Raw


class LetterText:
    """Reads keys and values in a format, or in one that fits."""

    def __init__(self, codecs: Codecs, key_format: str | None = None, value_format: str | None = None) -> None:
        """Prepare; formats that are not told are guessed: a schema of the registry, JSON, text, else base64.

        Raises:
            InvalidRequest: No such format.
        """
        for name in filter(None, (key_format, value_format)):
            codecs.for_reading(name)
        self._codecs = codecs
        self._formats = key_format, value_format
        self._without_registry = False

    async def shown(self, letter: Letter) -> ShownLetter:
        """Return a letter with its key and value in JSON."""
        record, origin, ended = letter
        headers = record.headers
        own = [(name, _text(data)) for name, data in own_headers(headers)]
        redrives, trace = dict(own).get(REDRIVE_COUNT) or "", dict(headers).get(STACK_TRACE) or b""
        key_format, key = await self._decoded(record.key, self._formats[0])
        value_format, value = await self._decoded(record.value, self._formats[1])
        return ShownLetter(
            partition=record.partition,
            offset=record.offset,
            timestamp=iso_ms(record.timestamp_ms),
            ended=ended,
            origin=LetterOrigin(*origin.partition, origin.offset, iso_ms(origin.timestamp_ms)),
            **{name: getattr(origin, name) for name in _TOLD},
            stack_trace=trace.decode(errors="replace"),
            result=ResultNotes(origin.key, origin.correlation_id, origin.traceability_id, origin.result_timestamp),
            redrives=int(redrives) if redrives.isdecimal() else 0,
            headers=own,
            key_format=key_format,
            key=key,
            value_format=value_format,
            value=value,
        )

    async def _decoded(self, data: bytes | None, wanted: str | None) -> tuple[str, msgspec.Raw]:
        if data is None:
            return "null", msgspec.Raw(b"null")
        framed = [_ANY_SCHEMA] if schema_id_of(data) is not None and wanted not in SCHEMA_TYPES else []
        guesses = [*framed, *(["json"] if data[:1] in (b"{", b"[") else []), "string"]
        for name in [wanted, *guesses] if wanted else guesses:
            if name in (*SCHEMA_TYPES, _ANY_SCHEMA) and self._without_registry:
                continue
            reader = self._codecs.for_reading("avro" if name == _ANY_SCHEMA else name)
            try:
                await reader.prepare([data])
                return name, msgspec.Raw(reader.decode(data) or b"null")
            except DecodeError:
                continue
            except RegistryUnavailable:
                self._without_registry = True
        return "binary", msgspec.Raw(self._codecs.for_reading("binary").decode(data) or b"null")


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="backslashreplace")
