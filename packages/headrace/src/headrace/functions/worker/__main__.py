"""`python -m headrace.functions.worker SOCKET PROGRESS CLAIMS`: one worker process on three inherited descriptors.

SOCKET is connected to the parent. PROGRESS is a file whose first 8 bytes the parent watches. CLAIMS is a pipe that has
the number of each frame until it is begun or recalled. SIGTERM lets the present frame end; the parent handles the
terminal's interrupt.
"""

import contextlib
import faulthandler
import gc
import mmap
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from headrace.functions.worker.handler import context_of, log_line
from headrace.functions.worker.loop import Worker

_STDERR = 2
_OOM_SCORE = "500"
"""When the machine has no memory left, the kernel ends a worker rather than the parent."""


def main() -> int:
    """Run the worker and return its exit code."""
    numbers = socket_number, progress_number, claims_number = tuple(map(int, sys.argv[1:]))
    # Programs that the handler starts must not hold the socket: its end shows the parent that the worker has ended.
    for number in numbers:
        os.set_inheritable(number, False)
    gc.set_threshold(10_000)  # the events of a frame live until it ends: collections in between find nothing
    with contextlib.suppress(OSError, AttributeError):  # a worker that wakes up must not interrupt its parent
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    faulthandler.enable()  # a crash in native code names the line of the handler
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    worker = Worker(socket.socket(fileno=socket_number), mmap.mmap(progress_number, mmap.PAGESIZE), claims_number)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, worker.request_stop)
    setup = worker.receive_setup()
    os.environ.update(setup.env)
    sys.argv = [setup.handler]
    return worker.work(setup, context_of(setup, _send_log))


def _send_log(level: str, message: str, fields: dict[str, Any]) -> None:
    """Write a log record for the parent to standard error: one write, so that threads do not mix their lines."""
    with contextlib.suppress(OSError):  # the handler has closed it
        os.write(_STDERR, log_line(level, message, fields))


if __name__ == "__main__":
    sys.exit(main())
