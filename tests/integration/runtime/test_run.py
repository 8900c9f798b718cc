"""The running process under bad input: one paragraph for each cause, and recovery without a restart."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_devkit.devcluster.jvm_server import Server
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing import Cluster, MakeTopic, PlannedResponse, RecordingBackend, Registry, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from yaml_table import table

RECORD = {"records": [{"key": "k", "value": {"n": 1}}]}


def push(topic: str, backend: Any, **more: Any) -> dict[str, Any]:
    return {"push": {"topics": [topic], "group": f"{topic}-push", "backend": {"url": backend.url}, **more}}


def test_kafka_and_the_registry_start_later(
    site: Scenario, tmp_path: Path, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Live, not ready with a reason, and 503; each of them is used without a restart once it responds."""
    (port,) = free_ports(1)
    avro = {"valueFormat": "avro", "valueSchema": '"long"', "records": [{"value": 7}]}
    with Cluster(tmp_path / "kafka") as cluster, Registry(tmp_path / "registry", port=port) as registry:
        for name in ("orders", "numbers"):
            cluster.create_topic(name)
        cluster.kill(1)
        registry.server.kill()
        config = {
            "kafka": {"bootstrap_servers": cluster.bootstrap_servers},
            "schema_registry": {"url": registry.url},
            "reactive_consumers": push("orders", backend),
        }
        process = headrace(config, wait=False)
        orders, numbers = (f"{process.url}/producers/{name}" for name in ("orders", "numbers"))
        site.wait_until(lambda: site.ask(f"{process.url}/health/liveness").status == 200, "liveness")
        refused = site.ask(orders, RECORD)
        assert (refused.status, refused.body["code"], refused.headers["retry-after"]) == (503, "ERR40012", "2")
        reason = f"connection refused by {cluster.bootstrap_servers}"
        site.wait_until(lambda: reason in site.reasons(process.url).get("kafka", ""), "the reason")
        assert site.ask(orders, RECORD).body["code"] == "ERR40012"
        cluster.restart(1)
        site.wait_until(lambda: set(site.reasons(process.url)) == {"schema registry"}, "only the registry to miss")
        assert "is not available" in site.reasons(process.url)["schema registry"]
        assert "ready http" not in process.output
        assert site.ask(orders, RECORD).body["offsets"] == [{"partition": 0, "offset": 0}]
        backend.wait_for(lambda b: len(b.accepted) == 1)
        refused = site.ask(numbers, avro)
        assert (refused.status, refused.body["code"]) == (503, "ERR40010")
        registry.start()
        process.wait_ready()
        site.wait_until(lambda: site.ask(numbers, avro).status == 200, "a cold registry")
        assert process.terminate() == 0
    assert "Traceback" not in process.output


def test_a_folder_of_light4j_starts_as_it_is(
    site: Scenario, topic: MakeTopic, tmp_path: Path, backend: RecordingBackend
) -> None:
    """The sample set that produces and consumes, with addresses of the environment as in a container."""
    name, (port,) = topic(), free_ports(1)
    values = {"TOPIC": name, "GROUP_ID": f"{name}-push", "BACKENDAPIHOST": backend.url, "VALUEFORMAT": "string"}
    values |= {"BOOTSTRAP_SERVERS": site.kafka.bootstrap_servers, "AUDITTARGET": "logfile"}  # the set has no login
    env = {f"KAFKA_{client}_{key}": value for client in ("PRODUCER", "CONSUMER") for key, value in values.items()}
    env |= {"SERVER_HTTPPORT": str(port), "HEALTH_DOWNSTREAMENABLED": "false"}
    sets = Path(__file__).parents[2] / "unit/config/light4j"
    command = [sys.executable, "-m", "headrace.cli.main", "run", "-c"]
    process = Server("Headrace", tmp_path / "headrace.log")
    where = f"{sets}/reactive-consumer-producer:{sets}/kafka"
    process.start([*command, where], detached=False, cwd=tmp_path, env={**os.environ, **env})
    try:
        process.wait_until(lambda: f"ready http=http://127.0.0.1:{port}" in process.log.read_text(), 120)
        records = {"records": [{"key": "k", "value": "one"}], "unknown": True}
        sent = site.ask(f"http://127.0.0.1:{port}/producers/{name}", records)
        assert (sent.status, sent.body["offsets"][0]["offset"]) == (200, 0)
        backend.wait_for(lambda b: len(b.accepted) == 1)
        site.wait_committed(f"{name}-push", name, 1)
    finally:
        process.kill()
    output = process.log.read_text()
    assert "properties.max.message.size (17): no effect, because it is not a property of Kafka" in output
    assert "Traceback" not in output


@pytest.mark.parametrize("address", ["@headrace-{}", "{}/nobody-listens"])
def test_the_service_manager_is_told(
    site: Scenario, topic: MakeTopic, tmp_path: Path, headrace: StartHeadrace, backend: RecordingBackend, address: str
) -> None:
    """`sd_notify`: what a start waits for, ready, alive again and again, and the drain; nothing fails without one."""
    address = address.format(tmp_path.name if address.startswith("@") else tmp_path)
    told: list[str] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        if "nobody" not in address:
            manager.bind(address.replace("@", "\0"))
        manager.setblocking(False)

        def is_told(text: str) -> bool:
            with contextlib.suppress(BlockingIOError):
                while True:
                    told.append(manager.recv(4096).decode())
            return any(text in each for each in told) or "nobody" in address

        variables = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "200000"}
        later = topic() + "-later"  # the start waits for this topic until it is created
        process = headrace({**site.config, "reactive_consumers": push(later, backend)}, wait=False, env=variables)
        for text in ("reactive push consumer: ", "WATCHDOG=1"):
            site.wait_until(lambda text=text: is_told(text), text, 30)
        site.cli("topics", "create", later, "--partitions", "1")
        site.wait_until(lambda: is_told("READY=1\nSTATUS=ready"), "ready", 30)
        process.wait_ready()
        told.clear()
        site.wait_until(lambda: is_told("WATCHDOG=1"), "another sign of life", 30)
        is_told("")
        assert process.terminate() == 0
        assert is_told("STOPPING=1")
    assert ("failed to notify" in process.output) == ("nobody" in address)


@pytest.mark.parametrize(("text", "says"), table(__file__, "files_that_are_wrong_end_with_78"))
def test_files_that_are_wrong_end_with_78(tmp_path: Path, text: str, says: str) -> None:
    """Every file the run needs is read before anything starts; its fault is named by file and line."""
    (tmp_path / "function.yaml").write_text("metadata: {name: f}\nspec:\n  handler: nothing\n")
    (tmp_path / "pipeline.yaml").write_text("name: p\nflows: 7\n")
    triggers = "  triggers: {t: {kind: kafka, attributes: {topics: [t], consumerGroup: g}}}\n"
    (tmp_path / "missing.yaml").write_text(f"metadata: {{name: f}}\nspec:\n  handler: mein:handler\n{triggers}")
    (tmp_path / "main.py").write_text("def handler(context, event): ...\n")
    flow = "flows: {f: {sql: SELEC a FROM t, sink: {topic: u}}}\n"
    (tmp_path / "sql.yaml").write_text(f"name: p\nsources: {{t: {{topic: t, schema: a INT}}}}\n{flow}")
    (tmp_path / "headrace.yaml").write_text(text)
    command = [sys.executable, "-m", "headrace.cli.main", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 78, done.stderr
    assert re.search(says, done.stderr), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_port_that_is_taken_ends_with_1(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """Soon, with what to do, and before anything was consumed."""
    name = topic()
    site.write_json(name, 1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        config = {**site.config, "http": {"port": port}, "reactive_consumers": push(name, backend)}
        process = headrace(config, wait=False)
        site.wait_until(lambda: process.exit_code is not None, "the end")
    assert process.exit_code == 1
    assert f"failed to listen on 127.0.0.1:{port}" in process.output
    assert "http.port" in process.output
    assert "Traceback" not in process.output
    assert backend.requests == []


def test_a_consumer_that_dies_is_named_and_starts_again_alone(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """A second member with the same static identity fences it; when that has left, it reads on."""
    name, slow = topic(), topic()
    only = push(name, backend, consumer={"properties": {"group.instance.id": "the-one"}})
    config = {**site.config, "reactive_consumers": only}
    backend.response = PlannedResponse(delay_seconds=600)
    first = headrace({**config, "reactive_consumers": {**only, "slow": push(slow, backend)["push"]}})
    site.write_json(slow, 1)
    backend.wait_for(lambda b: len(b.requests) == 1)
    second = headrace(config, wait=False)
    site.wait_until(lambda: "ended by itself" in site.reasons(first.url).get("reactive push", ""), "its reason")
    second.server.kill()
    site.write_json(name, 2)
    backend.wait_for(lambda b: len(b.requests) == 2)
    backend.response = PlannedResponse()
    backend.release()
    for one in (name, slow):
        site.wait_committed(f"{one}-push", one, 1)
    assert "reactive push: services failed: service reactive push consumer ended by itself" in first.output
    assert "Traceback" not in first.output
    assert len(backend.requests) == 2
    assert first.exit_code is None


SLOW_NAMES = """
import time, uvloop
class Loop(uvloop.Loop):
    def getaddrinfo(self, *address, **_):
        print("looks up", *address, flush=True)
        return self.run_in_executor(None, time.sleep, 600)
uvloop.new_event_loop = Loop
"""


def test_a_look_up_of_a_name_does_not_delay_the_end(site: Scenario, headrace: StartHeadrace, tmp_path: Path) -> None:
    """Its server may not answer for minutes."""
    (tmp_path / "sitecustomize.py").write_text(SLOW_NAMES)
    config = {**site.config, "health": {"downstream_url": "http://slow.example/"}}
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = headrace(config, wait=False, env={"PYTHONPATH": path})
    site.wait_until(lambda: "looks up slow.example" in process.output, "the look-up")
    assert process.terminate(30) == 0
