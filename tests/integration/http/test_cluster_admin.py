"""Topics, groups and the cluster over HTTP, on a real broker: what an administrator does, and what is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
import yaml

from headrace_devkit.testing import Cluster, HeadraceProcess, MakeTopic, SharedHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import Response, send

SCOPES = {"ops": ["admin"], "ann": ["consume:test-*", "group:test-*"]}
PRINCIPALS = {name: {"token": f"{name:->16}", "scopes": scopes} for name, scopes in SCOPES.items()}
Ask = Callable[..., Response]


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("audit") / "audit.log"


@pytest.fixture(scope="module")
def process(kafka: Cluster, module_headrace: SharedHeadrace, audit: Path) -> HeadraceProcess:
    more = {"security": {"mode": "token", "principals": PRINCIPALS}, "audit": {"file": str(audit)}}
    return module_headrace({"kafka": {"bootstrap_servers": kafka.bootstrap_servers}, **more})  # type: ignore[no-any-return]


@pytest.fixture
def ask(process: HeadraceProcess) -> Ask:
    def ask(method: str, path: str, body: Any = None, by: str = "ops") -> Response:
        return send(method, process.url + path, body, {"Authorization": f"Bearer {by:->16}"})

    return ask


@pytest.fixture
def group(kafka: Cluster, topic: MakeTopic, site: Scenario) -> Iterator[tuple[str, str]]:
    """A topic of two partitions with ten records each, and a group that has committed 4 of each."""
    name = topic(2)
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in range(10):
        for partition in (0, 1):
            producer.produce(name, b"v", partition=partition, timestamp=1_000_000 + number)
    producer.flush()
    consumer = confluent_kafka.Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": f"{name}-g"})
    consumer.commit(offsets=[confluent_kafka.TopicPartition(name, p, 4) for p in (0, 1)], asynchronous=False)
    yield name, f"{name}-g"
    consumer.close()


def test_a_topic_is_created_described_changed_and_deleted(ask: Ask, topic: MakeTopic, audit: Path) -> None:
    """Each change has a preview that changes nothing, and only the change itself is audited."""
    name = f"{topic()}-made"
    create = {"name": name, "partitions": 2, "configs": {"retention.ms": 864000000, "min.cleanable.dirty.ratio": 0.1}}
    assert ask("POST", "/topics", {**create, "dry_run": True}).status == 200
    assert ask("GET", f"/topics/{name}").code == "ERR40006"
    assert ask("POST", "/topics", create).status == 201
    again = ask("POST", "/topics", create)
    assert (again.status, "already exists" in again.body["description"]) == (400, True)
    assert name in ask("GET", "/topics", by="ann").body
    shown = ask("GET", f"/topics/{name}", by="ann").body
    assert [one["replicas"] for one in shown["partitions"]] == [[{"broker": 1, "leader": True, "in_sync": True}]] * 2
    assert (shown["replication_factor"], shown["under_replicated"], shown["records"]) == (1, 0, 0)
    assert shown["configs"]["retention.ms"] == "864000000"
    change = {"configs": {"retention.ms": None, "cleanup.policy": "compact"}, "partitions": 3}
    preview = ask("PATCH", f"/topics/{name}", {**change, "dry_run": True}).body
    assert [(one["what"], one["before"], one["after"]) for one in preview["changes"]] == [
        ("config retention.ms", "864000000", None),
        ("config cleanup.policy", "delete", "compact"),
        ("partitions", 2, 3),
    ]
    assert ask("GET", f"/topics/{name}").body == shown
    assert ask("PATCH", f"/topics/{name}", change).body == {**preview, "dry_run": False}
    end = time.monotonic() + 30  # the controller has the change before each broker
    while True:
        configs = {one["name"]: one for one in ask("GET", f"/topics/{name}/configs").body["configs"]}
        if configs["cleanup.policy"]["value"] == "compact" or time.monotonic() > end:
            break
    assert (configs["cleanup.policy"]["value"], configs["cleanup.policy"]["source"]) == (
        "compact",
        "dynamic_topic_config",
    )
    assert configs["retention.ms"]["is_default"] is True
    assert ask("PATCH", f"/topics/{name}", change).body["changes"] == []
    for confirm in ("", "?confirm=", f"?confirm={name}x"):
        assert ask("DELETE", f"/topics/{name}{confirm}").code == "ERR11004"
    assert ask("DELETE", f"/topics/{name}?confirm={name}", by="ann").status == 403
    assert ask("DELETE", f"/topics/{name}?confirm={name}").status == 204
    assert ask("DELETE", f"/topics/{name}?confirm={name}").code == "ERR40006"
    made = [f"{verb} topic" for verb in ("create", "alter", "delete") for _ in range(2)]
    assert actions(audit, name, len(made)) == made


def actions(audit: Path, target: str, count: int) -> list[str]:
    """Return the actions of audit events, without their values, once there are so many."""
    end = time.monotonic() + 30
    while True:
        events = [json.loads(line) for line in audit.read_text().splitlines()]
        found = [event["action"].partition(" {")[0] for event in events if event.get("target") == target]
        if len(found) >= count or time.monotonic() > end:
            return found


def test_what_is_wrong_is_refused_with_what_to_do(ask: Ask, group: tuple[str, str]) -> None:
    """Nothing of it reaches the topic or the group."""
    name, named = group
    before = ask("GET", f"/topics/{name}").body, ask("GET", f"/groups/{named}").body
    for method, path, body, status, says in yaml.safe_load(Path(__file__).with_name("cluster_admin.yaml").read_text()):
        text = json.dumps(body).replace('"T"', f'"{name}"')
        found = ask(method, path.replace("/T", f"/{name}").replace("/G/", f"/{named}/"), json.loads(text))
        assert (found.status, says in found.body["description"]) == (status, True), (method, path, found.body)
    assert (ask("GET", f"/topics/{name}").body, ask("GET", f"/groups/{named}").body) == before


def test_offsets_are_reset_in_every_form(ask: Ask, group: tuple[str, str], audit: Path) -> None:
    """Forms: earliest, latest, offset, time, shift; within the log; a preview sets nothing."""
    name, named = group
    for request, expected in (
        ({"to": "earliest"}, 0),
        ({"to": "latest"}, 10),
        ({"shift": -3}, 7),
        ({"offset": 5}, 5),
        ({"time": 1_000_002}, 2),
        ({"time": "2h"}, 10),
        ({"shift": -1000}, 0),
        ({"offset": 99}, 10),
    ):
        before = ask("GET", f"/groups/{named}", by="ann").body
        preview = ask("POST", f"/groups/{named}/offsets", {**request, "dry_run": True}).body
        assert ask("GET", f"/groups/{named}").body == before
        done = ask("POST", f"/groups/{named}/offsets", request).body
        assert done == {**preview, "dry_run": False}
        assert {one["after"] for one in done["offsets"]} == {expected}
        shown = ask("GET", f"/groups/{named}").body
        assert [(one["committed"], one["lag"]) for one in shown["offsets"]] == [(expected, 10 - expected)] * 2
    one = ask("POST", f"/groups/{named}/offsets", {"to": "earliest", "topic": name, "partitions": [1]}).body["offsets"]
    assert one == [{"topic": name, "partition": 1, "before": 10, "after": 0, "lag": 10}]
    assert actions(audit, f"group {named}", 9) == ["reset offsets"] * 9
    assert ask("POST", f"/groups/{named}/offsets", {"to": "earliest"}, by="ann").status == 403


def test_a_group_with_members_keeps_its_offsets(
    ask: Ask, group: tuple[str, str], kafka: Cluster, site: Scenario
) -> None:
    """It is shown with its members and their partitions; a reset is 409, and a preview says how many there are."""
    name, named = group
    consumer = confluent_kafka.Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": named})
    consumer.subscribe([name])
    site.wait_until(lambda: consumer.poll(0.2) and consumer.assignment(), "its assignment")
    shown = ask("GET", f"/groups/{named}").body
    assert (shown["state"], shown["members"][0]["partitions"]) == ("stable", [f"{name}-0", f"{name}-1"])
    refused = ask("POST", f"/groups/{named}/offsets", {"to": "earliest"})
    assert (refused.status, "1 active member" in refused.body["description"]) == (409, True)
    assert ask("POST", f"/groups/{named}/offsets", {"to": "earliest", "dry_run": True}).body["members"] == 1
    consumer.close()
    assert named in [one["group"] for one in ask("GET", "/groups", by="ann").body["groups"]]


def test_the_command_asks_for_the_name_again(site: Scenario, topic: MakeTopic) -> None:
    """Another name, or none, deletes nothing; an internal topic is not even asked for."""
    name = topic()
    for given in ("y\n", f"{name}x\n", f"{name.upper()}\n"):
        assert "was not deleted" in site.cli("topics", "delete", name, given=given, code=1).stderr
    assert name in site.cli("topics", "list").stdout
    refused = site.cli("topics", "delete", "__consumer_offsets", given="__consumer_offsets\n", code=None)
    assert refused.returncode and "internal" in refused.stderr
    site.cli("topics", "delete", name, given=f"{name}\n")
    site.wait_until(lambda: name not in site.cli("topics", "list").stdout, "the end of the topic")
