"""Pushes of metrics to a server that breaks, the variables of OTLP, and lines of line protocol."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from pydantic import SecretStr

from headrace.errors import EnvironmentProblem
from headrace.runtime import Deadline, SystemClock
from headrace.runtime.gauge_registry import BUCKET_SECONDS
from headrace.runtime.telemetry.metrics import Metrics, text_of
from headrace.runtime.telemetry.otlp import OtlpPush
from headrace.runtime.telemetry.otlp_variables import is_exported
from headrace_dialects.light4j.influx_push import InfluxPush
from headrace_dialects.light4j.influx_sections import InfluxDbConfig
from headrace_dialects.light4j.influxdb import InfluxLines, line

URL, P = "http://localhost:4318", "OTEL_EXPORTER_OTLP_"


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Any]:
    """A server that keeps requests; its responses can be changed."""
    found = SimpleNamespace(requests=[], status=200, statuses=[], body=b"", hang=False, echo=False)

    async def take(request: web.Request) -> web.Response:
        if found.hang:
            await asyncio.sleep(60)
        found.requests.append((request.path, request.headers.copy(), await request.read()))
        text = f"{request.path_qs} {[*request.headers.values()]}".encode() if found.echo else found.body
        return web.Response(status=found.statuses.pop(0) if found.statuses else found.status, body=text)

    app = web.Application()
    app.router.add_post("/{path:.*}", take)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


def push_to(monkeypatch: pytest.MonkeyPatch, url: str, metrics: Metrics, **more: str) -> OtlpPush:
    for name, value in {f"{P}ENDPOINT": url, f"{P}TIMEOUT": "0.5", **more}.items():
        monkeypatch.setenv(name, value)
    return OtlpPush(metrics, SystemClock(), "h:1")


async def test_otlp_has_every_kind_of_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cumulative sums, gauges, and histograms with buckets that are not added up."""
    metrics = Metrics()
    metrics.produced(3, 2)
    for seconds in (0.0001, 0.001, 0.3):
        metrics.request("/producers/{topic}", 200, seconds)
    more = {f"{P}HEADERS": "Api-Key=a%20b", f"{P}COMPRESSION": "gzip", "OTEL_SERVICE_NAME": "orders"}
    more["OTEL_RESOURCE_ATTRIBUTES"] = "env=dev,service.name=other"
    async with collecting() as collector:
        push = push_to(monkeypatch, collector.url, metrics, **more)
        await push.start()
        await push.drain(Deadline(SystemClock(), 60))
        await push.stop()
    [(path, headers, body)] = collector.requests
    assert (path, headers["api-key"], headers["content-encoding"]) == ("/v1/metrics", "a b", "gzip")
    [found] = ExportMetricsServiceRequest.FromString(body).resource_metrics
    resource = {one.key: one.value.string_value for one in found.resource.attributes}
    assert {"service.name": "orders", "service.instance.id": "h:1", "env": "dev"}.items() <= resource.items()
    by_name = {metric.name: metric for metric in found.scope_metrics[0].metrics}
    produced = by_name["headrace_produce_records"].sum
    assert (produced.is_monotonic, produced.aggregation_temporality) == (True, 2)
    assert {one.attributes[0].value.string_value: one.as_double for one in produced.data_points} == {
        "acknowledged": 2,
        "failed": 1,
    }
    [point] = by_name["headrace_http_request_seconds"].histogram.data_points
    assert (point.count, round(point.sum, 4), point.HasField("min")) == (3, 0.3011, False)
    assert (tuple(point.explicit_bounds), sum(point.bucket_counts), max(point.bucket_counts)) == (BUCKET_SECONDS, 3, 1)
    assert by_name["process_resident_memory_bytes"].gauge.data_points[0].as_double > 0
    own = {family.name for family in metrics.snapshot().families if family.samples}
    assert {*by_name} == own | {"headrace_metrics_push_failures"}


BROKEN = [
    ({"status": 503, "body": b"full"}, "HTTP 503", "HTTP 503 full"),
    ({"status": 401, "echo": True}, "HTTP 401", "HTTP 401 /write?"),
    ({"hang": True}, "ReadTimeout", "no response within 0.5 s"),
]


@pytest.mark.parametrize("target", ["otlp", "influxdb"])
async def test_an_outage_is_two_lines_in_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    """Whatever its kind; each failure is counted, and nothing is raised. No line has what the requests carry."""
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("headrace_dialects.light4j.influx_push._TIMEOUT_SECONDS", 0.5)
    metrics = Metrics()
    async with collecting() as collector:
        settings = InfluxDbConfig(url=f"{collector.url}/write?p=c4nary", token=SecretStr("ann:c4nary"))
        push: InfluxPush | OtlpPush = InfluxPush(settings, metrics, InfluxLines(settings.url, "s", "h"), SystemClock())
        if target == "otlp":
            url = collector.url.replace("//", "//u:c4nary@")
            more = {f"{P}HEADERS": "k=c4nary,c4nary", f"{P}METRICS_ENDPOINT": f"{url}/m?p=c4nary"}
            push = push_to(monkeypatch, url, metrics, **more)
        await push.start()
        for broken, of_otlp, of_influxdb in BROKEN:
            caplog.clear()
            vars(collector).update(broken)
            await push.push()
            await push.push()
            vars(collector).update(status=200, body=b"", hang=False, echo=False)
            await push.push()
            begin, end = (record.getMessage() for record in caplog.records)
            assert (of_otlp if target == "otlp" else of_influxdb) in begin
            assert "are taken by" in end
            assert "c4nary" not in caplog.text
        assert f'headrace_metrics_push_failures_total{{target="{target}"}} 6.0' in text_of(metrics.snapshot()).decode()
        await push.stop()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, False),
        ({"ENDPOINT": URL, "OTEL_SDK_DISABLED": "True"}, False),
        ({"ENDPOINT": URL, "OTEL_METRICS_EXPORTER": "none"}, False),
        ({"METRICS_ENDPOINT": "https://h/m"}, True),
        ({"ENDPOINT": "localhost:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT should be a URL"),
        ({"ENDPOINT": URL, "PROTOCOL": "grpc"}, "PROTOCOL is 'grpc': Headrace exports by http/protobuf only"),
        ({"ENDPOINT": URL, "OTEL_METRIC_EXPORT_INTERVAL": "0"}, "OTEL_METRIC_EXPORT_INTERVAL should be milliseconds"),
    ],
)
def test_the_variables_of_opentelemetry_are_read(
    variables: dict[str, str], says: str | bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those for metrics win; a wrong one is named, without its value if that may be a secret."""
    environ = {name if name.startswith("OTEL") else P + name: value for name, value in variables.items()}
    try:
        found: str | bool = is_exported("METRICS", environ)
        push_to(monkeypatch, URL, Metrics(), **environ)
    except EnvironmentProblem as error:
        found = error.description
    assert says == found if isinstance(says, bool) else says in str(found)


async def test_what_a_part_of_a_push_has_taken_is_not_repeated() -> None:
    """After a later part failed, only the requests of that part are sent again."""
    async with collecting() as collector:
        settings = InfluxDbConfig(url=f"{collector.url}/write")
        lines = InfluxLines(settings.url, "sidecar", "h")
        push = InfluxPush(settings, Metrics(), lines, SystemClock())
        collector.statuses = [204, 503]
        for number in range(700):
            lines.request(f"/{number}", "anonymous", 200, 0.1)
        await push.push()
        await push.push()
        await push.stop()
    sent = [
        re.findall(r"^sidecar\.request\.count,.*endpoint=/(\d+).* value=(.*) \d+$", body.decode(), re.M)
        for *_, body in collector.requests
    ]
    assert len(sent) == 3
    assert sent[1] == sent[2]
    assert sorted(sent[0] + sent[2], key=lambda each: int(each[0])) == [(str(number), "1.0") for number in range(700)]


def test_a_line_without_a_number_is_left_out() -> None:
    """And tags without a value. Only a backslash before a special character is lost of a tag."""
    assert line("m x", {"b": "", "a": "1"}, {"v": 1, "n": float("nan")}, 5) == "m\\ x,a=1 v=1.0 5"
    assert line("m", {}, {"v": float("inf")}, 5) == ""
    assert line("m", {"a": 'b,c=d\\ "\n'}, {"v": 1}, 5) == r'm,a=b\,c\=d/\ "\  v=1.0 5'
