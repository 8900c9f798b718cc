"""Where the audit goes: a file that is put aside when it is full, or a Kafka topic."""

import contextlib
import logging
import os
from collections.abc import Iterable
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from typing import Protocol

from headrace.config.audit import AuditConfig
from headrace.telemetry.audit_notes import Line

log = logging.getLogger(__name__)


class AuditFile:
    """Lines of JSON that only the owner of the process may read."""

    def __init__(self, settings: AuditConfig) -> None:
        """Prepare; the file is opened anew for each write, so others may move it away."""
        self._settings = settings
        self.waiting = 0

    def write(self, notes: Iterable[Line]) -> int:
        lines = [line for _, line in notes]
        try:
            self._append(b"\n".join([*lines, b""]).decode())
        except OSError as cause:
            log.warning("audit: %d notes are lost, because %s: %s", len(lines), self._settings.file, cause.strerror)
            return len(lines)
        return 0

    def _append(self, text: str) -> None:
        settings = self._settings
        settings.file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(_File(settings.file, backupCount=settings.old_files, encoding="utf-8")) as file:
            if file.stream.tell() and file.stream.tell() + len(text) > settings.max_file_bytes:
                file.doRollover()
            file.stream.write(text)


class BulkWriter(Protocol):
    """Writes records, and says later what became of them."""

    @property
    def waiting(self) -> int:
        """Records of which it is not known yet."""

    def write(self, topic: str, records: Iterable[Line]) -> tuple[int, str]:
        """Take keys and values, on a thread; return how many failed since the last call, and why."""


class AuditTopic:
    """Records with the correlation id as key."""

    def __init__(self, topic: str, writer: BulkWriter) -> None:
        self._topic, self._writer = topic, writer

    @property
    def waiting(self) -> int:
        return self._writer.waiting

    def write(self, notes: Iterable[Line]) -> int:
        lost, why = self._writer.write(self._topic, notes)
        if lost:
            log.warning("audit: %d notes are lost, because %s", lost, why)
        return lost


class _File(RotatingFileHandler):
    """The standard library's, for how it puts files aside."""

    stream: TextIOWrapper

    def _open(self) -> TextIOWrapper:
        return open(
            self.baseFilename, "a", encoding=self.encoding, opener=lambda path, flags: os.open(path, flags, 0o600)
        )
