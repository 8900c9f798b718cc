"""How worker processes end: callbacks, signals, deadlines, and what they leave."""

from __future__ import annotations

import asyncio
import json
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.delivery.protocols import ACK
from headrace.functions.worker.loop import Worker
from headrace.lifecycle import Deadline
from headrace.records import TopicPartition
from headrace.telemetry.logs import JsonFormatter

Write = Callable[..., Path]
Run = Callable[[Path], AbstractAsyncContextManager[Any]]

PARTITION = TopicPartition("flights", 3)
HANGING_CALLBACK = """
    import pathlib, time
    def drained():
        if not pathlib.Path("begun").exists():
            pathlib.Path("begun").touch()
            time.sleep(600)
    def init_context(context):
        context.platform.set_drain_callback(drained)
    def handler(context, event):
        pathlib.Path("waits").touch()
        while event.body == b"wait" and not pathlib.Path("go").exists():
            time.sleep(0.01)
"""


async def _into(work: Any, answers: list[Any]) -> None:
    answers.append(await work)


def test_a_stopped_worker_ends_its_frame_and_runs_its_callbacks(write_function: Write, running: Run) -> None:
    """Drain waits for the frame; then drain and termination callbacks run, in this order."""
    code = """
        import pathlib, time
        def init_context(context):
            context.platform.set_drain_callback(lambda: pathlib.Path("calls").open("a").write("drain "))
            context.platform.set_termination_callback(lambda: pathlib.Path("calls").open("a").write("end"))
        def handler(context, event):
            pathlib.Path("begun").touch()
            time.sleep(0.3)
    """

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            function.service.spawn(_into(function.deliver(b"a"), answers := []), "deliver")
            await function.until((folder / "begun").exists)
        assert answers == [[ACK]]

    folder = write_function(code)
    uvloop.run(run(folder))
    assert (folder / "calls").read_text() == "drain end"


def test_the_drain_callback_runs_when_partitions_are_given_up(write_function: Write, running: Run) -> None:
    """It has ended when the call returns; at the end of the worker it runs again only after further events."""
    code = """
        import pathlib
        async def drained():
            pathlib.Path("calls").open("a").write("drain ")
        def init_context(context):
            context.platform.set_drain_callback(drained)
            context.platform.set_termination_callback(lambda: pathlib.Path("calls").open("a").write("end"))
        def handler(context, event):
            pathlib.Path("calls").open("a").write("event ")
    """

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            await function.ready()
            for number in range(2):
                assert await function.deliver(b"a", first=number) == [ACK]
                await function.service.give_up([PARTITION], Deadline(function.clock, 60))
                assert (folder / "calls").read_text() == "event drain " * (number + 1)

    folder = write_function(code)
    uvloop.run(run(folder))
    assert (folder / "calls").read_text() == "event drain event drain end"


def test_a_drain_callback_waits_for_the_frame_at_hand(write_function: Write, running: Run) -> None:
    """Another partition may be at work on the same worker; its event ends first."""
    code = """
        import pathlib, time
        def init_context(context):
            context.platform.set_drain_callback(lambda: pathlib.Path("calls").open("a").write("drain"))
        def handler(context, event):
            if event.shard_id == 3:
                return
            pathlib.Path("begun").touch()
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
            pathlib.Path("calls").open("a").write("event ")
    """

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            assert await function.deliver(b"a") == [ACK]
            function.service.spawn(_into(function.deliver(b"a", partition=4), answers := []), "deliver")
            await function.until((folder / "begun").exists)
            await function.service.give_up([PARTITION], Deadline(function.clock, 0.05))  # too short
            (folder / "go").touch()
            await function.service.give_up([PARTITION], Deadline(function.clock, 60))
            assert (folder / "calls").read_text() == "event drain"
            await function.until(lambda: answers)
            assert answers == [[ACK]]
            assert function.service.restarts == 0

    uvloop.run(run(write_function(code)))


def test_a_drain_callback_that_fails_or_hangs_holds_nothing_up(
    write_function: Write, running: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A failure is logged with its stack; one that does not end costs the worker, which is replaced."""
    code = """
        import time
        def init_context(context):
            context.platform.set_drain_callback(lambda: 1 / 0)
        def handler(context, event):
            context.platform.set_drain_callback(lambda: time.sleep(600))
    """

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            await function.ready()
            await function.service.give_up([PARTITION], Deadline(function.clock, 60))
            assert "drain callback failed" in caplog.text
            assert "ZeroDivisionError" in caplog.text
            assert await function.deliver(b"a") == [ACK]
            await function.service.give_up([PARTITION], Deadline(function.clock, 0.2))
            await function.until(lambda: function.service.restarts == 1)
            await function.ready()

    uvloop.run(run(write_function(code)))
    assert "timeout: its drain callback took longer than 0." in caplog.text


def test_a_drain_callback_that_hangs_before_a_waiting_frame_is_ended_at_the_deadline(
    write_function: Write, running: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A frame of a partition that stays was sent behind it; another worker serves it, and no record is blamed."""

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            await function.ready()
            given_up = function.service.give_up([PARTITION], Deadline(function.clock, 2))
            drain = function.service.spawn(given_up, "drain")
            await function.until((folder / "begun").exists)
            async with asyncio.timeout(60):
                assert await function.deliver(b"a") == [ACK]
            await drain
            assert function.service.restarts == 1
            assert "drain callback took longer than" in caplog.text
            assert not function.destination._crashes

    uvloop.run(run(write_function(HANGING_CALLBACK)))


def test_a_worker_busy_with_another_partition_holds_no_rebalance(write_function: Write, running: Run) -> None:
    """Unless it has had an event of the partition that is given up since its drain callback ran last."""
    code = """
        import pathlib, time
        def init_context(context):
            context.platform.set_drain_callback(lambda: pathlib.Path("calls").open("a").write("drain "))
        def handler(context, event):
            pathlib.Path("begun").touch()
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
    """

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            drain, far = function.service.give_up, Deadline(function.clock, 600)
            function.service.spawn(_into(function.deliver(b"a"), answers := []), "deliver")
            await function.until((folder / "begun").exists)
            async with asyncio.timeout(60):
                await drain([TopicPartition("flights", 4)], far)
            assert (answers, (folder / "calls").exists()) == ([], False)
            own = function.service.spawn(drain([PARTITION], far), "drain")
            (folder / "go").touch()
            await own
            assert (folder / "calls").read_text() == "drain "

    uvloop.run(run(write_function(code)))


@pytest.mark.parametrize("at_hand", [True, False])
def test_a_drain_callback_that_begins_after_the_deadline_has_a_limit_of_its_own(
    write_function: Write, running: Run, monkeypatch: pytest.MonkeyPatch, at_hand: bool
) -> None:
    """Nobody waits for it any more, and it must not hold the worker for ever."""
    monkeypatch.setattr("headrace.functions.process._CALLBACK_SECONDS", 0.2)

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            await function.ready()
            if at_hand:
                assert await function.deliver(b"a") == [ACK]
                (folder / "waits").unlink()
                function.service.spawn(_into(function.deliver(b"wait", partition=4), []), "deliver")
                await function.until((folder / "waits").exists)
            await function.service.give_up([PARTITION], Deadline(function.clock, 0.05 if at_hand else 0))
            (folder / "go").touch()
            await function.until(lambda: function.service.restarts == 1, 60)
            assert await function.deliver(b"a", first=1) == [ACK]

    uvloop.run(run(write_function(HANGING_CALLBACK)))


def test_a_drain_callback_is_no_event_of_the_frame_that_waits_for_it(write_function: Write, running: Run) -> None:
    """`eventTimeout` counts from the callback's end, which has the time of the drain."""
    code = """
        import pathlib, time
        def drained():
            pathlib.Path("begun").touch()
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
        def init_context(context):
            context.platform.set_drain_callback(drained)
        def handler(context, event):
            pathlib.Path("at work").touch()
            while True:
                time.sleep(1)
    """

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            await function.ready()
            [slot] = function.service._slots
            given_up = function.service.give_up([PARTITION], Deadline(function.clock, 60))
            drain = function.service.spawn(given_up, "drain")
            await function.until((folder / "begun").exists)
            function.service.spawn(_into(function.deliver(b"a"), []), "deliver")
            await function.until(lambda: not slot.process.at_rest.is_set())
            for now in (0, 50):
                slot.process.check_time(now, 1)
            (folder / "go").touch()
            await drain
            await function.until((folder / "at work").exists)
            assert function.service.restarts == 0
            for now in (100, 102):
                slot.process.check_time(now, 1)
            await function.until(lambda: function.service.restarts == 1)

    uvloop.run(run(write_function(code)))


def test_what_a_worker_writes_is_logged_under_its_name(
    write_function: Write, running: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """Prints line by line; the logger's lines with level and fields, also when they cannot be encoded."""
    code = """
        def handler(context, event):
            print("printed")
            context.logger.bind(flight=7).warn_with("late %d", 3, minutes=90)
            context.logger.debug("not wanted")
            endless = []
            endless.append(endless)
            context.logger.info_with("odd", endless=endless)
            print("done", end="", flush=True)
    """

    async def run() -> None:
        async with running(write_function(code)) as function:
            assert await function.deliver(b"a") == [ACK]

    with caplog.at_level(logging.INFO, "headrace.function"):
        uvloop.run(run())
    records = [record for record in caplog.records if record.name == "headrace.function.fn.kafka"]
    lines = [(record.levelname, record.getMessage()) for record in records]
    label = "function fn.kafka worker 0: "
    assert lines[0] == ("INFO", label + "printed")
    assert lines[1] == ("WARNING", label + "late 3 worker_id='0' flight=7 minutes=90 event_id='flights-3-0'")
    assert lines[2][1].startswith(label + "'odd'")
    assert lines[3] == ("INFO", label + "done")
    assert len(lines) == 4
    printed, late, *_ = (json.loads(JsonFormatter().format(record)) for record in records)
    where = {"function": "fn", "trigger": "kafka", "worker": "0"}
    assert {name: printed[name] for name in ("message", *where)} == {"message": "printed", **where}
    assert {name: late[name] for name in where} == where
    assert (late["message"], late["event_id"]) == ("late 3", "flights-3-0")
    assert late["fields"] == {"flight": 7, "minutes": 90}


def test_sigterm_lets_the_frame_at_hand_end(write_function: Write, running: Run) -> None:
    """From whomever it comes; the worker is then replaced."""
    code = """
        import os, signal
        def handler(context, event):
            os.kill(os.getpid(), signal.SIGTERM)
            return event.body
    """

    async def run() -> None:
        async with running(write_function(code, outputTopic="out")) as function:
            assert await function.deliver(b"a", b"b") == [ACK, ACK]
            assert [record.value for record in function.written] == [b"a", b"b"]
            await function.until(lambda: function.service.restarts == 1)
            await function.ready()

    uvloop.run(run())


def test_a_signal_just_before_the_wait_for_records_is_not_lost() -> None:
    """A worker that is told to end in the instant before it begins to wait does not wait."""

    class Late(Worker):
        """Is told to end right after it has looked whether it was."""

        @property
        def _stop_requested(self) -> bool:
            asked = self.__dict__.get("asked", False)
            if not asked:
                self.request_stop()
            return asked

        @_stop_requested.setter
        def _stop_requested(self, value: bool) -> None:
            self.__dict__["asked"] = value

    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(0.2)
        worker = Late(theirs, mmap.mmap(-1, mmap.PAGESIZE), -1)
        with pytest.raises(SystemExit):
            worker._receive()


@pytest.mark.parametrize("killed", [True, False])
def test_what_a_handler_has_started_does_not_outlive_its_worker(
    write_function: Write, running: Run, killed: bool
) -> None:
    """Neither when the worker is killed nor when the service stops."""
    code = """
        import pathlib, subprocess
        def init_context(context):
            child = subprocess.Popen(["sleep", "60"])
            pathlib.Path("child").write_text(str(child.pid))
        def handler(context, event): pass
    """

    async def run(folder: Path) -> None:
        async with running(folder) as function:
            await function.ready()
            worker, child = function.pid(), int((folder / "child").read_text())
            if killed:
                os.kill(worker, signal.SIGKILL)
                await function.until(lambda: not _alive(child))
        assert not _alive(worker) and not _alive(child)

    uvloop.run(run(write_function(code)))


def _alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().split(")")[1].split()[0] != "Z"


def test_a_worker_imports_little() -> None:
    """So that it starts fast, and user code meets nothing it can break: no asyncio, no client, no models."""
    code = "import sys, headrace.functions.worker.__main__; print(*sys.modules)"
    loaded = set(
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    )
    assert not loaded & {"asyncio", "pydantic", "confluent_kafka", "aiohttp", "yaml", "fastavro", "logging"}
    assert {name for name in loaded if name.startswith("headrace.")} <= {
        "headrace.errors",
        "headrace.functions",
        "headrace.functions.sdk",
        "headrace.functions.wire",
        "headrace.functions.worker",
        *(f"headrace.functions.worker.{name}" for name in ("__main__", "acks", "bodies", "handler", "loop", "serving")),
    }
