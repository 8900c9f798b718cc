"""Targets of the audit: a file that is rotated when it is full, or a Kafka topic."""

import contextlib
import logging
import os
from collections.abc import Sequence
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.records import OutgoingRecord, Produce
from headrace.runtime import run_blocking
from headrace.runtime.telemetry.audit_events import Line

log = logging.getLogger(__name__)


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
            await run_blocking(self._append, b"".join([line + b"\n" for _, line in lines]).decode())
        except OSError as cause:
            log.warning("audit: lost %d events: failed to write %s: %s", len(lines), self._file, cause.strerror)
            return len(lines)
        return 0

    def _append(self, text: str) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(_RotatingFile(self._file, backupCount=self._old_files, encoding="utf-8")) as file:
            if file.stream.tell() and file.stream.tell() + len(text) > self._max_bytes:
                file.doRollover()
            file.stream.write(text)


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


class _RotatingFile(RotatingFileHandler):
    """The rotating file of the standard library, readable by its owner only."""

    stream: TextIOWrapper

    def _open(self) -> TextIOWrapper:
        return open(
            self.baseFilename, "a", encoding=self.encoding, opener=lambda path, flags: os.open(path, flags, 0o600)
        )
