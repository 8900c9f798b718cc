"""The dev cluster on real servers, through the command line and from Python."""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from headrace_devkit.devcluster import DevCluster, broker_protocol
from headrace_devkit.devcluster.jvm_server import is_alive
from headrace_devkit.devcluster.ports import free_ports
from headrace_devkit.testing.forked import run_command
from headrace_devkit.testing.scenario import Scenario

Dev = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dev(tmp_path: Path) -> Iterator[Dev]:
    """Run `headrace dev ...` in a folder of the test; nothing is left running."""

    yield functools.partial(run_command, tmp_path, "dev")
    DevCluster(tmp_path / ".headrace/dev").reset()


def test_up_twice_down_and_up_again_keeps_the_data(dev: Dev, tmp_path: Path) -> None:
    """The second `up` changes nothing; topics, schema ids and ports survive `down`; `reset` leaves nothing."""
    first = dev("up")
    assert first.returncode == 0, first.stderr
    endpoints = json.loads((tmp_path / ".headrace/dev/endpoints.json").read_text())
    kafka, registry = endpoints["kafka"], endpoints["schema_registry"]["url"]
    assert first.stdout == f"export KAFKA={kafka['bootstrap_servers']}\nexport SCHEMA_REGISTRY_URL={registry}\n"
    assert dev("up", "--output", "json").stdout == json.dumps(endpoints, indent=2) + "\n"

    broker = kafka["brokers"][0]
    broker_protocol.create_topic(broker["port"], "kept", 1, 1, {})
    assert Scenario.ask(f"{registry}/config").body == {"compatibilityLevel": "BACKWARD"}
    schema_id = Scenario.ask(f"{registry}/subjects/s/versions", {"schema": '"long"'}).body
    assert dev("status").returncode == 0

    assert dev("down").stderr == "stopped\n"
    assert not is_alive(broker["pid"])
    assert dev("status").returncode == 1
    assert dev("down").stderr == "nothing was running\n"

    assert dev("up").stdout == first.stdout
    assert "kept" in {partition.topic for partition in broker_protocol.metadata(broker["port"]).partitions}
    assert Scenario.ask(f"{registry}/subjects/s/versions", {"schema": '"long"'}).body == schema_id
    assert dev("reset", "--yes").returncode == 0
    assert not (tmp_path / ".headrace/dev").exists()


def test_up_starts_again_what_has_died(dev: Dev, tmp_path: Path) -> None:
    """A killed broker comes back at its port, with another process id; what runs is left alone."""
    endpoints = json.loads(dev("up", "--no-registry", "--output", "json").stdout)
    assert "schema_registry" not in endpoints
    (before,) = endpoints["kafka"]["brokers"]
    os.kill(before["pid"], signal.SIGKILL)
    Scenario.wait_until(lambda: not is_alive(before["pid"]), "the end of the broker")
    (after,) = json.loads(dev("up", "--no-registry", "--output", "json").stdout)["kafka"]["brokers"]
    assert after["port"] == before["port"]
    assert after["pid"] != before["pid"]


def test_a_port_that_is_asked_for_is_used_or_refused(dev: Dev, tmp_path: Path) -> None:
    """A taken port is one paragraph and exit code 1; a free one is where Kafka is."""
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as holder:
        port = holder.getsockname()[1]
        refused = dev("up", "--no-registry", "--port", str(port))
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"Port {port} for Kafka is taken by another program.")
    assert "Traceback" not in refused.stderr
    assert f"KAFKA=127.0.0.1:{port}\n" in dev("up", "--no-registry", "--port", str(port)).stdout
    other = dev("up", "--no-registry", "--port", str(port + 1))
    assert other.returncode == 1
    assert f"runs already, on port {port}, not {port + 1}" in other.stderr


def test_ctrl_c_during_up_leaves_nothing_running(dev: Dev, tmp_path: Path) -> None:
    """Brokers that have started are ended again."""
    command = [sys.executable, "-m", "headrace.cli.main", "dev", "up", "--no-registry"]
    up = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    state = tmp_path / ".headrace/dev/kafka/cluster.json"
    Scenario.wait_until(state.exists, "the file of the cluster")
    pid = json.loads(state.read_text())["nodes"]["1"]["process"][0]
    up.send_signal(signal.SIGINT)
    assert up.wait(120) == 130
    assert not is_alive(pid)
    assert not (tmp_path / ".headrace/dev/endpoints.json").exists()


def test_brokers_of_a_killed_program_die_with_it(tmp_path: Path) -> None:
    """`kill -9` of the Python process that owns a cluster leaves no broker behind."""
    program = (
        "import sys, pathlib, time; from headrace_devkit.devcluster import Cluster\n"
        "with Cluster(pathlib.Path(sys.argv[1])) as cluster:\n"
        "    print(cluster.endpoints[0]['pid'], flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "c")], stdout=subprocess.PIPE, text=True)
    assert owner.stdout
    with owner.stdout:
        pid = int(owner.stdout.readline())
    assert is_alive(pid)
    owner.kill()
    owner.wait()
    Scenario.wait_until(lambda: not is_alive(pid), "the end of the broker")


def test_secrets_are_private_and_stay_until_the_reset(dev: Dev) -> None:
    """Keys and passwords are readable by their owner only; a second start keeps passwords and users."""
    started = dev("up", "--secured", "--output", "json")
    assert started.returncode == 0, started.stderr
    endpoints = json.loads(started.stdout)
    secured = endpoints["secured"]
    passwords = json.loads(Path(secured["passwords"]).read_text())
    modes = {mode for name, mode in secured["modes"].items() if name.endswith((".key", ".p12", "passwords.json"))}
    assert modes == {"0o600"}
    assert not [text for text in passwords.values() if text in json.dumps(endpoints)]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        trust = ssl.create_default_context(cafile=secured["authority"])
        urllib.request.urlopen(f"{secured['schema_registry']['url']}/subjects", context=trust, timeout=120)
    broker_protocol.create_topic(endpoints["kafka"]["brokers"][0]["port"], "t", 1, 1, {})
    other = dev("up", "--no-secured")
    assert other.returncode == 1
    assert "is secured. Continue without that option" in other.stderr
    assert dev("down").stderr == "stopped\n"
    assert dev("up").returncode == 0
    assert json.loads(Path(secured["passwords"]).read_text()) == passwords
    login = {
        "bootstrap.servers": secured["sasl_ssl"]["bootstrap_servers"],
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": secured["authority"],
        "sasl.mechanism": "SCRAM-SHA-256",
        "sasl.username": "app",
        "sasl.password": passwords["app"],
    }
    results: list[Any] = []
    producer = Producer(login)
    producer.produce("t", b"v", on_delivery=lambda error, _: results.append(error))
    assert (producer.flush(120), results) == (0, [None])
