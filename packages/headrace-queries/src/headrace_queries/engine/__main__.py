"""`python -m headrace_queries.engine SOCKET [statements]`: a process that keeps the tables of a file.

The one with `statements` runs statements of callers over them, and the other one serves all else.
SOCKET is connected to Headrace, which sends the configuration first. The process ends when the connection does.
"""

import asyncio
import contextlib
import logging
import pickle
import resource
import signal
import socket
import sys
from pathlib import Path

import uvloop

from headrace.errors import HeadraceError
from headrace.runtime import Supervisor, SystemClock
from headrace.runtime.telemetry.logs import configure_logging
from headrace_queries.engine.engine import Engine
from headrace_queries.engine_protocol import EngineSetup, Messages, decode_to_engine
from headrace_queries.query_sections import QuerySections

log = logging.getLogger(__name__)

_REPORTED_BY_TABLES = ("headrace_queries.engine.table_feed", "headrace.kafka.client.reachability")
_OOM_SCORE = "500"
"""When the machine has no memory left, the kernel ends this process rather than its parent."""
_STOP_SECONDS = 10.0
_SWITCH_SECONDS = 0.0005
"""A look-up waits this long for the interpreter while records are decoded: a tenth of Python's default."""
_ALLOCATED_BYTES = 2 << 30
"""An allocation beyond this fails: it rejects its statement, and ends no process. Stacks of threads count too."""


async def _main(number: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=number))
    messages = Messages(reader, decode_to_engine)
    setup = await anext(messages)
    assert isinstance(setup, EngineSetup)
    config: QuerySections = pickle.loads(setup.config)
    configure_logging(config.log_level, config.log_format)
    limit = _ALLOCATED_BYTES + 2 * config.sql.memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    clock = SystemClock()
    for name in _REPORTED_BY_TABLES if setup.statements else ():  # the other engine reads the same topics
        logging.getLogger(name).setLevel(logging.CRITICAL)
    sys.setswitchinterval(_SWITCH_SECONDS)
    engine = Engine(config, writer, clock, statements=setup.statements)
    supervisor = Supervisor(engine.services, clock, _STOP_SECONDS)
    await supervisor.start()
    try:
        await engine.serve(messages)
    finally:
        await supervisor.stop()
        await engine.close()


def main() -> int:
    """Run the engine and return its exit code."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent ends it by the end of the connection
        signal.signal(number, signal.SIG_IGN)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_main(int(sys.argv[1])))
    except HeadraceError as error:
        log.critical("%s", error.description)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
