"""A reload: new worker processes by changed files, while events are at work in the old ones."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.model import HeadraceConfig
from headrace.delivery.outcomes import ACK
from headrace.errors import FunctionInvalid
from headrace.functions.reload import FunctionReload
from headrace.functions.workers import FunctionService
from tests.function_workers import WAITS, Run, Write, called, calls

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


async def test_a_reload_replaces_all_pools_or_none(write_function: Write, running: Run) -> None:
    """A file that only the second pool cannot load leaves the first one as it was, and so do changed triggers."""
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
        write_function(code.format(response="old"), spec={"triggers": {"kafka": kafka}})
        with pytest.raises(FunctionInvalid, match="the triggers have changed"):
            await reload_of(function, other).reload()
        assert (await reply(function), function.pid()) == (b"old", before)
        await other.stop()


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
