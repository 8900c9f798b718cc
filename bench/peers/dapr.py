"""Dapr in standalone mode: publishing over HTTP, and a subscription that is pushed to an application."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench.environment import Bench, first_to_last
from bench.load import Load, Target
from bench.measured import Measured
from bench.produce import Shape, loaded
from bench.push import DELAYS, Sink, ticked
from headrace_devkit.devcluster.ports import free_ports

READY_SECONDS, JOINED_SECONDS = 60.0, 8.0
COMPONENT = """\
apiVersion: dapr.io/v1alpha1
kind: Component
metadata: {{name: kafka}}
spec:
  type: pubsub.kafka
  version: v1
  metadata:
  - {{name: brokers, value: "{servers}"}}
  - {{name: consumerGroup, value: "{group}"}}
  - {{name: authType, value: none}}
  - {{name: initialOffset, value: oldest}}
"""
SUBSCRIPTION = """\
apiVersion: dapr.io/v2alpha1
kind: Subscription
metadata: {{name: push}}
spec:
  pubsubname: kafka
  topic: "{topic}"
  routes: {{default: /}}
  metadata: {{rawPayload: "true"}}
"""
BULK = "  bulkSubscribe: {enabled: true, maxMessagesCount: 100, maxAwaitDurationMs: 40}\n"


class Dapr:
    """The program, and what is measured on it."""

    def __init__(self, bench: Bench, program: Path) -> None:
        self.bench, self.program = bench, program

    @contextlib.contextmanager
    def serving(self, subscription: str = "", app_port: int = 0) -> Iterator[Target]:
        """Run it; with a subscription, it pushes to the application on `app_port`."""
        folder = self.bench.folder / f"dapr-{time.time_ns()}"
        folder.mkdir()
        servers, group = self.bench.cluster.bootstrap_servers, folder.name
        (folder / "kafka.yaml").write_text(COMPONENT.format(servers=servers, group=group))
        if subscription:
            (folder / "push.yaml").write_text(subscription)
        http, grpc, internal = free_ports(3)
        words = ["--app-id", group, "--mode", "standalone", "--resources-path", str(folder), "--log-level", "warn"]
        words += ["--dapr-http-port", str(http), "--dapr-grpc-port", str(grpc), "--enable-metrics=false"]
        words += ["--dapr-internal-grpc-port", str(internal), "--dapr-listen-addresses", "127.0.0.1"]
        words += ["--app-port", str(app_port)] if subscription else []
        with (folder / "log").open("w") as log:
            process = subprocess.Popen([str(self.program), *words], stdout=log, stderr=log)
        try:
            if not subscription:
                wait_ready(http, process, folder / "log")
            yield Target(http, process.pid)
        finally:
            process.kill()
            process.wait()

    def produce(self, topic: str, shape: Shape, raw: bool = True) -> Measured:
        """Publish the records of a shape; a single one is the body itself, or becomes a CloudEvent."""
        text, where = "x" * shape.size, f"kafka/{topic}?metadata.rawPayload={str(raw).lower()}"
        load = Load(f"/v1.0/publish/{where}", text.encode(), 1, shape.connections, "Content-Type: text/plain")
        if shape.records > 1:
            entries = [{"entryId": f"{n}", "event": text, "contentType": "text/plain"} for n in range(shape.records)]
            body = json.dumps(entries).encode()
            load = Load(f"/v1.0-alpha1/publish/bulk/{where}", body, shape.records, shape.connections)
        with self.serving() as target:
            return loaded(load, target, self.bench)

    def push(self, topic: str, records: int) -> Measured:
        """Push a topic to an application, one record per request, in the order of the partitions."""
        with Sink(records, "single") as sink, self.serving(SUBSCRIPTION.format(topic=topic), sink.port) as target:
            return first_to_last(sink.line, target.pid)

    def push_bulk(self, topic: str, records: int) -> Measured:
        """Push a topic to an application, up to 100 records per request."""
        subscription = SUBSCRIPTION.format(topic=topic) + BULK
        with Sink(records, "bulk") as sink, self.serving(subscription, sink.port) as target:
            return first_to_last(sink.line, target.pid)

    def delays(self) -> Measured:
        """Measure from before a record is given to a producer until its request has arrived, one record at a time."""
        topic = self.bench.topic("latency")
        with Sink(DELAYS, "latency") as sink, self.serving(SUBSCRIPTION.format(topic=topic), sink.port) as target:
            time.sleep(JOINED_SECONDS)  # nothing says when it has its partitions
            return ticked(self.bench, topic, sink, target.pid)


def wait_ready(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v1.0/healthz/outbound", timeout=5).close()
            return
        time.sleep(0.1)
    raise TimeoutError(f"Dapr is not ready: {log.read_text()[-2000:]}")
