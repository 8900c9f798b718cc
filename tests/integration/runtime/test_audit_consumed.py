"""The audit of consumed records: one event for each completed record, and none for others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from headrace.records import Header, OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

HANDLER = """
def handler(context, event):
    if event.offset == 1:
        raise ValueError("poison")
    return {"offset": event.offset}
"""


def audited(topic: str) -> dict[str, Any]:
    """Return the sections of a process that audits every record in a topic, named after the one that it consumes."""
    audit = {"to": "topic", "records": "all", "topic": f"{topic}-audit"}
    return {"audit": audit, "control": {"topic": f"_headrace-control-{topic}"}}


def events(site: Any, topic: str, kind: str) -> list[Any]:
    """Return the events of one type."""
    return [event for record in site.records(topic) if (event := json.loads(record.value))["auditType"] == kind]


def by_value(request: Any) -> PlannedResponse:
    """Fail the records whose value is bad."""
    return PlannedResponse(
        body=[
            {"processed": not entry["value"].get("bad"), "stacktrace": "ValueError: no", "correlationId": "r-1"}
            for entry in request.body
        ]
    )


def test_each_completed_record_has_one_event(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """Delivered or a dead letter, with ids of its headers, of its result or of its delivery; and each dead letter."""
    name = topic()
    own: list[Header] = [("X-Correlation-Id", b"c-1"), ("X-Traceability-Id", b"t-1")]
    again: list[Header] = [("headrace.redrive.of", f"{name}:0:77".encode())]
    given: list[tuple[dict[str, Any], list[Header] | None]] = [({"n": 0}, None), ({"n": 1}, own), ({"n": 2}, again)]
    given += [({"n": 3, "bad": True}, None), ({"n": 4, "bad": True}, own)]
    site.write(name, *(OutgoingRecord(name, b"k", json.dumps(v).encode(), h) for v, h in given))
    backend.response = by_value
    # The first response is a whole batch that fails: it is rolled back, and leaves no event.
    backend.script.append(PlannedResponse(fails=lambda record: True))
    process = push(name, more=audited(name), retry={"rollback_threshold_percent": 50})
    site.wait_committed(f"{name}-push", name, 5)
    assert process.terminate() == 0
    found = sorted(events(site, f"{name}-audit", "REACTIVE_CONSUMER"), key=lambda event: event["offset"])
    assert [(event["offset"], event["auditStatus"], event["correlationId"]) for event in found] == [
        (0, "SUCCESS", f"{name}-push:{name}:0:0"),
        (1, "SUCCESS", "c-1"),
        (2, "SUCCESS", f"{name}-push:{name}:0:77"),
        (3, "FAILURE", "r-1"),
        (4, "FAILURE", "c-1"),
    ]
    assert {(event["group"], event["topic"], event["partition"]) for event in found} == {(f"{name}-push", name, 0)}
    assert [event.get("traceabilityId") for event in found] == [None, "t-1", None, None, "t-1"]
    assert found[2]["redriveOf"] == f"{name}:0:77"
    assert found[3]["reason"] == "dead letter: ValueError"
    dead_letters = events(site, f"{name}-audit", "PRODUCER")
    assert [(event["topic"], event["offset"], event["auditStatus"]) for event in dead_letters] == [
        (f"{name}.dlq", 0, "SUCCESS"),
        (f"{name}.dlq", 1, "SUCCESS"),
    ]


def test_a_record_of_a_retry_topic_has_its_event_when_it_is_completed(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """Once, with its first position, also if it only waited for another record of its key."""
    name = topic()
    site.write(name, *(OutgoingRecord(name, b"k", b'{"bad":%s}' % bad, None, 0) for bad in (b"true", b"false")))
    calls: Counter[int] = Counter()

    def answer(request: Any) -> PlannedResponse:
        calls.update(entry["offset"] for entry in request.body)
        return PlannedResponse(body=[{"processed": entry["offset"] == 1 or calls[0] > 1} for entry in request.body])

    backend.response = answer
    retry = {"attempts": 1, "topics": [1], "keep_key_order": True}
    process = push(name, more=audited(name), ordering="key", batch={"max_records": 1}, retry=retry)
    site.wait_until(lambda: len(events(site, f"{name}-audit", "REACTIVE_CONSUMER")) >= 2, "both events")
    assert process.terminate() == 0
    found = events(site, f"{name}-audit", "REACTIVE_CONSUMER")
    assert sorted((event["topic"], event["offset"], event["auditStatus"]) for event in found) == [
        (name, 0, "SUCCESS"),
        (name, 1, "SUCCESS"),
    ]


def test_a_function_has_events_of_its_own_types(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path
) -> None:
    """`STREAMING_CONSUMER` for its input, and `STREAMING_PRODUCER` for its output."""
    name, target = topic(), topic()
    site.write_json(name, 0, 1, 2)
    (tmp_path / "work.py").write_text(HANDLER)
    attributes = {"topics": [name], "consumerGroup": f"{name}-work", "outputTopic": target, "retry": {"attempts": 1}}
    trigger = {"kind": "kafka-cluster", "numWorkers": 1, "attributes": attributes}
    spec = {"handler": "work:handler", "triggers": {"in": trigger}}
    (tmp_path / "function.yaml").write_text(yaml.safe_dump({"metadata": {"name": "work"}, "spec": spec}))
    process = headrace({**site.config, **audited(name), "functions": [str(tmp_path / "function.yaml")]})
    site.wait_committed(f"{name}-work", name, 3)
    assert process.terminate() == 0
    consumed = events(site, f"{name}-audit", "STREAMING_CONSUMER")
    assert sorted((event["offset"], event["auditStatus"]) for event in consumed) == [
        (0, "SUCCESS"),
        (1, "FAILURE"),
        (2, "SUCCESS"),
    ]
    written = events(site, f"{name}-audit", "STREAMING_PRODUCER")
    assert [(event["topic"], event["auditStatus"]) for event in written] == [(target, "SUCCESS")] * 2
    assert [event["topic"] for event in events(site, f"{name}-audit", "PRODUCER")] == [f"{name}.dlq"]


def test_replays_redrives_and_control_operations_have_events(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """A replay has its job's id, a redriven record its first position, and each operation its caller's reason."""
    name = topic()
    site.write_json(name, {"n": 0}, {"n": 1})
    backend.response = PlannedResponse(fails=lambda record: record["offset"] == 1)
    process = push(name, more=audited(name), retry={"attempts": 1})
    site.wait_committed(f"{name}-push", name, 2)
    assert site.ask(f"{process.url}/adm/reactive-consumers/{name}/pause", {"reason": "ticket 12"}).status == 200
    assert site.ask(f"{process.url}/adm/reactive-consumers/{name}/resume", {}).status == 200
    replay = {"topic": name, "partition": 0, "first": 0, "last": 0, "to": {"consumer": name}}
    job = site.ask(f"{process.url}/adm/replays", replay).body["id"]
    assert site.ask(f"{process.url}/adm/dead-letters/{name}.dlq/redrive", {}).status == 202
    site.wait_until(lambda: len(events(site, f"{name}-audit", "REACTIVE_CONSUMER")) == 4, "both deliveries")
    assert process.terminate() == 0
    found = events(site, f"{name}-audit", "REACTIVE_CONSUMER")
    assert sorted((n["offset"], n["auditStatus"], n.get("replay", ""), n.get("redriveOf")) for n in found) == [
        (0, "SUCCESS", "", None),
        (0, "SUCCESS", job, None),
        (1, "FAILURE", "", None),
        (2, "SUCCESS", "", f"{name}:0:1"),
    ]
    assert [n["topic"] for n in events(site, f"{name}-audit", "PRODUCER")] == [f"{name}.dlq", name]
    done = events(site, f"{name}-audit", "CONTROL")
    assert [event["action"] for event in done] == ["pause", "resume", "replay", "redrive"]
    assert done[0]["reason"] == "ticket 12"
