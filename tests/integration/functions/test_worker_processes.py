"""The process of a worker: what it inherits and prints, how it ends, and what a handler can do to it."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys

import pytest

from headrace.delivery.outcomes import ACK
from headrace.functions.load import load_function
from headrace.runtime import Deadline
from headrace.runtime.telemetry.logs import JsonFormatter
from headrace_devkit.devcluster.jvm_server import is_alive
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
            await function.until(lambda: not is_alive(child))
    assert not is_alive(worker) and not is_alive(child)


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
        *(f"headrace.functions.worker.{name}" for name in ("__main__", "handler")),
        *(f"headrace.functions.worker.{name}" for name in ("http_events", "loop", "serving")),
    }
