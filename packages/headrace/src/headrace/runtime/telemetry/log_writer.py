"""Writes the log from a thread of its own, so that a reader that stalls, or a full disk, never stops the process."""

import contextlib
import logging
import os
import select
from typing import Final

from headrace.runtime import blocking, clock

MAX_LINES: Final = 10_000
"""Most lines that wait; further ones are dropped and counted."""
_MAX_BYTES: Final = 16_777_216
"""Most bytes of the lines that wait."""
_STANDARD_ERROR: Final = 2
_END: Final = b""
_LINES_AT_ONCE: Final = 200
_FLUSH_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.1
"""After a failed write. Without it, the line that counts what was dropped would be dropped again at once."""


class LogWriter(logging.Handler):
    """Writes formatted records to standard error. `emit` never waits."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: blocking.Queue[bytes] = blocking.Queue(MAX_LINES)
        self._dropped = 0
        self._added_bytes = 0
        self._taken_bytes = 0
        """Each of the two has one writer at a time: `emit`, and the thread. Their difference waits."""
        blocking.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Add a line; if too many wait, count it instead."""
        try:
            line = self.format(record)
        except Exception:  # noqa: BLE001 boundary: a value that has no text must not end its caller
            self.handleError(record)
            return
        data = f"{line}\n".encode(errors="backslashreplace")
        if self._lines.full() or self._added_bytes - self._taken_bytes + len(data) > _MAX_BYTES:
            self._dropped += 1
            return
        self._added_bytes += len(data)
        self._lines.put_nowait(data)

    def flush(self) -> None:
        """Wait until every line is written, for at most two seconds."""
        end = clock.monotonic() + _FLUSH_SECONDS
        with self._lines.all_tasks_done:
            while self._lines.unfinished_tasks and (left := end - clock.monotonic()) > 0:
                self._lines.all_tasks_done.wait(left)

    def close(self) -> None:
        """End the thread when it has written every line."""
        with contextlib.suppress(blocking.Full):
            self._lines.put_nowait(_END)
        super().close()

    def _write(self) -> None:
        # By the descriptor: a thread that waits inside `sys.stderr` would hold its lock when the interpreter ends.
        while True:
            lines = [self._lines.get()]
            with contextlib.suppress(blocking.Empty):
                while len(lines) < _LINES_AT_ONCE:
                    lines.append(self._lines.get_nowait())
            ends = _END in lines
            try:
                _write_all(b"".join(lines))
            except OSError:  # a full disk, or a reader that has gone
                self._dropped += len(lines)
                blocking.sleep(_PAUSE_SECONDS)
            self._taken_bytes += sum(map(len, lines))
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                self.handle(_warning(f"dropped {dropped} log lines that standard error did not take in time"))
            for _ in lines:
                self._lines.task_done()
            if ends:
                return


def _write_all(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(_STANDARD_ERROR, data) :]
        except BlockingIOError:  # who shares the descriptor may have made it non-blocking
            select.select([], [_STANDARD_ERROR], [])


def _warning(text: str) -> logging.LogRecord:
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (), None)
