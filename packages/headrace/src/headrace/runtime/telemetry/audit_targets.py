"""Targets of the audit: a file that is rotated when it is full, or a Kafka topic."""

import logging
import os
from collections.abc import Sequence
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Final, Protocol

from headrace.errors import HeadraceError
from headrace.records import OutgoingRecord, Produce
from headrace.runtime import Clock, run_blocking
from headrace.runtime.telemetry.audit_events import Line

log = logging.getLogger(__name__)

_APPENDED: Final = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_OWNER_ONLY: Final = 0o600
_QUIET_SECONDS: Final = 10.0
"""Without a loss, until an outage has ended."""


class AuditTarget(Protocol):
    """Stores events."""

    async def write(self, lines: Sequence[Line]) -> tuple[int, str]:
        """Write events; return the number of lost events, and the reason if the target does not take any or all."""


class ReportedTarget:
    """A target whose outages are logged, at their beginning and at their end."""

    def __init__(self, target: AuditTarget, clock: Clock) -> None:
        self.problem = ""
        """Why events are lost; empty if they are not."""
        self._target = target
        self._clock = clock
        self._began_at = self._failed_at = 0.0
        self._lost = 0

    async def write(self, lines: Sequence[Line], *, is_report: bool = False) -> int:
        """Write events, or a report on lost ones, which is not counted as lost; return the number of lost events."""
        lost, problem = await self._target.write(lines)
        now = self._clock.monotonic()
        if problem and not self.problem:
            log.warning("audit: losing events: %s", problem)
            self._began_at, self._lost = now, 0
        if problem:
            self.problem, self._failed_at = problem, now
            self._lost += 0 if is_report else lost
        elif lines and self.problem and now - self._failed_at >= _QUIET_SECONDS:
            log.warning("audit: writing events again; lost %d in %.0f s", self._lost, now - self._began_at)
            self.problem = ""
        return lost


class AuditFile:
    """Lines of JSON that only the owner of the process may read."""

    def __init__(self, file: Path, max_bytes: int = 200_000_000, old_files: int = 5) -> None:
        """Prepare. The file is opened for each write, so other programs may move it away.

        It is rotated before it exceeds `max_bytes`, and `old_files` are kept.
        """
        self._file = file
        self._max_bytes = max_bytes
        self._old_files = old_files

    async def write(self, lines: Sequence[Line]) -> tuple[int, str]:
        try:
            await run_blocking(self._append, b"".join([line + b"\n" for _, line in lines]))
        except OSError as cause:
            return len(lines), f"failed to write {self._file}: {cause.strerror}"
        return 0, ""

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

    async def write(self, lines: Sequence[Line]) -> tuple[int, str]:
        if not lines:
            return 0, ""
        try:
            results = await self._produce([OutgoingRecord(self._topic, key or None, line) for key, line in lines])
        except HeadraceError as cause:
            results = [cause] * len(lines)
        lost = [result for result in results if isinstance(result, HeadraceError)]
        return len(lost), lost[-1].description if lost else ""
