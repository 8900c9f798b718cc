"""Traces of a running process at a collector: one trace through all parts, its formats, and what no span has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.active_client import send
from tests.function_calls import function_file
from tests.trace_collector import Collector, collecting

TRACE, PARENT, SECRET = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", "canary-5f0e"
FORMATS = {
    "tracecontext": ("traceparent", f"00-{TRACE}-{{}}-01"),
    "b3": ("b3", f"{TRACE}-{{}}-1"),
    "jaeger": ("uber-trace-id", f"{TRACE}:{{}}:0:1"),
}
HANDLER = "def handler(context, event):\n    return dict(event.headers)[%r]\n"
HEADERS = {"Authorization": f"Bearer {SECRET}", "X-Secret": SECRET, "X-Correlation-Id": "order-1"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as found:
        yield found


@pytest.mark.parametrize("name", FORMATS)
def test_one_trace_goes_through_all_parts(
    site: Any, topic: Any, headrace: Any, backend: Any, collector: Collector, tmp_path: Path, name: str
) -> None:
    """From the client's header to the record, the backend, the handler and its output; no span has what users send."""
    source, target = topic(), topic()
    header, form = FORMATS[name]
    attributes = {"topics": [source], "consumerGroup": f"{source}-work", "outputTopic": target}
    file = function_file(tmp_path, HANDLER % header, {"in": {"kind": "kafka-cluster", "attributes": attributes}})
    push = {"topics": [source], "group": f"{source}-push", "backend": {"url": backend.url, "mode": "single"}}
    config = {**site.config, "functions": [file], "reactive_consumers": {"push": push}}
    process = headrace(config, env=collector.env(OTEL_PROPAGATORS=name))
    record = {"key": SECRET, "value": SECRET, "headers": {"h": SECRET}}
    given = {**HEADERS, header: form.format(PARENT)}
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
    got = backend.requests[0].headers[header]
    seen = [dict(stored.headers)[header].decode(), got, output.value.decode(), dict(output.headers)[header].decode()]
    assert [TRACE in each for each in seen] == [True] * 4
    for text, span in zip(seen, (write, pushed, called, called), strict=True):
        assert span.id in text
    assert SECRET.encode() not in collector.raw
