"""The process of a worker: what it inherits and prints, how it ends, and what a handler can do to it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.delivery.outcomes import ACK
from headrace.functions.load import load_function
from headrace.runtime import Deadline
from headrace.runtime.telemetry.logs import JsonFormatter
from tests.function_workers import PARTITION, Run, Running, Write
from yaml_table import table

HANGING_CALLBACK = table(__file__, "hanging_callback")


async def test_a_drain_callback_that_hangs_before_a_waiting_frame_is_ended_at_the_deadline(
    write_function: Write, running: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """A frame of a partition that stays was sent behind it; another worker serves it, and no record is blamed."""
    folder = write_function(HANGING_CALLBACK)
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
        assert "took longer than 20 s" not in caplog.text, "the deadline was its limit"
        assert not len(function.destination._suspects)


@pytest.mark.parametrize("at_hand", [True, False])
async def test_a_drain_callback_that_begins_after_the_deadline_has_a_limit_of_its_own(
    write_function: Write, running: Run, monkeypatch: pytest.MonkeyPatch, at_hand: bool
) -> None:
    """Nobody waits for it any more, and it must not hold the worker for ever."""
    monkeypatch.setattr("headrace.functions.process._CALLBACK_SECONDS", 0.2)
    folder = write_function(HANGING_CALLBACK)
    async with running(folder) as function:
        await function.ready()
        if at_hand:
            assert await function.deliver(b"a") == [ACK]
            (folder / "waits").unlink()
            function.begin(b"wait", partition=4)
            await function.until((folder / "waits").exists)
        await function.service.give_up([PARTITION], Deadline(function.clock, 0.05 if at_hand else 0))
        (folder / "go").touch()
        await function.until(lambda: function.service.restarts == 1, 60)
        assert await function.deliver(b"a", first=1) == [ACK]


async def test_the_time_limit_of_an_event_does_not_count_the_drain_callback(
    write_function: Write, running: Run
) -> None:
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
            if not pathlib.Path("at work").exists():
                pathlib.Path("at work").touch()
                time.sleep(600)
    """
    folder = write_function(code)
    async with running(folder) as function:
        await function.ready()
        [slot] = function.service._slots
        given_up = function.service.give_up([PARTITION], Deadline(function.clock, 60))
        drain = function.service.spawn(given_up, "drain")
        await function.until((folder / "begun").exists)
        function.begin(b"a")
        await function.until(lambda: not slot.process.at_rest.is_set())
        began = function.clock.monotonic()  # the service looks with this clock, too
        for now in (began, began + 50):
            slot.process.check_time(now, 1)
        (folder / "go").touch()
        await drain
        await function.until((folder / "at work").exists)
        assert function.service.restarts == 0
        for now in (began + 100, began + 102):
            slot.process.check_time(now, 1)
        await function.until(lambda: function.service.restarts == 1)


async def test_what_a_worker_writes_is_logged_under_its_name(
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
    caplog.set_level(logging.INFO, "headrace.function")
    async with running(write_function(code)) as function:
        assert await function.deliver(b"a") == [ACK]
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


@pytest.mark.parametrize("killed", [True, False])
async def test_what_a_handler_has_started_does_not_outlive_its_worker(
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
    folder = write_function(code)
    async with running(folder) as function:
        await function.ready()
        worker, child = function.pid(), int((folder / "child").read_text())
        if killed:
            os.kill(worker, signal.SIGKILL)
            await function.until(lambda: not _alive(child))
    assert not _alive(worker) and not _alive(child)


async def test_a_stop_waits_for_the_end_of_a_worker_that_is_just_starting(write_function: Write) -> None:
    """In whatever turn of the loop it comes; else the loop would be closed before the process has ended."""
    folder = write_function("def handler(context, event): pass")
    for turns in range(1, 8):
        function = Running(load_function(folder))
        await function.service.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        process = function.service._slots[0].process
        await function.service.stop()
        assert process and not (process._child and process._child.running), turns


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
        *(f"headrace.config{name}" for name in ("", ".format_list")),
        *(f"headrace.formats{name}" for name in ("", ".plain", ".schema_codec")),
        "headrace.extras",
        "headrace.framing",
        "headrace.functions",
        "headrace.functions.sdk",
        "headrace.functions.protocol",
        "headrace.functions.worker",
        *(f"headrace.functions.worker.{name}" for name in ("__main__", "call_times", "handler")),
        *(f"headrace.functions.worker.{name}" for name in ("http_events", "loop", "serving")),
    }


@pytest.mark.parametrize(("is_async", "returns"), [(False, "returns"), (True, "raises")], ids=["plain", "async"])
async def test_a_fork_that_returns_from_the_handler_answers_nothing(
    write_function: Write, running: Run, tmp_path: Path, is_async: bool, returns: str
) -> None:
    """The copy of the worker ends; it calls the handler for no record, and no callback of the function.

    The worker runs its callbacks at its end, although the handler has taken the signals.
    """
    calls = tmp_path / "calls"
    code = f"""
        import os, signal, time
        def write(text):
            with open({str(calls)!r}, "a") as file: file.write(text + "\\n")
        def init_context(context):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, lambda *_: None)
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
    async with running(write_function(code, workers=1, outputTopic="out")) as function:
        for frame in range(3):
            assert await function.deliver(*values, first=frame * 22) == [ACK] * 22
        assert function.service.restarts == 0
    assert [record.value for record in function.written] == values * 3
    assert calls.read_text().split() == [value.decode() for value in values * 3] + ["drained", "ended"]


async def test_a_busy_function_does_not_hold_up_another(write_function: Write, running: Run, tmp_path: Path) -> None:
    """Frames of 2,000 records are always at hand for one function, and each event of the other ends meanwhile."""
    both = [tmp_path.parent / f"{tmp_path.name}-{name}" for name in ("busy", "other")]
    for folder in both:
        shutil.copytree(write_function("def handler(context, event):\n    pass\n", workers=2), folder)
    async with running(both[0]) as busy, running(both[1]) as other:
        frames, ends = 0, False

        async def flood(partition: int) -> None:
            nonlocal frames
            while not ends:
                await busy.deliver(*[b"x" * 100] * 2000, partition=partition)
                frames += 1

        floods = [busy.service.spawn(flood(partition), f"flood {partition}") for partition in range(4)]
        await busy.until(lambda: frames > 4)
        async with asyncio.timeout(120):
            for number in range(50):
                before = frames
                assert [reply.error for reply in await other.deliver(b"", first=number)] == [""]
                await busy.until(lambda before=before: frames > before)
        ends = True
        await asyncio.gather(*floods)
