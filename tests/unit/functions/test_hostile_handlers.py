"""Handlers that break what their worker lives on: forks, descriptors, signals, timers, threads."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import uvloop

from headrace.delivery.protocols import ACK
from headrace.errors import WorkerLost
from headrace.functions.process import WorkerProcess
from headrace.functions.worker_log import WorkerOutput
from headrace.records import TopicPartition
from tests.unit.functions.conftest import Running

Run = Callable[[Path], AbstractAsyncContextManager[Running]]
Write = Callable[..., Path]


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
@pytest.mark.parametrize("returns", ["returns", "raises"])
def test_a_fork_that_returns_from_the_handler_answers_nothing(
    write_function: Write, running: Run, tmp_path: Path, is_async: bool, returns: str
) -> None:
    """The copy of the worker ends; it calls the handler for no record, and no callback of the function."""
    calls = tmp_path / "calls"
    code = f"""
        import os, time
        def write(text):
            with open({str(calls)!r}, "a") as file: file.write(text + "\\n")
        def init_context(context):
            context.platform.set_drain_callback(lambda: write("drained"))
            context.platform.set_termination_callback(lambda: write("ended"))
        {"async " if is_async else ""}def handler(context, event):
            write(event.body.decode())
            if event.body == b"fork" and os.fork() == 0:
                if {returns == "raises"}: raise RuntimeError("in the copy")
                return None
            time.sleep(0.01)
            return event.body
    """
    values = [b"a", b"fork", *(b"%d" % n for n in range(20))]

    async def run() -> None:
        async with running(write_function(code, workers=1, outputTopic="out")) as function:
            for frame in range(3):
                assert await function.deliver(*values, first=frame * 22) == [ACK] * 22
            assert function.service.restarts == 0
        assert [record.value for record in function.written] == values * 3

    uvloop.run(run())
    assert calls.read_text().split() == [value.decode() for value in values * 3] + ["drained", "ended"]


@pytest.mark.parametrize("where", ["import", "init_context"])
def test_a_fork_while_the_handler_is_loaded_serves_nothing(
    write_function: Write, running: Run, tmp_path: Path, where: str
) -> None:
    """It ends where the worker would report that it is ready."""
    code = f"""
        import os
        def fork():
            os.fork()
        if {where == "import"}: fork()
        def init_context(context):
            if {where != "import"}: fork()
        def handler(context, event):
            open({str(tmp_path / "calls")!r}, "a").write("call ")
    """

    async def run() -> None:
        async with running(write_function(code)) as function:
            for number in range(20):
                assert await function.deliver(b"a", first=number) == [ACK]
            assert function.service.restarts == 0

    uvloop.run(run())
    assert (tmp_path / "calls").read_text() == "call " * 20


async def test_a_worker_that_is_not_started_yet_keeps_no_caller() -> None:
    """A caller that was given the process before it asks the next one."""
    process = WorkerProcess("w", lambda records, seconds: None)
    with pytest.raises(WorkerLost) as caught:
        await asyncio.wait_for(process.serve(TopicPartition("t", 0), bytearray(b"x"), 1, {}), 5)
    assert caught.value.parameters["begun"] == 0


async def test_a_flood_without_newlines_is_cut_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """It counts as lines of the log's limit, and the memory of the reader stays small."""
    caplog.set_level("INFO", "headrace")
    output = WorkerOutput("function f.t worker 0")
    for _ in range(3000):
        output.data_received(b"x" * 65_536)
    assert len(output._held) <= 65_536
    assert len(caplog.records) <= 1000
    output.connection_lost(None)
    assert "left out of the log" in caplog.text


@pytest.mark.parametrize("is_async", [False, True], ids=["plain", "async"])
def test_a_handler_that_takes_the_signals_still_ends_with_its_callbacks(
    write_function: Write, running: Run, tmp_path: Path, is_async: bool
) -> None:
    """At once, and not by the limit of its end."""
    ended = tmp_path / "ended"
    code = f"""
        import signal
        def init_context(context):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda *_: None)
            context.platform.set_termination_callback(lambda: open({str(ended)!r}, "w").write("ended"))
        {"async " if is_async else ""}def handler(context, event): pass
    """

    async def run() -> None:
        async with running(write_function(code)) as function:
            assert await function.deliver(b"a") == [ACK]

    uvloop.run(run())
    assert ended.read_text() == "ended"


def test_workers_that_end_leave_no_descriptor_behind(write_function: Write, running: Run) -> None:
    """While they work and while they are idle."""

    def descriptors() -> Counter[str]:
        found = Counter[str]()
        for each in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # that of the listing itself
                found[re.split("[:#]", str(each.readlink()))[0]] += 1
        return found

    code = """
        import os, pathlib
        def handler(context, event):
            mark = pathlib.Path(str(event.offset))
            if not mark.exists():
                mark.touch()
                os._exit(1)
    """

    async def run() -> None:
        async with running(write_function(code)) as function:
            await function.ready()
            gc.collect()  # what earlier tests left
            before = descriptors()
            for number in range(3):
                assert await function.deliver(b"a", first=number) == [ACK]
                os.kill(function.pid(), signal.SIGKILL)
                await function.until(lambda number=number: function.service.restarts == 2 * number + 2)
                await function.ready()
            gc.collect()
            await function.until(lambda: descriptors() == before)

    uvloop.run(run())
