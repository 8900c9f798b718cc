"""A process whose login is refused says why once, accepts nothing, and resumes by itself when the login works."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headrace_devkit.devcluster import Cluster
from headrace_devkit.devcluster.certificates import write_file
from headrace_devkit.devcluster.security import ClusterSecurity
from headrace_devkit.devcluster.token_server import TokenServer
from headrace_devkit.testing import RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import SecuredCluster

LIMIT_SECONDS = 60
CONSUMERS = 5
FIRST_REMINDER_SECONDS = 10
WRONG = "canary-of-a-wrong-password"
REFUSED = "user app or its password is wrong for SCRAM-SHA-512: correct kafka.security.sasl.username and password"


class ShortLogins(ClusterSecurity):
    """Brokers that want every client to log in again after a moment (KIP-368)."""

    def listeners(self, sasl_port: int, tls_port: int) -> dict[str, str]:
        name = "listener.name.sasl.scram-sha-512.connections.max.reauth.ms"
        return {**super().listeners(sasl_port, tls_port), name: "2000"}


@pytest.fixture(scope="module")
def short_logins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredCluster]:
    """A cluster of `ShortLogins`."""
    cluster = Cluster(tmp_path_factory.mktemp("short"), 1, secured=True)
    cluster.security = ShortLogins(tmp_path_factory.mktemp("security"))
    tokens = TokenServer(tmp_path_factory.mktemp("tokens"), cluster.security)  # never started
    try:
        cluster.start()
        yield SecuredCluster(cluster, cluster.security, tokens)
    finally:
        cluster.remove()


def warnings(process: Any) -> list[dict[str, Any]]:
    """Return the lines of the log on the login, and every other warning."""
    lines = [json.loads(line) for line in process.server.log.read_text().splitlines() if line.startswith("{")]
    return [
        line
        for line in lines
        if (line["level"] in ("warning", "error") or "exception" in line)
        and not line["message"].startswith("CONFWARN")
        and line["logger"] != "headrace.admin.health.examination"  # it examines the cluster once it is reached
    ]


def assert_one_line(process: Any, before: int) -> None:
    """All clients together log the refused login with its fix once, and then only as a reminder."""
    found = warnings(process)[before:]
    assert {line["logger"] for line in found} == {"headrace.kafka.client.reachability"}, found
    refused = [line["time"] for line in found if REFUSED in line["message"]]
    pauses = [
        (datetime.fromisoformat(late) - datetime.fromisoformat(early)).total_seconds()
        for early, late in itertools.pairwise(refused)
    ]
    assert refused, found
    assert all(pause > 0.9 * FIRST_REMINDER_SECONDS for pause in pauses), found


def assert_refused(process: Any, topic: str) -> None:
    """Readiness and every way to write name the fix, and nothing is handed over."""
    assert REFUSED in Scenario.ask(f"{process.url}/health/readiness").body["services"]["kafka"]["reason"]
    record = {"value": "refused"}
    for path, body in (
        (f"/producers/{topic}", {"records": [record]}),
        (f"/producers/{topic}", {"records": [record] * 100}),
        ("/transactions", {"topics": [{"topic": topic, "records": [record]}]}),
    ):
        response = Scenario.ask(process.url + path, body)
        assert (response.status, response.body["code"]) == (503, "ERR40012")
        assert REFUSED in response.body["description"]
        assert "retry-after" in response.headers


@pytest.mark.long
def test_a_refused_login_heals(
    short_logins: SecuredCluster, headrace: StartHeadrace, backend: RecordingBackend, tmp_path: Path
) -> None:
    """At the start and later: one line in the log, nothing is written, and consumers resume without a restart."""
    scenario = Scenario(short_logins.cluster.bootstrap_servers, tmp_path)
    topic = f"heals-{uuid.uuid4().hex[:8]}"
    short_logins.cluster.create_topic(topic)
    consumers = {
        f"c{n}": {
            "topics": [topic],
            "group": f"{topic}-{n}",
            "value_format": "json",
            "backend": {"url": backend.url},
            "consumer": {"properties": {"session.timeout.ms": 120_000}},  # no member loses its partitions meanwhile
        }
        for n in range(CONSUMERS)
    }
    settings = {"kafka": short_logins.login()}
    short_logins.set_password("app", "another")
    process = headrace({**settings, "reactive_consumers": consumers}, wait=False)
    ready = f"{process.url}/health/readiness"
    for turn in (1, 2):
        before = 0 if turn == 1 else len(warnings(process))
        short_logins.set_password("app", "another")
        scenario.wait_until(lambda: REFUSED in scenario.ask(ready).body["services"]["kafka"]["reason"], "the refusal")
        assert_refused(process, topic)
        assert_one_line(process, before)
        short_logins.set_password("app", short_logins.security.passwords["app"])
        scenario.wait_until(lambda: scenario.ask(ready).status == 200, "an accepted login")
        response = scenario.ask(f"{process.url}/producers/{topic}", {"records": [{"value": turn}]})
        assert (response.status, response.body["offsets"]) == (200, [{"partition": 0, "offset": turn - 1}])
        scenario.wait_until(lambda turn=turn: backend.accepted_records >= CONSUMERS * turn, "every consumer")
    assert [record.value for record in scenario.records(topic)] == [b"1", b"2"]


@pytest.mark.parametrize("words", ["topics list", "groups describe g", "produce t", "consume t", "doctor"])
def test_commands_end_with_the_fix(kafka_secured: SecuredCluster, tmp_path: Path, words: str) -> None:
    """A refused login is no outage, so they do not wait for the time limit of a request."""
    section = kafka_secured.login("PLAIN")
    section["security"]["sasl"]["password"] = WRONG
    write_file(tmp_path / "headrace.yaml", json.dumps({"kafka": section}).encode(), 0o600)
    scenario = Scenario(kafka_secured.cluster.bootstrap_servers, tmp_path)
    done = scenario.cli(*words.split(), given="v\n", code=1)
    text = " ".join((done.stdout + done.stderr).split())
    assert REFUSED.replace("SCRAM-SHA-512", "PLAIN") in text or words == "doctor"
    assert "user app or its password is wrong" in text
    assert WRONG not in text
