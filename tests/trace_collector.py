"""An OTLP/HTTP collector in the test's process, and the spans that it has received."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from headrace_devkit.testing.scenario import Scenario


class CollectedSpan(NamedTuple):
    """One span."""

    name: str
    trace: str
    id: str
    parent: str
    links: list[str]
    """Ids of linked spans."""
    seconds: float
    attributes: dict[str, Any]
    error: str


class Collector:
    """Keeps spans; `sampler` is that of the processes that get its `env`."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.raw = b""
        """All bodies."""
        self.url = ""

    def env(self, sampler: str = "parentbased_always_on", **more: str) -> dict[str, str]:
        """Return the environment of a process that exports to it at once."""
        quick = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_TRACES_SAMPLER": sampler}
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, **quick, **more}

    def take(self, body: bytes) -> None:
        """Take one export."""
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                values = {each.key: each.value for each in span.attributes}
                found = {key: getattr(value, value.WhichOneof("value")) for key, value in values.items()}
                ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
                links, seconds = [link.span_id.hex() for link in span.links], span.end_time_unix_nano / 1e9
                seconds -= span.start_time_unix_nano / 1e9
                self.spans.append(CollectedSpan(span.name, *ids, links, seconds, found, span.status.message))

    def wait(self, name: str, count: int = 1, **attributes: Any) -> list[CollectedSpan]:
        """Wait for spans of a name with these attributes (`a__b` is `a.b`)."""
        wanted = {key.replace("__", "."): value for key, value in attributes.items()}

        def found() -> list[CollectedSpan]:
            return [s for s in self.spans if s.name == name and wanted.items() <= s.attributes.items()]

        Scenario.wait_until(lambda: len(found()) >= count, f"{count} spans {name}, there are {self.spans}")
        return found()


@contextlib.contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    """Run a collector that responds with this status."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield collector
    server.shutdown()
    server.server_close()
