"""A reload: new worker processes by changed files, while events are at work in the old ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config.model import HeadraceConfig
from headrace.delivery.outcomes import ACK, AWAITING_ACK
from headrace.errors import FunctionInvalid
from headrace.functions.load import load_function
from headrace.functions.reload import FunctionReload
from headrace.functions.workers import FunctionService
from tests.function_workers import PARTITION, WAITS, Run, Write, acknowledged, called, calls
from yaml_table import table

REPLY = """
    def handler(context, event):
        return {response!r}
"""


def reload_of(function: Any, *others: FunctionService) -> FunctionReload:
    file = function.service.spec.folder / "function.yaml"
    return FunctionReload(file, HeadraceConfig(), [function.service, *others], function.clock)


async def reply(function: Any) -> bytes | None:
    """Return what the workers return now."""
    function.written.clear()
    await function.deliver(b"")
    [record] = function.written
    return record.value  # type: ignore[no-any-return]


async def test_a_reload_replaces_the_workers_and_a_broken_file_does_not(write_function: Write, running: Run) -> None:
    """The new handler serves; a broken file and changed triggers are rejected, and the old workers continue."""
    folder = write_function(REPLY.format(response="old"), workers=2, outputTopic="out")
    async with running(folder) as function:
        service = function.service
        await function.until(lambda: all(slot.up for slot in service._slots))
        reload = reload_of(function)
        assert await reply(function) == b"old"
        write_function("import missing_module\ndef handler(context, event): pass\n", workers=2, outputTopic="out")
        with pytest.raises(FunctionInvalid, match="missing_module"):
            await reload.reload()
        assert await reply(function) == b"old"
        before = {function.pid(number) for number in range(2)}
        write_function(REPLY.format(response="new"), workers=2, outputTopic="out")
        for _ in range(4):  # more than the failures after which callers are refused
            await reload.reload()
            await function.until(lambda: all(slot.up and not slot.is_reloading for slot in service._slots))
        assert before.isdisjoint({function.pid(number) for number in range(2)})
        assert await reply(function) == b"new"
        assert (service.restarts, service.readiness().ready) == (0, True)
        write_function(REPLY.format(response="new"), workers=2, outputTopic="other")
        with pytest.raises(FunctionInvalid, match="the triggers have changed"):
            await reload.reload()


async def test_a_reload_replaces_all_pools_or_none(write_function: Write, running: Run) -> None:
    """A file that only the second pool cannot load leaves the first one as it was."""
    code = """
        import os
        def init_context(context):
            if "{response}" == "new" and context.trigger_name == "second":
                raise OSError("no database")
        def handler(context, event):
            return "{response}"
    """
    kafka = {"kind": "kafka", "attributes": {"topics": ["flights"], "consumerGroup": "g", "outputTopic": "out"}}
    second = {"kind": "kafka", "attributes": {"topics": ["others"], "consumerGroup": "h"}}
    spec = {"triggers": {"kafka": kafka, "second": second}}
    folder = write_function(code.format(response="old"), spec=spec)
    async with running(folder) as function:
        await function.ready()
        other = FunctionService(function.service.spec, function.service.spec.worker_pools[1], function.clock)
        await other.start()
        await function.until(lambda: other.readiness().ready)
        write_function(code.format(response="new"), spec=spec)
        before = function.pid()
        with pytest.raises(FunctionInvalid, match="no database"):
            await reload_of(function, other).reload()
        assert not any(slot.is_reloading for slot in function.service._slots)
        assert (await reply(function), function.pid()) == (b"old", before)
        await other.stop()


async def test_a_worker_that_was_starting_at_a_reload_is_replaced(write_function: Write, running: Run) -> None:
    """It has loaded the old file, and waits in its `init_context`."""
    code = """
        import pathlib, time
        def init_context(context):
            pathlib.Path("started").touch()
            while not pathlib.Path("go").exists():
                time.sleep(0.01)
        def handler(context, event):
            return "old"
    """
    folder = write_function(code, outputTopic="out")
    async with running(folder) as function:
        await function.until((folder / "started").exists)
        write_function(REPLY.format(response="new"), outputTopic="out")
        await reload_of(function).reload()
        (folder / "go").touch()
        await function.ready()
        [slot] = function.service._slots
        await function.until(lambda: slot.up and not slot.is_reloading)
        assert await reply(function) == b"new"


async def test_a_reload_waits_for_the_event_at_work(write_function: Write, running: Run) -> None:
    """The call that has begun ends in the old worker and is not repeated."""
    folder = write_function(WAITS, outputTopic="out")
    async with running(folder) as function:
        responses = function.begin(b"wait")
        await function.until(lambda: called(folder, "wait"))
        write_function(REPLY.format(response="new"), outputTopic="out")
        await reload_of(function).reload()
        (folder / "go wait").touch()
        await function.until(lambda: responses)
        assert (responses, len(calls(folder))) == ([[ACK]], 1)
        assert await reply(function) == b"new"


FLUSHES = table(__file__, "flushes")


async def test_the_drain_callback_acknowledges_before_a_reload_ends_its_worker(
    write_function: Write, running: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And one that is called at the very end gets an error, because it is too late."""
    folder = write_function(FLUSHES, trigger={"explicitAckMode": "explicitOnly"}, workerAllocationMode="static")
    async with running(folder) as function:
        await function.ready()
        found = acknowledged(function)
        assert await function.deliver(b"a") == [AWAITING_ACK]
        pid = function.pid()
        function.service.reload(load_function(folder))
        await function.until(lambda: function.service._slots[0].up and function.pid() != pid)
        assert found == [(PARTITION, 0)]
        assert (tmp_path / "flushed").exists()
        assert await function.deliver(b"b") == [AWAITING_ACK]
    assert "Fatal error" not in caplog.text
