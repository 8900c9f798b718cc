"""Where the audit goes: a file that is put aside when it is full, or a Kafka topic."""

import contextlib
import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from typing import Final

from headrace.config.audit import AuditConfig
from headrace.errors import HeadraceError
from headrace.lifecycle import run_blocking
from headrace.records import OutgoingRecord, Produced

log = logging.getLogger(__name__)

_CHUNK: Final = 1000

Produce = Callable[[Sequence[OutgoingRecord]], Awaitable[Sequence[Produced | HeadraceError]]]
"""Writes records and returns one result per record, in their order."""


class AuditFile:
    """Lines of JSON that only the owner of the process may read."""

    def __init__(self, settings: AuditConfig) -> None:
        """Prepare; the file is made with its first note, and opened anew each time, so others may move it away."""
        self._settings = settings

    async def write(self, notes: Sequence[tuple[str, bytes]]) -> int:
        try:
            await run_blocking(self._append, b"".join([line + b"\n" for _, line in notes]).decode())
        except OSError as cause:
            log.warning("audit: %d notes are lost, because %s: %s", len(notes), self._settings.file, cause.strerror)
            return len(notes)
        return 0

    def _append(self, text: str) -> None:
        settings = self._settings
        settings.file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(_File(settings.file, backupCount=settings.old_files, encoding="utf-8")) as file:
            if file.stream.tell() and file.stream.tell() + len(text) > settings.max_file_bytes:
                file.doRollover()
            file.stream.write(text)


class AuditTopic:
    """Records with the correlation id as key."""

    def __init__(self, topic: str, produce: Produce) -> None:
        self._topic = topic
        self._produce = produce

    async def write(self, notes: Sequence[tuple[str, bytes]]) -> int:
        lost = 0
        for start in range(0, len(notes), _CHUNK):
            records = [
                OutgoingRecord(self._topic, identity.encode() or None, line)
                for identity, line in notes[start : start + _CHUNK]
            ]
            failures: list[HeadraceError]
            try:
                failures = [r for r in await self._produce(records) if isinstance(r, HeadraceError)]
            except HeadraceError as error:
                failures = [error] * len(records)
            if failures:
                log.warning("audit: %d notes are lost, because %s", len(failures), failures[0].description)
            lost += len(failures)
        return lost


class _File(RotatingFileHandler):
    """The standard library's, for how it puts files aside."""

    stream: TextIOWrapper

    def _open(self) -> TextIOWrapper:
        return open(
            self.baseFilename, "a", encoding=self.encoding, opener=lambda path, flags: os.open(path, flags, 0o600)
        )
