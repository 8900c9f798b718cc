"""`python -m headrace.functions.worker WIRE PROGRESS`: one worker process on two inherited descriptors.

WIRE is a socket to the parent, PROGRESS a file whose first 8 bytes the parent watches. SIGTERM lets the present
frame end; the parent handles the terminal's interrupt.
"""

import mmap
import os
import signal
import socket
import sys
from typing import Any

import msgspec

from headrace.functions import sdk, wire
from headrace.functions.worker.loop import Worker

_STDERR = 2


def main() -> int:
    """Run the worker and return its exit code."""
    wire_number, progress_number = map(int, sys.argv[1:])
    # Programs that the handler starts must not hold the wire: its end shows the parent that the worker has ended.
    os.set_inheritable(wire_number, False)
    os.set_inheritable(progress_number, False)
    worker = Worker(socket.socket(fileno=wire_number), mmap.mmap(progress_number, mmap.PAGESIZE))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, worker.request_stop)
    setup = worker.receive_setup()
    os.environ.update(setup.env)
    sys.modules["nuclio_sdk"] = sdk
    sys.argv = [setup.handler]
    logger = sdk.Logger(_send_log, level=setup.log_level).bind(worker_id=setup.worker_id)
    trigger = sdk.TriggerInfo(setup.trigger_kind, setup.trigger_name)
    return worker.work(setup, sdk.Context(logger, sdk.Platform(setup.namespace), setup.worker_id, trigger))


def _send_log(level: str, message: str, fields: dict[str, Any]) -> None:
    """Write a log record for the parent to standard error: one write, so that threads do not mix their lines."""
    try:
        line = msgspec.json.encode((level, message, fields), enc_hook=repr)
    except (TypeError, ValueError, RecursionError):  # a log line must not fail the record it speaks of
        line = msgspec.json.encode((level, ascii(message), {"fields": ascii(list(fields))}))
    os.write(_STDERR, wire.LOG_MARK + line + b"\n")


if __name__ == "__main__":
    sys.exit(main())
