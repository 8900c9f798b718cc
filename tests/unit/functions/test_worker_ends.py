"""How worker processes end: callbacks, signals, deadlines, and what they leave."""

from __future__ import annotations

import asyncio
import logging
import mmap
import socket

import pytest

from headrace.delivery.outcomes import ACK
from headrace.errors import WorkerLost
from headrace.functions.process import WorkerProcess
from headrace.functions.worker.loop import Worker
from headrace.functions.worker_log import WorkerOutput
from headrace.records import TopicPartition
from headrace.runtime import Deadline
from tests.function_workers import Run, Write

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file")  # of handlers

PARTITION = TopicPartition("flights", 3)


@pytest.mark.parametrize(("more", "fails"), [(0, False), (1, True)])
async def test_the_drain_callback_runs_when_partitions_are_given_up(
    write_function: Write, running: Run, more: int, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It has ended when the call returns; at the end of the worker it runs again only after further events.

    A failure of it is logged with its stack, and the worker continues.
    """
    code = f"""
        import pathlib
        async def drained():
            pathlib.Path("calls").open("a").write("drain ")
            if {fails} and pathlib.Path("calls").read_text().count("drain") != 2:
                1 / 0
        def init_context(context):
            context.platform.set_drain_callback(drained)
            context.platform.set_termination_callback(lambda: pathlib.Path("calls").open("a").write("end"))
        def handler(context, event):
            pathlib.Path("calls").open("a").write("event ")
    """
    folder = write_function(code)
    async with running(folder) as function:
        await function.ready()
        for number in range(2):
            assert await function.deliver(b"a", first=number) == [ACK]
            await function.service.give_up([PARTITION], Deadline(function.clock, 60))
            assert (folder / "calls").read_text() == "event drain " * (number + 1)
        assert await function.deliver(*[b"a"] * more, first=2) == [ACK] * more
        assert function.service.restarts == 0
    assert (folder / "calls").read_text() == "event drain " * (2 + more) + "end"
    assert ("drain callback failed" in caplog.text, "ZeroDivisionError" in caplog.text) == (fails, fails)


def test_a_signal_just_before_the_wait_for_records_is_not_lost() -> None:
    """A worker that gets the signal just before it begins to wait does not wait."""

    class Late(Worker):
        """Gets the signal right after it has checked for one."""

        @property
        def _stop_requested(self) -> bool:
            requested = self.__dict__.get("requested", False)
            if not requested:
                self.request_stop()
            return requested

        @_stop_requested.setter
        def _stop_requested(self, value: bool) -> None:
            self.__dict__["requested"] = value

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0.2)
        worker = Late(theirs, mmap.mmap(-1, mmap.PAGESIZE), -1)
        with pytest.raises(SystemExit):
            worker._receive()
        worker.request_stop()  # once more, while the callbacks run


async def test_a_worker_that_is_not_started_yet_keeps_no_caller() -> None:
    """A caller that was given the process before it calls the next one."""
    process = WorkerProcess("w", lambda records, seconds: None)
    with pytest.raises(WorkerLost) as caught:
        await asyncio.wait_for(process.serve(TopicPartition("t", 0), bytearray(b"x"), 1, {}), 5)
    assert caught.value.parameters["begun"] == 0


async def test_a_flood_of_lines_is_cut_in_the_log_and_keeps_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """The reader keeps no more than the tail in memory, and counts what it leaves out; also without newlines."""
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
    (dropped,) = [line for line in lines if "dropped lines=" in line][:1]
    assert logged[0] == "worker 0: first" and 1000 <= len(logged) <= 2000
    counted = sum(int(line.split("lines=")[1].split()[0]) for line in lines if "dropped lines=" in line)
    assert counted + len(logged) == 100_001, dropped
    caplog.clear()
    endless = WorkerOutput("worker 1")
    for _ in range(3000):
        endless.data_received(b"x" * 65_536)
    assert len(endless._held) <= 65_536 and len(caplog.records) <= 1000
    endless.connection_lost(None)
    assert "dropped lines=" in caplog.text
