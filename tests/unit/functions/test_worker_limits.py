"""What bounds a worker: its memory, its restarts, and what it writes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.delivery.protocols import ACK
from headrace.functions.worker_log import WorkerOutput
from headrace.records import TopicPartition

Write = Callable[..., Path]
Run = Callable[[Path], AbstractAsyncContextManager[Any]]


def test_a_worker_over_its_memory_is_replaced_between_two_frames(
    write_function: Write, running: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """No event is to blame, and none is called twice."""
    code = """
        import time
        held = []
        def handler(context, event):
            held.append(b"x" * 10_000_000)
            open("calls", "a").write("call ")
            time.sleep(0.3)
    """

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            for number in range(12):
                assert await function.deliver(b"a", first=number) == [ACK]
            assert function.service.restarts >= 1
            assert not function.destination._crashes
            assert (folder / "calls").read_text() == "call " * 12

    uvloop.run(run(write_function(code, workerMemoryLimit="100Mi")))
    assert "and workerMemoryLimit allows 100 MiB" in caplog.text


def test_a_worker_that_needs_too_much_memory_to_start_is_named(write_function: Write, running: Run) -> None:
    """Readiness has the reason."""

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            await function.until(lambda: "workerMemoryLimit allows 100 MiB" in function.service.readiness().reason)

    uvloop.run(run(write_function("import time\nheld = b'x' * 200_000_000\ntime.sleep(60)", workerMemoryLimit="100Mi")))


def test_a_worker_that_ends_again_and_again_is_restarted_at_a_bounded_rate(
    write_function: Write, running: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if it serves events in between; the others continue meanwhile."""
    monkeypatch.setattr("headrace.functions.service._FREE_RESTARTS", 2)
    monkeypatch.setattr("headrace.functions.service._RESTARTS_PER_SECOND", 0.001)
    code = """
        import os, pathlib
        def handler(context, event):
            mark = pathlib.Path(str(event.offset))
            if event.body == b"die" and not mark.exists():
                mark.touch()
                os._exit(1)
    """

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            function.destination.assigned([TopicPartition("flights", number) for number in range(2)])
            for number in range(3):
                assert await function.deliver(b"live", b"die", first=number * 2, partition=0) == [ACK, ACK]
            waits = function.begin(b"live", b"die", first=6, partition=0)
            await function.until(lambda: function.service.restarts == 4)
            for number in range(5):
                assert await function.deliver(b"live", first=number, partition=1) == [ACK]
            begun = function.clock.monotonic()
            await function.until(lambda: waits or function.clock.monotonic() > begun + 3)
            assert (waits, function.service.restarts) == ([], 4)

    uvloop.run(run(write_function(code, workers=2, workerAllocationMode="static")))


async def test_a_flood_of_lines_is_cut_in_the_log_and_keeps_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """The reader keeps no more than the tail in memory, and counts what it leaves out."""
    output = WorkerOutput("worker 0")
    with caplog.at_level(logging.INFO, "headrace"):
        output.data_received(b"first\n")
        for number in range(100):
            output.data_received(b"".join(b"line %d\n" % (number * 1000 + line) for line in range(1000)))
        assert output.tail.splitlines() == [f"line {number}" for number in range(99_980, 100_000)]
        assert len(output._held) <= 20_000
        output.connection_lost(None)
    lines = [record.getMessage() for record in caplog.records]
    logged = [line for line in lines if ": line " in line or line.endswith("first")]
    (left_out,) = [line for line in lines if "left out" in line][:1]
    assert logged[0] == "worker 0: first" and 1000 <= len(logged) <= 2000
    counted = sum(int(line.split("lines=")[1].split()[0]) for line in lines if "left out" in line)
    assert counted + len(logged) == 100_001, left_out
