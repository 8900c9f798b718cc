"""What /metrics shows."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from headrace.lifecycle.queues import register_gauge, unregister_gauge
from headrace.telemetry.metrics import Metrics


def shown(metrics: Metrics, metric: str, **labels: str) -> float:
    found = [
        sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
        if sample.name == metric and sample.labels == labels
    ]
    assert len(found) == 1, f"{metric} {labels}"
    return found[0]


def test_records_are_counted_by_way_in() -> None:
    """Counts add up per path."""
    metrics = Metrics()
    metrics.records_in("produce", 100)
    metrics.records_in("produce", 5)
    metrics.records_out("produce", 99)
    assert shown(metrics, "headrace_records_in_total", path="produce") == 105
    assert shown(metrics, "headrace_records_out_total", path="produce") == 99


def test_requests_fall_into_buckets_by_route_and_status() -> None:
    """Buckets are cumulative, as Prometheus wants them; a limit belongs to its bucket."""
    metrics = Metrics()
    for seconds in (0.0001, 0.001, 0.3, 99.0):
        metrics.request("/producers/{topic}", 200, seconds)
    metrics.request("/producers/{topic}", 400, 0.1)
    name, labels = "headrace_http_request_seconds", {"route": "/producers/{topic}", "status": "200"}
    below = {
        limit: shown(metrics, f"{name}_bucket", le=limit, **labels) for limit in ("0.0005", "0.001", "0.25", "0.5")
    }
    assert below == {"0.0005": 1, "0.001": 2, "0.25": 2, "0.5": 3}
    assert shown(metrics, f"{name}_count", **labels) == 4
    assert abs(shown(metrics, f"{name}_sum", **labels) - 99.3011) < 1e-9
    assert shown(metrics, f"{name}_count", **labels | {"status": "400"}) == 1


def test_lag_shows_the_newest_number() -> None:
    """A gauge per group, topic and partition."""
    metrics = Metrics()
    metrics.lag("g", "t", 0, 7)
    metrics.lag("g", "t", 0, 0)
    assert shown(metrics, "headrace_consumer_lag_records", group="g", topic="t", partition="0") == 0


def test_deliveries_are_read_when_somebody_looks() -> None:
    """A pump counts by itself; metrics only show it."""
    metrics, counts = Metrics(), {"acked": 1}
    metrics.watch_deliveries("orders", lambda: counts)
    counts["acked"] = 3
    assert shown(metrics, "headrace_delivery_records_total", path="orders", outcome="acked") == 3


def test_what_a_pump_takes_and_delivers_are_records_in_and_out() -> None:
    """Every way in shows both, beside those that count themselves."""
    metrics = Metrics()
    metrics.records_in("produce", 5)
    metrics.watch_deliveries("orders", lambda: {"taken": 7, "delivered": 4})
    metrics.watch_deliveries("pipeline", lambda: {"read": 1})
    assert shown(metrics, "headrace_records_in_total", path="produce") == 5
    assert shown(metrics, "headrace_records_in_total", path="orders") == 7
    assert shown(metrics, "headrace_records_out_total", path="orders") == 4


def test_depths_of_queues_are_read_when_somebody_looks() -> None:
    """Whatever lifecycle registers is shown, with its present value."""
    depth = 1.0
    register_gauge("a queue", lambda: depth)
    try:
        depth = 3.0
        assert shown(Metrics(), "headrace_depth", name="a queue") == 3
    finally:
        unregister_gauge("a queue")
