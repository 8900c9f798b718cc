"""Targets of the audit: a file that is rotated when it is full, or a Kafka topic."""

import logging
import os
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final, Protocol

from headrace.errors import HeadraceError
from headrace.records import OutgoingRecord, Produce
from headrace.runtime import run_blocking
from headrace.runtime.telemetry.audit_events import Line

log = logging.getLogger(__name__)

_APPENDED: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_OWNER_ONLY: Final = 0o600


class AuditTarget(Protocol):
    """Stores events."""

    async def write(self, lines: Sequence[Line]) -> int:
        """Write events; log the reason of losses, and return the number of lost events."""


class AuditFile:
    """Lines of JSON that only the owner of the process may read."""

    def __init__(self, file: Path, max_bytes: int = 200_000_000, old_files: int = 5) -> None:
        """Prepare. The file is opened for each write, so other programs may move it away.

        It is rotated before it exceeds `max_bytes`, and `old_files` are kept.
        """
        self._file = file
        self._max_bytes = max_bytes
        self._old_files = old_files

    async def write(self, lines: Sequence[Line]) -> int:
        try:
            await run_blocking(self._append, b"".join([line + b"\n" for _, line in lines]))
        except OSError as cause:
            log.warning("audit: lost %d events: failed to write %s: %s", len(lines), self._file, cause.strerror)
            return len(lines)
        return 0

    def _append(self, text: bytes) -> None:
        # With few calls of the system: after each one, the thread waits for the interpreter.
        file = self._open()
        try:
            size_bytes = os.fstat(file).st_size
            if size_bytes and size_bytes + len(text) > self._max_bytes:
                RotatingFileHandler(self._file, backupCount=self._old_files, delay=True).doRollover()
                self._append(text)  # to the new file
                return
            while text:
                text = text[os.write(file, text) :]
        finally:
            os.close(file)

    def _open(self) -> int:
        try:
            return os.open(self._file, _APPENDED, _OWNER_ONLY)
        except FileNotFoundError:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            return os.open(self._file, _APPENDED, _OWNER_ONLY)


class AuditTopic:
    """Records of a topic, with the correlation id as key."""

    def __init__(self, topic: str, produce: Produce) -> None:
        self._topic, self._produce = topic, produce

    async def write(self, lines: Sequence[Line]) -> int:
        if not lines:
            return 0
        try:
            results = await self._produce([OutgoingRecord(self._topic, key or None, line) for key, line in lines])
        except HeadraceError as cause:
            results = [cause] * len(lines)
        lost = [result for result in results if isinstance(result, HeadraceError)]
        if lost:
            log.warning("audit: lost %d events: %s", len(lost), lost[-1].description)
        return len(lost)
