"""Consumers that teams register in running processes: they come, change, go, and leave the others alone."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import Response, send
from yaml_table import table

PLACE = "/reactive-consumers"


SECURITY: dict[str, Any] = {
    "mode": "token",
    "principals": {
        "ann": {"token": "${env:ANN}", "scopes": ["consumers:w", "consume:test-*", "group:test-*"]},
        "bob": {"token": "${env:BOB}", "scopes": ["consumers:w", "kafka:r"]},
        "eve": {"token": "${env:EVE}", "scopes": ["consumers:r", "kafka:r"]},
        "ops": {"token": "${env:OPS}", "scopes": ["admin"]},
    },
}


def token_of(name: str) -> str:
    return "-".join([name] * 5)


def by(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token_of(name)}"}


def ask(process: HeadraceProcess, method: str, path: str, body: Any = None, **headers: str) -> Response:
    return send(method, f"{process.url}{path}", body, headers)


class Deployment:
    """Processes that share a control table."""

    def __init__(self, site: Any, headrace: Callable[..., HeadraceProcess], backend: Any) -> None:
        self.site, self.backend = site, backend
        self._headrace = headrace
        self.table = f"_headrace-control-{uuid.uuid4().hex[:12]}"
        self.list = [backend.url.rpartition("/")[0] + "/"]

    def start(self, *, backends: list[str] | None = None, **more: Any) -> HeadraceProcess:
        """Add a process; what is not named has its default."""
        registrations = {"backends": backends or self.list, **more.pop("registrations", {})}
        config = {**self.site.config, "control": {"topic": self.table}, "registrations": registrations, **more}
        return self._headrace(config, env={who.upper(): token_of(who) for who in SECURITY["principals"]})

    def consumer(self, topic: str, **more: Any) -> dict[str, Any]:
        """Return settings of a consumer of a topic."""
        return {
            "topics": [topic],
            "group": f"{topic}-group",
            "backend": {"url": self.backend.url},
            "consumer": {"properties": {"session.timeout.ms": 3000}},
            **more,
        }

    def wait_state(self, process: HeadraceProcess, name: str, state: str, why: str = "", **who: str) -> dict[str, Any]:
        """Wait until a process says so of a consumer."""
        seen: dict[str, Any] = {}

        def reached() -> bool:
            said = ask(process, "GET", f"{PLACE}/{name}", **who)
            seen.update(said.body)
            return said.status == 200 and said.body["state"] == state and why in said.body.get("why", "")

        self.site.wait_until(reached, f"{name} to be {state}: {why}")
        return seen


@pytest.fixture
def deployment(site: Scenario, headrace: StartHeadrace, backend: RecordingBackend) -> Deployment:
    return Deployment(site, headrace, backend)


def test_registered_changed_disabled_removed(deployment: Deployment, topic: MakeTopic) -> None:
    """Records arrive, a change loses none, and who comes back goes on where the group was."""
    site, backend, name = deployment.site, deployment.backend, topic()
    group = f"{name}-group"
    process = deployment.start()
    assert ask(process, "GET", PLACE).body == {"consumers": []}
    site.write_json(name, *range(10))
    settings = deployment.consumer(name)
    first = ask(process, "PUT", f"{PLACE}/x", settings)
    assert (first.status, first.body["owner"], first.body["settings"]) == (201, "anonymous", settings)
    site.wait_committed(group, name, 10)
    assert deployment.wait_state(process, "x", "running")["version"] == first.body["version"]
    status = ask(process, "GET", "/adm/reactive-consumers/x").body
    assert (status["owner"], status["group"], status["topics"]) == ("anonymous", group, [name])
    assert 'consumer="x"' in site.ask(f"{process.url}/metrics").body

    changed = ask(process, "PUT", f"{PLACE}/x", {**settings, "batch": {"max_records": 1}})
    assert (changed.status, changed.body["version"] > first.body["version"]) == (200, True)
    bodies: list[Any] = [[], 1, {**settings, "backends": {}}]
    for body in bodies:
        assert ask(process, "PUT", f"{PLACE}/x", body).body["code"] == "ERR11004"
    secret = {"url": f"{backend.url}?code=hush", "headers": {"X-A": "hush"}}
    shy = deployment.consumer(topic(), backend=secret)
    assert "hush" not in str(ask(process, "PUT", f"{PLACE}/y", shy).body)
    assert "hush" not in str([ask(process, "GET", place).body for place in (f"{PLACE}/y", "/adm/reactive-consumers/y")])
    assert ask(process, "DELETE", f"{PLACE}/y").status == 200
    site.write_json(name, *range(10))
    site.wait_committed(group, name, 20)
    assert {len(request.body) for request in backend.requests[-10:]} == {1}

    assert ask(process, "PUT", f"{PLACE}/x", {**settings, "enabled": False}).status == 200
    deployment.wait_state(process, "x", "disabled")
    site.wait_until(lambda: "x" not in names_of(process), "the consumer to be gone")
    site.write_json(name, *range(5))
    assert ask(process, "PUT", f"{PLACE}/x", settings).status == 200
    site.wait_committed(group, name, 25)

    assert ask(process, "DELETE", f"{PLACE}/x").body == {"name": "x"}
    assert [ask(process, method, f"{PLACE}/x").status for method in ("GET", "DELETE")] == [404, 404]
    site.wait_until(lambda: "x" not in names_of(process), "the consumer to be gone")

    def numbers() -> str:
        lines = site.ask(f"{process.url}/metrics").body.splitlines()
        return "\n".join(line for line in lines if 'consumer="x"' in line or "headrace_consumer_lag" in line)

    site.wait_until(lambda: 'consumer="x"' not in numbers() and group not in numbers(), "its numbers to be gone")
    assert site.committed(group)[(name, 0)] == 25
    assert list(dict.fromkeys(record["offset"] for record in backend.accepted)) == list(range(25))
    assert process.terminate() == 0


def names_of(process: HeadraceProcess) -> list[str]:
    return [one["name"] for one in ask(process, "GET", "/adm/reactive-consumers").body["consumers"]]


REFUSED: list[tuple[str, str, dict[str, Any], int, str]] = table(__file__, "refused")


def test_owners_are_apart(deployment: Deployment, topic: MakeTopic, tmp_path: Path) -> None:
    """What is another's is missing; names, topics in a group and places are given once; scopes count."""
    name, other = topic(), topic()
    process = deployment.start(security=SECURITY)
    settings = deployment.consumer(name)

    def put(who: str, what: str, body: Any) -> tuple[int, str]:
        response = ask(process, "PUT", f"{PLACE}/{what}", body, **by(who))
        return response.status, response.body.get("code", "")

    assert put("ann", "x", settings) == (201, "")
    for who, what, changes, status, code in REFUSED:
        body = json.dumps({**deployment.consumer(other), **changes})
        body = body.replace("{topic}", name).replace("{backend}", deployment.backend.url)
        assert put(who, what, json.loads(body)) == (status, code), (who, changes)
    assert put("bob", "y", deployment.consumer(other)) == (201, "")

    def seen(who: str, path: str) -> list[str]:
        return [one["name"] for one in ask(process, "GET", path, **by(who)).body["consumers"]]

    expected = {"ann": ["x"], "bob": ["y"], "eve": [], "ops": ["x", "y"]}
    assert {who: seen(who, PLACE) for who in expected} == expected
    deployment.wait_state(process, "x", "running", **by("ann"))
    deployment.wait_state(process, "y", "running", **by("bob"))
    assert (seen("ann", "/adm/reactive-consumers"), seen("ops", "/adm/reactive-consumers")) == (["x"], ["x", "y"])
    foreign, missing = (ask(process, "GET", f"{PLACE}/{name}", **by("ann")) for name in ("y", "never"))
    assert (foreign.status, foreign.body["description"].replace("y ", "never ")) == (404, missing.body["description"])
    assert ask(process, "GET", "/adm/reactive-consumers/y", **by("ann")).status == 404
    assert ask(process, "POST", "/adm/reactive-consumers/y/pause", {}, **by("ann")).status == 404
    assert ask(process, "POST", "/adm/reactive-consumers/x/pause", {"reason": "r"}, **by("eve")).status == 403
    assert ask(process, "POST", "/adm/reactive-consumers/x/pause", {"reason": "r"}, **by("ann")).status == 200
    assert ask(process, "DELETE", f"{PLACE}/y", **by("ann")).status == 404
    assert ask(process, "DELETE", f"{PLACE}/y", **by("ops")).status == 200
    assert ask(process, "DELETE", f"{PLACE}/x", **by("ann")).status == 200
    assert seen("ops", PLACE) == []
    # The one who comes next under this name is not paused.
    assert put("bob", "x", settings) == (201, "")
    deployment.site.write_json(name, 1)
    deployment.site.wait_committed(f"{name}-group", name, 1)
    asleep = [{**settings, "group": f"{name}-{n}", "enabled": False} for n in range(21)]
    assert [put("ann", f"more-{n}", one) for n, one in enumerate(asleep)] == [(201, "")] * 20 + [(429, "ERR40062")]
    assert process.terminate() == 0
    lines = (tmp_path / "headrace-0/.headrace/sidecar-audit.log").read_text().splitlines()
    events = [event for event in map(json.loads, lines) if event["auditType"] == "CONTROL"]
    found = {(event["caller"], event["action"], event["target"], event["auditStatus"]) for event in events}
    assert found >= {
        ("ann", "register", "reactive x", "SUCCESS"),
        ("bob", "register", "reactive x", "FAILURE"),
        ("ops", "unregister", "reactive y", "SUCCESS"),
    }


def has(process: HeadraceProcess) -> int:
    said = ask(process, "GET", "/adm/reactive-consumers/x")
    return int(said.body["partitionsAssigned"]) if said.status == 200 else -1


def write(site: Any, topic: str, count: int) -> None:
    site.write(topic, *(OutgoingRecord(topic, b"k", b"1", None, p) for p in (0, 1) for _ in range(count)))
