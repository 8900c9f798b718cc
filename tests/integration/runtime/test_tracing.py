"""Traces of a running process at a collector: one trace through all parts, and what no span has."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import EnvironmentProblem
from headrace.runtime.telemetry.tracing import configure_tracing
from headrace_devkit.testing import MakeTopic, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import send
from tests.function_calls import function_file
from tests.trace_collector import Collector, collecting

TRACE, PARENT, SECRET = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "canary-5f0e"
HANDLER = "def handler(context, event):\n    return dict(event.headers)[%r]\n"
HEADERS = {"Authorization": f"Bearer {SECRET}", "X-Secret": SECRET, "X-Correlation-Id": "order-1"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


def test_one_trace_goes_through_all_parts(
    site: Scenario,
    topic: MakeTopic,
    headrace: StartHeadrace,
    backend: RecordingBackend,
    collector: Collector,
    tmp_path: Path,
) -> None:
    """From the client's header to the record, the backend, the handler and its output; no span has what users send."""
    source, target = topic(), topic()
    attributes = {"topics": [source], "consumerGroup": f"{source}-work", "outputTopic": target}
    file = function_file(tmp_path, HANDLER % "traceparent", {"in": {"kind": "kafka-cluster", "attributes": attributes}})
    push = {"topics": [source], "group": f"{source}-push", "backend": {"url": backend.url, "mode": "single"}}
    config = {**site.config, "functions": [file], "reactive_consumers": {"push": push}}
    process = headrace(config, env=collector.env(OTEL_PROPAGATORS="tracecontext,baggage"))
    record = {"key": SECRET, "value": SECRET, "headers": {"h": SECRET}}
    given = {**HEADERS, "traceparent": f"00-{TRACE}-{PARENT}-01"}
    response = send("POST", f"{process.url}/producers/{source}", {"records": [record]}, headers=given)
    assert response.status == 200, response
    (server,) = collector.wait("POST /producers/{topic}")
    (write,) = collector.wait(f"send {source}")
    (pushed,) = collector.wait(f"process {source}", messaging__consumer__group__name=f"{source}-push")
    (called,) = collector.wait(f"process {source}", messaging__consumer__group__name=f"{source}-work")
    assert {span.trace for span in (server, write, pushed, called)} == {TRACE}
    assert (server.parent, write.parent, pushed.parent, called.parent) == (PARENT, server.id, write.id, write.id)
    assert server.attributes["headrace.correlation_id"] == "order-1"
    assert server.attributes["http.response.status_code"] == 200
    assert (pushed.attributes["messaging.kafka.offset"], called.attributes["faas.name"]) == (0, "work")
    site.wait_until(lambda: site.records(target), "the output")
    (stored,), (output,) = site.records(source), site.records(target)
    header = "traceparent"
    got = backend.requests[0].headers[header]
    seen = [dict(stored.headers)[header].decode(), got, output.value.decode(), dict(output.headers)[header].decode()]
    assert [TRACE in each for each in seen] == [True] * 4
    for text, span in zip(seen, (write, pushed, called, called), strict=True):
        assert span.id in text
    assert SECRET.encode() not in collector.raw


def access_lines(process: Any) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in process.output.splitlines() if line.startswith("{")]
    return [line for line in lines if line["logger"] == "headrace.access"]


def test_what_is_not_sampled_passes_on_its_callers_headers(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, collector: Collector
) -> None:
    """No span is exported; the access log has names of the query without values, and no header or body."""
    name = topic()
    config = {**site.config, "http": {"access_log": True}, "log_format": "json"}
    process = headrace(config, env=collector.env("always_off"))
    given = {**HEADERS, "traceparent": f"00-{TRACE}-{PARENT}-01", "X-Traceability-Id": "t-1"}
    for path in (f"producers/{name}", f"producers/{name}?a=", f"nowhere%0a?token={SECRET}&{SECRET}"):
        send("POST", f"{process.url}/{path}", {"records": [{"value": SECRET}]}, headers=given)
    send("GET", f"{process.url}/health/liveness")
    assert process.terminate() == 0
    assert [dict(record.headers)["traceparent"].decode() for record in site.records(name)] == [given["traceparent"]] * 2
    assert (collector.spans, SECRET in process.output) == ([], False)
    fast, slow, unknown = access_lines(process)
    assert (fast["method"], fast["path"], fast["route"]) == ("POST", f"/producers/{name}", "/producers/{topic}")
    assert (fast["status"], fast["address"], fast["traceabilityId"]) == (200, "127.0.0.1", "t-1")
    assert (fast["bytes"], fast["milliseconds"] > 0, fast["correlationId"]) == (slow["bytes"], True, "order-1")
    assert (unknown["status"], unknown["route"], unknown["path"]) == (404, "none", "/nowhere%0a?token=*&*")


@pytest.mark.parametrize("how", ["silent", "redirects"])
def test_a_collector_that_is_down_stalls_nothing(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, how: str
) -> None:
    """Records are written, the process drains and ends, and the log has one line about it."""
    name, is_silent = topic(), how == "silent"
    with socket.create_server(("127.0.0.1", 0)) as server, collecting(status=302) as elsewhere:
        url = elsewhere.url if how == "redirects" else f"http://127.0.0.1:{server.getsockname()[1]}"
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_TRACES_SAMPLER": "always_on", "OTEL_BSP_SCHEDULE_DELAY": "10"}
        process = headrace(site.config, env={**env, "OTEL_EXPORTER_OTLP_TIMEOUT": "60" if is_silent else "1"})
        said = "failed to export spans, dropping them: the collector is unreachable or rejects them"
        for _ in range(3):
            assert send("POST", f"{process.url}/producers/{name}", {"records": [{"value": 1}]}).status == 200
            if not is_silent:
                site.wait_until(lambda: said in process.output, "the line")
        assert process.terminate() == 0
    assert len(site.records(name)) == 3
    last = "dropped the last spans: the collector did not take them within 5 s"
    assert (process.output.count(said), process.output.count(last)) == ((0, 1) if is_silent else (1, 0))


WRONG = [
    ("OTEL_TRACES_SAMPLER", "all", "OTEL_TRACES_SAMPLER is 'all': use one of always_on, always_off, traceidratio,"),
    ("OTEL_PROPAGATORS", "tracecontext,b3", "OTEL_PROPAGATORS has 'b3': Headrace passes on tracecontext"),
    ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc': Headrace exports by http/protobuf"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[::1", "OTEL_EXPORTER_OTLP_ENDPOINT should be a URL such as"),
    ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:port", "OTEL_EXPORTER_OTLP_ENDPOINT should be a URL such as"),
    ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "OpenTelemetry rejects a variable (OTEL_...): max_queue_size must be"),
]


@pytest.mark.parametrize(("variable", "value", "said"), WRONG)
def test_a_wrong_variable_ends_the_start(variable: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, value)  # the library reads those of the process
    with pytest.raises(EnvironmentProblem, match=re.escape(said)):
        configure_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", variable: value})


def test_without_an_endpoint_nothing_is_imported_and_without_the_library_the_start_says_how() -> None:
    code = """
import sys
from headrace.runtime.telemetry.tracing import configure_tracing
assert configure_tracing({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"}) == []
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
sys.modules["opentelemetry.sdk"] = None
configure_tracing({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c"})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "an OTLP endpoint is set (OTEL_EXPORTER_OTLP_ENDPOINT), and it needs the package open" in done.stderr
    assert "pip install 'headrace[otel]'" in done.stderr
