"""Runs a user's program with a prefix on its lines, in a process group that ends with the parent; run as a script.

usage: launch_group.py PARENT_PID PREFIX COMMAND...

It leads the group, and ends with the exit code of the program: 128 and the number of the signal that ended it.
SIGTERM and SIGINT to the group are for the program. When the parent dies, the whole group is killed; Linux only.
"""

import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

_LAUNCH = str(Path(__file__).with_name("launch.py"))
_LONGEST_LINE = 65_536
_LAST_LINES_SECONDS = 1.0


class LineCopy(threading.Thread):
    """Copies lines to another file descriptor, each with the prefix; a longer line becomes several."""

    def __init__(self, source: IO[bytes], target: int, prefix: bytes) -> None:
        super().__init__(daemon=True)
        self._source, self._target, self._prefix = source.fileno(), target, prefix
        self._pending = b""

    def run(self) -> None:
        while chunk := os.read(self._source, _LONGEST_LINE):
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            if len(self._pending) > _LONGEST_LINE:
                lines.append(self._pending)
                self._pending = b""
            _write(self._target, b"".join(self._prefix + line + b"\n" for line in lines))

    def end(self) -> None:
        """Wait a moment for the last lines: what the program has started may hold the pipe for longer."""
        self.join(_LAST_LINES_SECONDS)
        if self._pending:
            _write(self._target, self._prefix + self._pending + b"\n")


def _write(target: int, content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(target, rest) :]
        except BlockingIOError:  # another process has made the file non-blocking
            select.select([], [target], [])
        except OSError:  # the reader has gone: the program continues
            return


def _end_with_parent(parent: int) -> None:
    if sys.platform != "linux":
        return
    import ctypes

    signal.signal(signal.SIGUSR1, lambda *_: os.killpg(0, signal.SIGKILL))
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGUSR1, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)


def main(parent: int, prefix: str, command: list[str]) -> int:
    """Run the program to its end, and return its exit code."""
    for number in (signal.SIGTERM, signal.SIGINT):  # a handler is not inherited, an ignored signal would be
        signal.signal(number, lambda *_: None)
    _end_with_parent(parent)
    launched = [sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), *command]
    child = subprocess.Popen(launched, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout
    assert child.stderr
    copies = [LineCopy(child.stdout, 1, prefix.encode()), LineCopy(child.stderr, 2, prefix.encode())]
    for copy in copies:
        copy.start()
    code = child.wait()
    for copy in copies:
        copy.end()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    os._exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
