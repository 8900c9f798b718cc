"""Metrics of functions."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from headrace.runtime.telemetry.metrics import Metrics, text_of
from tests.function_workers import Run, Write


def samples(metrics: Metrics) -> list[Any]:
    text = text_of(metrics.snapshot()).decode()
    return [one for family in text_string_to_metric_families(text) for one in family.samples]


def shown(metrics: Metrics, name: str, **labels: str) -> list[float]:
    """Return the values of a metric whose labels include these."""
    return [each.value for each in samples(metrics) if each.name == name and labels.items() <= each.labels.items()]


async def test_metrics_have_names_of_nuclio_and_true_numbers(write_function: Write, running: Run) -> None:
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
        assert len(shown(metrics, f"{allocation}_wait_duration_milliseconds_sum", **named)) == 1
        assert shown(metrics, f"{allocation}_workers_available_percentage", **named) == [200]
        labels = {"kind": "function", "consumer": "fn.kafka"}
        assert shown(metrics, f"{own}event_seconds_count", **labels) == [3]
        assert shown(metrics, f"{own}event_seconds_bucket", le="0.01", **labels) == [0]
        assert shown(metrics, f"{own}event_seconds_bucket", le="+Inf", **labels) == [3]
        assert shown(metrics, f"{own}event_seconds_sum", **labels)[0] >= 0.06
    assert not {"fn", "fn.kafka"} & {label for sample in samples(metrics) for label in sample.labels.values()}
