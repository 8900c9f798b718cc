"""What /metrics shows."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

import headrace
from headrace.config.http import TlsConfig
from headrace.delivery.pump_context import Counts
from headrace.runtime import SystemClock
from headrace.runtime.telemetry.correlation import caller
from headrace.runtime.telemetry.loop_delay import LoopDelay
from headrace.runtime.telemetry.metrics import BY_NAME, CATALOGUE, DELIVERY_COUNTS, Metrics, text_of
from headrace.runtime.tls import TlsFiles
from headrace_devkit.devcluster.certificates import Authority


def shown(metrics: Metrics, metric: str, **labels: str) -> float:
    found = [
        sample.value
        for family in text_string_to_metric_families(text_of(metrics.snapshot()).decode())
        for sample in family.samples
        if sample.name == metric and sample.labels == labels
    ]
    assert len(found) == 1, f"{metric} {labels}"
    return found[0]


def test_a_hundred_callers_have_a_series_and_the_rest_share_one() -> None:
    """Names of callers come from outside, so they must not fill the memory of Prometheus."""
    metrics, name = Metrics(), "headrace_client_requests_total"
    for number in range(150):
        caller.set(f"client-{number}")
        metrics.request("/producers/{topic}", 200, 0.1)
    caller.set("")
    metrics.request("none", 404, 0.1)
    assert shown(metrics, name, principal="client-99", status_class="2xx") == 1
    assert shown(metrics, name, principal="other", status_class="2xx") == 50
    assert shown(metrics, name, principal="anonymous", status_class="4xx") == 1


async def test_the_process_and_its_event_loop_are_measured() -> None:
    """A loop that was blocked is seen; so are collections of garbage and the time of the processor."""
    metrics, service = Metrics(), LoopDelay()
    await service.start()
    late = "headrace_event_loop_delay_seconds"
    async with asyncio.timeout(60):
        while shown(metrics, f"{late}_sum") < 0.3:
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251 this is the fault
    assert shown(metrics, f"{late}_count") > shown(metrics, f"{late}_bucket", le="0.1")
    await service.stop()
    assert late + "_sum" not in text_of(metrics.snapshot()).decode()
    assert shown(metrics, "python_gc_collections_total", generation="0") > 0
    assert shown(metrics, "process_cpu_seconds_total") > 0


async def test_the_end_of_a_certificate_is_known(tmp_path: Path) -> None:
    """That of a listener; a renewed one counts once it is loaded."""
    authority, metrics = Authority(tmp_path, "ca"), Metrics()
    files = authority.issue("server", server=True, days=3)
    tls = TlsFiles(TlsConfig(certificate=files.certificate, key=files.key), SystemClock())
    await tls.start()
    for days in (3, 30):
        authority.issue("server", server=True, days=days)
        tls.load()
        end = shown(metrics, "headrace_certificate_expires_seconds", setting="http.tls")
        assert days - 1 < (end - time.time()) / 86_400 <= days
    await tls.stop()


def test_counts_of_deliveries_are_read_when_metrics_are_rendered() -> None:
    """Pumps of one consumer are added up, the breaker they share is open or not, and each outcome is a label."""
    metrics, counts = Metrics(), {"delivered": 1, "dead_letters": 2, "breaker_open": 1}
    metrics.watch_deliveries("reactive", "orders", lambda: counts)
    metrics.watch_deliveries("reactive", "orders", lambda: {"taken": 2, "breaker_open": 1})
    counts |= {"delivered": 3, "taken": 5}
    labels = {"kind": "reactive", "consumer": "orders"}
    assert shown(metrics, "headrace_completed_records_total", outcome="delivered", **labels) == 3
    assert shown(metrics, "headrace_completed_records_total", outcome="dead_letter", **labels) == 2
    assert shown(metrics, "headrace_received_records_total", **labels) == 7
    assert shown(metrics, "headrace_breaker_open", **labels) == 1
    metrics.forget_deliveries("reactive", "orders")
    assert "orders" not in text_of(metrics.snapshot()).decode()


def test_every_metric_has_one_base_unit_and_known_labels() -> None:
    """A counter ends in `_total`; a size or duration ends in its base unit; every metric is in the catalogue once."""
    assert len(BY_NAME) == len(CATALOGUE)
    for spec in CATALOGUE:
        assert re.fullmatch(r"(headrace|nuclio_processor)_[a-z_]+", spec.name)
        assert spec.name.endswith("_total") == (spec.type == "counter"), spec.name
        assert "_ms" not in spec.name
        assert spec.unit not in ("bytes", "seconds") or spec.unit in spec.name.removesuffix("_total").split("_"), spec
        assert spec.help[0].isupper() or spec.help[0].isdigit()
        assert not spec.help.endswith(".")
    families = {family.name for family in Metrics().collect()}
    assert families == {spec.name.removesuffix("_total") for spec in CATALOGUE}


def test_every_count_and_gauge_of_the_source_is_in_the_catalogue() -> None:
    """A metric that nobody described fails here, before it fails `/metrics`."""
    assert set(Counts().read()) <= DELIVERY_COUNTS.keys()
    assert {metric for metric, _ in DELIVERY_COUNTS.values()} <= BY_NAME.keys()
    source = Path(headrace.__file__).parent
    named = {
        name
        for path in source.rglob("*.py")
        for name in re.findall(r'"((?:headrace|nuclio_processor)_[a-z_]+[a-z])"', path.read_text())
    }
    assert named - {"headrace_offsets"} <= BY_NAME.keys()
