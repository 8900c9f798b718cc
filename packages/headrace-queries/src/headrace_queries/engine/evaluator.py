"""`python -m headrace_queries.engine.evaluator SOCKET BYTES`: runs push queries over records that an engine sends.

The process has no table, file or network, and BYTES of memory. So an evaluation that cannot be interrupted
ends with this process, and nothing else does.
"""

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

import duckdb
import pyarrow as pa
import uvloop

from headrace.framing import ProtocolBroken
from headrace.runtime import ThreadPool
from headrace_queries.columns import quoted
from headrace_queries.engine.apart import in_parts
from headrace_queries.engine.batch_rows import FITTING, count_fitting, part_of_fitting, position_of_fitting
from headrace_queries.engine.database import empty_database
from headrace_queries.engine.pull import RowWriter, failure
from headrace_queries.engine.statements import Statements
from headrace_queries.engine_protocol import (
    ColumnType,
    Evaluate,
    Evaluated,
    EvaluationBatch,
    Messages,
    RequestFailed,
    Row,
    ToParent,
    decode_to_engine,
    encode_message,
)

EVALUATION_SECONDS: Final = 2.0
"""Of the statements of a batch together. One that takes longer is interrupted."""
_LEAST_SECONDS: Final = 0.25
"""Of a statement behind those that have taken it all."""
_AGAIN_SECONDS: Final = 0.1
_ALLOCATED_BYTES: Final = 512 << 20
"""Besides the memory of DuckDB. An allocation beyond this fails: it rejects its statement."""
_OOM_SCORE: Final = "800"
"""When the machine has no memory left, the kernel ends this process rather than the engine."""
_TOO_LONG: Final = "the statement takes too long for the changes of the table: make its condition cheaper"
_UNREADABLE: Final = "the records are not readable here"


class _Evaluator:
    """Evaluates one statement at a time, on a thread."""

    def __init__(self, memory_bytes: int) -> None:
        self.connection = empty_database(threads="1", memory_limit=f"{memory_bytes // 1024}KiB")
        self._statements = Statements(self.connection.cursor())
        self._problem = ""
        self._names: list[str] = []
        self._count = 0

    def take(self, batch: EvaluationBatch) -> None:
        """Make a table of the records."""
        self._problem = ""
        self._names = [name for name, _ in batch.columns]
        cells = ", ".join(
            f"CAST({quoted(name) if batch.stream else 'NULL'} AS {kind}) AS {quoted(name)}"
            for name, kind in batch.columns
        )
        source = "raw" if batch.stream else "(SELECT 1) WHERE false"
        try:
            if batch.stream:
                self.connection.register("raw", pa.ipc.open_stream(batch.stream).read_all())
            self.connection.execute(f"CREATE OR REPLACE TEMP TABLE {FITTING} AS SELECT {cells} FROM {source}")
            if batch.stream:
                self.connection.unregister("raw")
            self._count = count_fitting(self.connection)
        except (duckdb.Error, pa.ArrowException, MemoryError) as cause:
            self._problem = f"{_UNREADABLE}: {str(cause).splitlines()[0][:200]}"

    def evaluate(self, request: Evaluate) -> ToParent:
        """Return the rows of a statement over the records."""
        try:
            if self._problem:
                return RequestFailed(request.number, "unavailable", self._problem)
            table = request.statement.table
            self._statements.check(request.statement.over(quoted(table)), {table: "key"}, [table])
            return self._evaluated(request)
        except duckdb.InterruptException:
            return RequestFailed(request.number, "timeout", _TOO_LONG)
        except Exception as cause:  # noqa: BLE001 boundary: whatever a statement raises is its caller's response
            return failure(request.number, cause)

    def _evaluated(self, request: Evaluate) -> Evaluated:
        """Return the rows; a record at which the statement fails alone ends them."""
        columns: list[ColumnType] = []

        def run(start: int, end: int) -> list[bytes]:
            part = part_of_fitting(self.connection, start, end, self._count)
            cursor = self.connection.execute(request.statement.over(part))
            writer = RowWriter(cursor, request.form)
            columns[:] = writer.columns
            return writer.texts(cursor.fetchall())

        parts, failed = in_parts(run, self._count, until_failure=True)
        rows = [row for of_part in parts for row in of_part]
        problem = ""
        for first, cause in failed.items():
            partition, offset = position_of_fitting(self.connection, self._names, first)
            problem = (
                f"{failure(request.number, cause).reason} (at partition {partition}, offset {offset}). "
                "TRY_CAST gives NULL instead of an error; a stream without Last-Event-ID begins behind this record"
            )
        return Evaluated(request.number, columns, rows, problem)


async def _main(number: int, memory_bytes: int) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=number))
    evaluator = _Evaluator(memory_bytes)
    thread = ThreadPool("evaluation", 1)
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def interrupt() -> None:
        nonlocal timer
        evaluator.connection.interrupt()
        timer = loop.call_later(_AGAIN_SECONDS, interrupt)  # one that comes before a statement begins has no effect

    writer.write(encode_message(Row(0, None)))
    ends_at = 0.0
    async for message in Messages(reader, decode_to_engine):
        if isinstance(message, EvaluationBatch):
            await thread.run(evaluator.take, message)
            ends_at = time.monotonic() + EVALUATION_SECONDS
        elif isinstance(message, Evaluate):
            timer = loop.call_later(max(_LEAST_SECONDS, ends_at - time.monotonic()), interrupt)
            try:
                response = await thread.run(evaluator.evaluate, message)
            finally:
                timer.cancel()
            writer.write(_encoded(response, message.number))


def _encoded(response: ToParent, number: int) -> bytearray:
    try:
        return encode_message(response)
    except Exception as cause:  # noqa: BLE001 boundary: rows that are too many are their caller's response
        return encode_message(failure(number, cause))


def main() -> None:
    """Serve the engine until it closes the connection."""
    memory_bytes = int(sys.argv[2])
    limit = _ALLOCATED_BYTES + 2 * memory_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(ProtocolBroken), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(int(sys.argv[1]), memory_bytes))
    os._exit(0)


if __name__ == "__main__":
    main()
