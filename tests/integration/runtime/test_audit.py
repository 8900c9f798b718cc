"""The audit of requests."""

from __future__ import annotations

import json

from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import send

TOKENS = {"loader": "kafka:w", "reader": "kafka:r"}
PRINCIPALS = {name: {"token": f"${{env:{name}}}", "scopes": [scope]} for name, scope in TOKENS.items()}
BODY = {"records": [{"key": "k", "value": {"card": "4111"}, "correlationId": f"c-{n}"} for n in range(3)]}


def produce(url: str, name: str) -> int:
    return send("POST", url, BODY, {"Authorization": f"Bearer {name:->16}"}).status


def test_records_and_refusals_have_events_in_a_topic(site: Scenario, topic: MakeTopic, headrace: StartHeadrace) -> None:
    """One event per record with its place, the correlation id as key; one per refusal; no value, no token."""
    name, audit = topic(), f"{topic()}-audit"
    config = {**site.config, "security": {"mode": "token", "principals": PRINCIPALS}}
    env = {name: f"{name:->16}" for name in TOKENS}
    process = headrace({**config, "audit": {"to": "topic", "records": "all", "topic": audit}}, env=env)
    assert produce(f"{process.url}/producers/{name}", "loader") == 200
    assert produce(f"{process.url}/producers/{name}", "reader") == 403
    assert produce(f"{process.url}/producers/{name}", "stranger") == 401
    process.terminate()
    events = site.records(audit)
    found = {event.key or b"": json.loads(event.value) for event in events if b"PRODUCER" in event.value}
    assert sorted(found) == [b"c-0", b"c-1", b"c-2"]
    assert {(n["auditStatus"], n["caller"], n["topic"], n["correlationId"]) for n in found.values()} == {
        ("SUCCESS", "loader", name, f"c-{number}") for number in range(3)
    }
    assert [found[f"c-{number}".encode()]["offset"] for number in range(3)] == [0, 1, 2]
    refused = [json.loads(event.value) for event in events if b"ACCESS" in event.value]
    assert [(n.get("caller", ""), n["action"], n["auditStatus"], n["stacktrace"][:8]) for n in refused] == [
        ("reader", f"POST /producers/{name}", "DENIED", "ERR10005"),
        ("", f"POST /producers/{name}", "DENIED", "ERR10000"),
    ]
    text = b"".join(event.value for event in events)
    assert b"4111" not in text
    assert b"----" not in text
