"""Metrics over OTLP to a server that breaks, the variables, and lines of line protocol."""

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
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsPartialSuccess,
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

from headrace.config.metrics_push import InfluxDbConfig
from headrace.errors import ConfigError
from headrace.runtime import Deadline, SystemClock
from headrace.runtime.gauge_registry import BUCKET_SECONDS
from headrace.runtime.telemetry.influxdb import InfluxDb, line
from headrace.runtime.telemetry.metrics import Metrics
from headrace.runtime.telemetry.otlp import otlp_target
from headrace.runtime.telemetry.periodic_push import MetricsPush

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


def push_to(collector: Any, metrics: Metrics, **more: str) -> MetricsPush:
    target = otlp_target({f"{P}ENDPOINT": collector.url, f"{P}TIMEOUT": "500", **more}, "h:1")
    assert target
    return MetricsPush(target, metrics, SystemClock())


async def test_otlp_has_every_kind_of_metric() -> None:
    """Cumulative sums, gauges, and histograms with buckets that are not added up."""
    metrics = Metrics()
    metrics.produced(3, 2)
    for seconds in (0.0001, 0.001, 0.3):
        metrics.request("/producers/{topic}", 200, seconds)
    more = {f"{P}HEADERS": "Api-Key=a%20b", f"{P}COMPRESSION": "gzip", "OTEL_SERVICE_NAME": "orders"}
    async with collecting() as collector:
        push = push_to(collector, metrics, OTEL_RESOURCE_ATTRIBUTES="env=dev,service.name=other", **more)
        await push.start()
        await push.drain(Deadline(SystemClock(), 60))
        await push.stop()
    [(path, headers, body)] = collector.requests
    assert (path, headers["api-key"], headers["content-encoding"]) == ("/v1/metrics", "a b", "gzip")
    [found] = ExportMetricsServiceRequest.FromString(body).resource_metrics
    resource = {one.key: one.value.string_value for one in found.resource.attributes}
    assert resource == {"service.name": "orders", "service.instance.id": "h:1", "env": "dev"}
    by_name = {metric.name: metric for metric in found.scope_metrics[0].metrics}
    produced = by_name["headrace_produce_records"].sum
    assert (produced.is_monotonic, produced.aggregation_temporality) == (True, 2)
    assert {one.attributes[0].value.string_value: one.as_double for one in produced.data_points} == {
        "acknowledged": 2,
        "failed": 1,
    }
    [point] = by_name["headrace_http_request_seconds"].histogram.data_points
    assert (point.count, round(point.sum, 4)) == (3, 0.3011)
    assert (tuple(point.explicit_bounds), sum(point.bucket_counts), max(point.bucket_counts)) == (BUCKET_SECONDS, 3, 1)
    assert by_name["process_resident_memory_bytes"].gauge.data_points[0].as_double > 0


async def test_an_outage_is_two_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever its kind; each failure is counted, and nothing is raised. No line has what the requests carry."""
    caplog.set_level(logging.WARNING, "headrace.runtime.telemetry.periodic_push")
    metrics = Metrics()
    async with collecting() as collector:
        collector.url = collector.url.replace("//", "//u:c4nary@")
        url = {f"{P}METRICS_ENDPOINT": f"{collector.url}/m?p=c4nary"}
        push = push_to(collector, metrics, **{f"{P}HEADERS": "k=c4nary"}, **url)
        await push.start()
        partial = ExportMetricsPartialSuccess(rejected_data_points=7, error_message="too old")
        rejected = ExportMetricsServiceResponse(partial_success=partial).SerializeToString()
        for broken, why in (
            ({"status": 503, "body": b"full"}, "HTTP 503 full"),
            ({"status": 302}, "HTTP 302"),
            ({"status": 401, "echo": True}, "HTTP 401 /m?"),
            ({"status": 99}, "Bad status"),
            ({"body": rejected}, "7 data points were rejected: too old"),
            ({"hang": True}, "no response within 0.5 s"),
        ):
            caplog.clear()
            vars(collector).update(broken)
            await push.push()
            await push.push()
            vars(collector).update(status=200, body=b"", hang=False, echo=False)
            await push.push()
            begin, end = (record.getMessage() for record in caplog.records)
            assert why in begin
            assert "are taken by" in end
            assert "c4nary" not in caplog.text
        assert 'headrace_metrics_push_failures_total{target="otlp"} 12.0' in metrics.render().decode()
        await push.stop()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({}, None),
        ({"ENDPOINT": " "}, None),
        ({"ENDPOINT": URL, "OTEL_SDK_DISABLED": "True"}, None),
        ({"ENDPOINT": URL, "OTEL_METRICS_EXPORTER": "none"}, None),
        ({"ENDPOINT": f"{URL}/base/"}, f"{URL}/base/v1/metrics 60.0 10.0"),
        (
            {"ENDPOINT": URL, "METRICS_ENDPOINT": "https://h/m", "METRICS_TIMEOUT": "5", "TIMEOUT": "x"},
            "https://h/m 60.0 0.005",
        ),
        ({"ENDPOINT": URL, "OTEL_METRIC_EXPORT_INTERVAL": "2500"}, f"{URL}/v1/metrics 2.5 10.0"),
        ({"ENDPOINT": "localhost:4318"}, "OTEL_EXPORTER_OTLP_ENDPOINT should be a URL"),
        ({"ENDPOINT": URL, "PROTOCOL": "grpc"}, "PROTOCOL is grpc, which is not supported: set http/protobuf"),
        ({"ENDPOINT": URL, "OTEL_METRIC_EXPORT_INTERVAL": "0"}, "OTEL_METRIC_EXPORT_INTERVAL should be milliseconds"),
        ({"ENDPOINT": URL, "HEADERS": "c4nary"}, "HEADERS has a part without a name"),
        ({"ENDPOINT": URL, "CERTIFICATE": __file__}, "holds no authorities in PEM"),
    ],
)
def test_the_variables_of_opentelemetry_are_read(variables: dict[str, str], says: str | None) -> None:
    """Those for metrics win; a wrong one is named, without its value if that may be a secret."""
    environ = {name if name.startswith("OTEL") else P + name: value for name, value in variables.items()}
    try:
        target = otlp_target(environ, "h:1")
        found = target and f"{target.url} {target.interval_seconds} {target.timeout_seconds}"
    except ConfigError as error:
        found = error.description
        assert "c4nary" not in found
        assert says
        assert says in found
    else:
        assert found == says


async def test_what_a_part_of_a_push_has_taken_is_not_repeated() -> None:
    """After a later part failed, only the requests of that part are sent again."""
    async with collecting() as collector:
        target = InfluxDb(InfluxDbConfig(url=f"{collector.url}/write"), "sidecar", "h")
        push = MetricsPush(target, Metrics(), SystemClock())
        collector.statuses = [204, 503]
        for number in range(700):
            target.request(f"/{number}", "anonymous", 200, 0.1)
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
    """And tags without a value: the server refuses both."""
    assert line("m x", {"b": "", "a": "1"}, {"v": 1, "n": float("nan")}, 5) == "m\\ x,a=1 v=1.0 5"
    assert line("m", {}, {"v": float("inf")}, 5) == ""
