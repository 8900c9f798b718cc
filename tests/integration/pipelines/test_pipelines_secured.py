"""Pipelines on a secured cluster: Spark's connector logs in over TLS, and no secret can be seen anywhere."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from confluent_kafka.admin._acl import AclBinding, AclOperation
from confluent_kafka.admin._resource import ResourceType

from headrace_devkit.devcluster.headrace import HeadraceProcess
from headrace_devkit.devcluster.security import allowed
from headrace_devkit.testing import StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import SecuredCluster
from tests.integration.pipelines.test_pipelines import produce, working_below
from tests.least_rights import rows_of

pytestmark = [pytest.mark.heavy, pytest.mark.long]

LIMIT_SECONDS = 240.0
FIRST = "c4nary-one\"\\; ${env:HOME} ='#"
SECOND = "c4nary-two"
COUNTS = """
from headrace_pipelines.processors import Processor, ValueState


class Counts(Processor):
    columns = "id INT, n INT"
    n = ValueState("INT")

    def process(self, key, row):
        self.n.put(self.n.get(0) + 1)
        return {"id": key, "n": self.n.get()}
"""
HTTP_PAGES = ("health/readiness", "metrics", "adm/reactive-consumers", "adm/consumers", "adm/jobs")


def expect_ids(site: Scenario, sink: str, count: int) -> None:
    """Wait until the topic of each flow has this many records, each of its number once."""
    for topic in (sink, *(f"{sink}-{each}" for each in ("exact", "tasks", "counts"))):
        full = lambda topic=topic: len(site.records(topic)) >= count  # noqa: E731
        site.wait_until(full, f"{count} records in {topic}", LIMIT_SECONDS)
        assert sorted(json.loads(record.value or b"")["id"] for record in site.records(topic)) == list(range(count))


def send(servers: str, topic: str, numbers: range) -> None:
    produce(servers, topic, (b'{"id": %d}' % number for number in numbers))


def spark_sees(folder: Path, process: HeadraceProcess) -> Iterator[tuple[str, str]]:
    """Yield everything that shows what a driver does: what it is, and its text."""
    for entry in (Path("/proc", str(pid)) for pid in working_below(folder)):
        yield f"{entry}/cmdline", (entry / "cmdline").read_bytes().decode(errors="replace")
        yield f"{entry}/environ", (entry / "environ").read_bytes().decode(errors="replace")
    for file in folder.rglob("*"):
        if file.is_file() and file.name != "secrets.properties":
            yield str(file), file.read_bytes().decode("latin-1")
    for page in HTTP_PAGES:
        yield page, str(Scenario.ask(f"{process.url}/{page}").body)
    yield "log", process.output


def pipeline(folder: Path, name: str, source: str, sink: str, **more: Any) -> Path:
    """Write a pipeline with a sink of Spark's connector, one of the driver's own transactional producer, one of the
    producers of its tasks, and a processor."""
    file = folder / f"{name}.yaml"
    sources = {"a": {"topic": source, "schema": "id INT"}}
    exact = {"topic": f"{sink}-exact", "delivery": "exactly_once"}
    sinks = {"copy": {"topic": sink}, "exact": exact, "tasks": {**exact, "topic": f"{sink}-tasks", "scope": "task"}}
    flows = {flow: {"sql": "SELECT id FROM a", "sink": each} for flow, each in sinks.items()}
    counts = {"processor": "counts:Counts", "reads": ["a"], "key": "id", "sink": {**exact, "topic": f"{sink}-counts"}}
    flows["counts"] = counts
    (folder / "counts.py").write_text(COUNTS)
    file.write_text(yaml.safe_dump({"name": name, "sources": sources, "flows": flows, **more}))
    return file


def rights_of_the_page(user: str, source: str, sink: str, group: str) -> list[AclBinding]:
    """Return the rights that `docs/security-rights.md` lists for a pipeline with these sinks, for these names."""
    both = ("Pipelines", "Pipelines with exactly-once sinks")
    names = {"orders": source, "weights": f"{sink}*", "headrace.scale.copy": f"{group}*"}
    names |= {"headrace.scale.copy.*": f"{group}*"}
    rows = {row._replace(name=names.get(row.name, row.name), purpose="") for row in rows_of(*both)}
    return [row.binding(user, "") for row in rows]


def test_a_password_is_seen_nowhere_and_changes_without_a_restart(
    kafka_secured: SecuredCluster, headrace: StartHeadrace, tmp_path: Path
) -> None:
    """A user with a strange password and no right but those it needs: rows arrive, the password is in the secrets
    file only. After a new password on both sides, more rows arrive, each once, in the same process."""
    servers, user = kafka_secured.cluster.bootstrap_servers, "hidden"
    source, sink, group, site = "hidden-in", "hidden-out", "headrace.hidden.", Scenario(servers, tmp_path)
    for topic in (source, sink, *(f"{sink}-{each}" for each in ("exact", "tasks", "counts", "counts.dlq"))):
        kafka_secured.cluster.create_topic(topic, 2)
    kafka_secured.set_password(user, FIRST)
    kafka_secured.grant(
        allowed(user, ResourceType.TOPIC, "_headrace", AclOperation.ALL, prefix=True),
        allowed(user, ResourceType.GROUP, "_headrace", AclOperation.ALL, prefix=True),
        *rights_of_the_page(user, source, sink, group),
    )
    send(servers, source, range(100))
    secret = tmp_path / "password"
    secret.write_text(FIRST)
    secret.chmod(0o600)
    kafka = kafka_secured.login("SCRAM-SHA-512", user)
    kafka["security"]["sasl"]["password"] = f"${{file:{secret}}}"
    state = tmp_path / "state"
    file = pipeline(tmp_path, "hidden", source, sink)
    process = headrace(
        {"kafka": kafka, "pipelines": [str(file)], "state_dir": str(state)}, env={"KAFKA_PASSWORD": FIRST}
    )
    expect_ids(site, sink, 100)
    folder = state / "pipelines" / "hidden"
    secrets = folder / "secrets.properties"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    assert "c4nary" in secrets.read_text().encode().decode("unicode_escape")
    assert len(working_below(folder)) >= 4  # with the daemon of the workers and a worker
    for where, text in spark_sees(folder, process):
        assert "c4nary" not in text, where
    kafka_secured.set_password(user, SECOND)
    draft = tmp_path / "draft"
    draft.write_text(SECOND)
    draft.chmod(0o600)
    draft.replace(secret)
    site.wait_until(lambda: "restarting its driver" in process.output, "another driver", LIMIT_SECONDS)
    send(servers, source, range(100, 200))
    expect_ids(site, sink, 200)
    for where, text in spark_sees(folder, process):
        assert SECOND not in text, where
    assert process.terminate() == 0
    assert not secrets.exists()


def test_tokens_are_enough_for_spark(kafka_secured: SecuredCluster, headrace: StartHeadrace, tmp_path: Path) -> None:
    """Source and sinks connect with tokens of a server whose authority only the file has."""
    servers, source, sink = kafka_secured.cluster.bootstrap_servers, "in-token", "out-token"
    kafka_secured.cluster.create_topic(source, 1)
    send(servers, source, range(10))
    file = pipeline(tmp_path, "copies", source, sink, trigger={"once": True})
    kafka = kafka_secured.login("OAUTHBEARER")
    headrace({"kafka": kafka, "pipelines": [str(file)], "state_dir": str(tmp_path / "state")})
    expect_ids(Scenario(servers, tmp_path), sink, 10)
