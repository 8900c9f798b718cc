"""What an operator and a developer meet: environment of workers, readiness, reload, fairness, metrics."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.config.model import HeadraceConfig
from headrace.errors import DestinationUnavailable, FunctionInvalid
from headrace.functions.reload import FunctionReload
from headrace.functions.service import FunctionService
from headrace.telemetry.metrics import Metrics


async def test_workers_do_not_get_the_settings_of_headrace(
    write_function: Callable[..., Any], running: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`HEADRACE__...` may be a password; the other variables, and those of the file, are there."""
    monkeypatch.setenv("HEADRACE__KAFKA__SECURITY__SASL__PASSWORD", "hush")
    monkeypatch.setenv("HEADRACE_TOKEN", "hush too")
    monkeypatch.setenv("AIRPORT", "JFK")
    code = """
        import os

        def handler(context, event):
            return sorted(name for name in os.environ if name.startswith(("HEADRACE", "AIRPORT", "GATE")))
    """
    folder = write_function(code, spec={"env": [{"name": "GATE", "value": "7"}]}, outputTopic="out")
    async with running(folder) as function:
        await function.deliver(b"")
        assert [record.value for record in function.written] == [b"AIRPORT", b"GATE"]


def shown(metrics: Metrics, name: str, **labels: str) -> list[float]:
    """Return the values of a metric whose labels include these."""
    return [
        sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


async def test_metrics_have_names_of_nuclio_and_true_numbers(
    write_function: Callable[..., Any], running: Callable[..., Any]
) -> None:
    """A failed event is a failure, durations are not 0, histograms add up; nothing is left after the stop."""
    code = """
        import time

        def handler(context, event):
            time.sleep(0.02)
            if event.body == b"bad":
                raise ValueError("bad")
    """
    metrics, processor, own = Metrics(), "nuclio_processor_", "headrace_function_"
    async with running(write_function(code, workers=2)) as function:
        await function.ready()
        await function.until(lambda: sum(slot.up for slot in function.service._slots) == 2)
        await function.deliver(b"good", b"bad")
        await function.deliver(b"good", first=2)
        named = {"trigger_kind": "kafka-cluster", "trigger_id": "kafka", "namespace": "default", "function": "fn"}
        handled = f"{processor}handled_events_total"
        assert shown(metrics, handled, result="success", **named) == [2]
        assert shown(metrics, handled, result="failure", **named) == [1]
        duration = f"{processor}handled_events_duration_milliseconds"
        assert sum(shown(metrics, f"{duration}_count", **named)) == 3
        assert sum(shown(metrics, f"{duration}_sum", **named)) >= 3 * 20
        assert {len(shown(metrics, f"{duration}_sum", worker_index=str(n))) for n in range(2)} == {1}
        allocation = f"{processor}worker_allocation"
        assert shown(metrics, f"{allocation}_count", **named) == [2]
        assert shown(metrics, f"{allocation}_total", result="success_immediate", **named) == [2]
        assert shown(metrics, f"{allocation}_workers_available_percentage", **named) == [200]
        labels = {"kind": "function", "consumer": "fn.kafka"}
        assert [shown(metrics, f"{own}{name}_seconds_count", **labels) for name in ("event", "frame", "wait")] == [
            [3],
            [2],
            [2],
        ]
        assert shown(metrics, f"{own}event_seconds_bucket", le="0.01", **labels) == [0]
        assert shown(metrics, f"{own}event_seconds_bucket", le="+Inf", **labels) == [3]
        assert shown(metrics, f"{own}event_seconds_sum", **labels)[0] >= 0.06
    assert "fn" not in {label for sample in samples(metrics) for label in sample.labels.values()}
    assert "fn.kafka" not in {label for sample in samples(metrics) for label in sample.labels.values()}


def samples(metrics: Metrics) -> list[Any]:
    return [one for family in text_string_to_metric_families(metrics.render().decode()) for one in family.samples]


async def test_a_frame_that_waits_for_a_worker_is_counted_so(
    write_function: Callable[..., Any], running: Callable[..., Any]
) -> None:
    """Before a worker is up nothing is immediate, and a frame without any worker is an error."""
    async with running(write_function("def handler(context, event):\n    pass\n")) as function:
        await function.deliver(b"first")
        assert function.service.metrics.allocations == {"success_after_wait": 1}
    async with running(write_function("import missing\n")) as function:
        with pytest.raises(DestinationUnavailable):
            await function.deliver(b"never")
        assert function.service.metrics.allocations == {"error_timeout": 1}


REPLY = """
    def handler(context, event):
        return {answer!r}
"""


async def reply(function: Any) -> bytes | None:
    """Return what the workers answer now."""
    function.written.clear()
    await function.deliver(b"")
    [record] = function.written
    return record.value  # type: ignore[no-any-return]


async def test_a_reload_replaces_the_workers_and_a_broken_file_does_not(
    write_function: Callable[..., Any], running: Callable[..., Any]
) -> None:
    """The new handler serves; each broken file and changed triggers are refused, and the old workers stay."""
    folder = write_function(REPLY.format(answer="old"), workers=2, outputTopic="out")
    async with running(folder) as function:
        service = function.service
        await function.until(lambda: all(slot.up for slot in service._slots))
        reload = FunctionReload(folder / "function.yaml", HeadraceConfig(), [service], function.clock)
        assert await reply(function) == b"old"
        for code, why in (
            ("def handler(context event): pass", "does not compile"),
            ("import missing_module\ndef handler(context, event): pass\n", "missing_module"),
            ("def init_context(context): raise OSError('no database')\ndef handler(c, e): pass\n", "no database"),
        ):
            (folder / "main.py").write_text(code)
            with pytest.raises(FunctionInvalid, match=why):
                await reload.reload()
            assert await reply(function) == b"old"
        before = {function.pid(number) for number in range(2)}
        write_function(REPLY.format(answer="new"), workers=2, outputTopic="out")
        for _ in range(4):  # more than the failures after which callers are refused
            await reload.reload()
            await function.until(lambda: not service._reloading and all(slot.up for slot in service._slots))
        assert before.isdisjoint({function.pid(number) for number in range(2)})
        assert await reply(function) == b"new"
        assert (service.restarts, service.readiness().ready) == (0, True)
        write_function(REPLY.format(answer="new"), workers=2, outputTopic="other")
        with pytest.raises(FunctionInvalid, match="the triggers have changed"):
            await reload.reload()


async def test_a_reload_replaces_all_pools_or_none(
    write_function: Callable[..., Any], running: Callable[..., Any]
) -> None:
    """A file that only the second pool cannot load leaves the first one as it was."""
    code = """
        import os
        def init_context(context):
            if "{answer}" == "new" and context.trigger_name == "second":
                raise OSError("no database")
        def handler(context, event):
            return "{answer}"
    """
    kafka = {"kind": "kafka", "attributes": {"topics": ["flights"], "consumerGroup": "g", "outputTopic": "out"}}
    second = {"kind": "kafka", "attributes": {"topics": ["others"], "consumerGroup": "h"}}
    spec = {"triggers": {"kafka": kafka, "second": second}}
    folder = write_function(code.format(answer="old"), spec=spec)
    async with running(folder) as function:
        await function.ready()
        other = FunctionService(function.service.spec, function.service.spec.worker_pools[1], function.clock)
        await other.start()
        await function.until(lambda: other.readiness().ready)
        write_function(code.format(answer="new"), spec=spec)
        reload = FunctionReload(folder / "function.yaml", HeadraceConfig(), [function.service, other], function.clock)
        before = function.pid()
        with pytest.raises(FunctionInvalid, match="no database"):
            await reload.reload()
        assert not function.service._reloading
        assert (await reply(function), function.pid()) == (b"old", before)
        await other.stop()


async def test_a_worker_that_was_starting_at_a_reload_is_replaced(
    write_function: Callable[..., Any], running: Callable[..., Any], tmp_path: Path
) -> None:
    """It has loaded the old file, and waits in its `init_context`."""
    code = """
        import pathlib, time
        def init_context(context):
            here = pathlib.Path(__file__).parent
            (here / "started").touch()
            while not (here / "go").exists():
                time.sleep(0.01)
        def handler(context, event):
            return "old"
    """
    folder = write_function(code, outputTopic="out")
    async with running(folder) as function:
        await function.until((tmp_path / "started").exists)
        write_function(REPLY.format(answer="new"), outputTopic="out")
        await FunctionReload(folder / "function.yaml", HeadraceConfig(), [function.service], function.clock).reload()
        (tmp_path / "go").touch()
        await function.ready()
        await function.until(lambda: not function.service._reloading and function.service.readiness().ready)
        assert await reply(function) == b"new"


async def test_a_reload_waits_for_the_event_at_work(
    write_function: Callable[..., Any], running: Callable[..., Any], tmp_path: Any
) -> None:
    """The call that has begun ends in the old worker and is not repeated."""
    code = """
        import pathlib, time

        def handler(context, event):
            here = pathlib.Path(__file__).parent
            with (here / "calls").open("a") as calls:
                calls.write("x")
            while not (here / "go").exists():
                time.sleep(0.01)
            return "old"
    """
    folder = write_function(code, outputTopic="out")
    async with running(folder) as function:
        answers = function.begin(b"")
        await function.until((tmp_path / "calls").exists)
        write_function(REPLY.format(answer="new"), outputTopic="out")
        reload = FunctionReload(folder / "function.yaml", HeadraceConfig(), [function.service], function.clock)
        await reload.reload()
        (tmp_path / "go").touch()
        await function.until(lambda: answers)
        assert [record.value for record in function.written] == [b"old"]
        assert (tmp_path / "calls").read_text() == "x"
        assert await reply(function) == b"new"


async def test_a_busy_function_does_not_hold_up_another(
    write_function: Callable[..., Any], running: Callable[..., Any], tmp_path: Path
) -> None:
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
