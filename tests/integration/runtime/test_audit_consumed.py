"""What the audit says of what it consumed: an event for each record that ended, none for what did not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.records import Header, OutgoingRecord
from headrace.testing import PlannedResponse

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


def judged(request: Any) -> PlannedResponse:
    """Answer a batch: what says so fails."""
    return PlannedResponse(
        body=[
            {"processed": not entry["value"].get("bad"), "stacktrace": "ValueError: no", "correlationId": "r-1"}
            for entry in request.body
        ]
    )


def test_each_record_that_ended_has_one_event(site: Any, topic: Any, push: Any, backend: Any) -> None:
    """Delivered or a dead letter, with ids of its headers, of its result or of its delivery; and the letter has one."""
    name = topic()
    own: list[Header] = [("X-Correlation-Id", b"c-1"), ("X-Traceability-Id", b"t-1")]
    again: list[Header] = [("headrace.redrive.of", f"{name}:0:77".encode())]
    given: list[tuple[dict[str, Any], list[Header] | None]] = [({"n": 0}, None), ({"n": 1}, own), ({"n": 2}, again)]
    given += [({"n": 3, "bad": True}, None), ({"n": 4, "bad": True}, own)]
    site.write(name, *(OutgoingRecord(name, b"k", json.dumps(v).encode(), h) for v, h in given))
    backend.response = judged
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
    letters = events(site, f"{name}-audit", "PRODUCER")
    assert [(event["topic"], event["offset"], event["auditStatus"]) for event in letters] == [
        (f"{name}.dlq", 0, "SUCCESS"),
        (f"{name}.dlq", 1, "SUCCESS"),
    ]


def test_records_that_wait_in_a_retry_topic_are_noted_when_they_end(
    site: Any, topic: Any, push: Any, backend: Any
) -> None:
    """Under the place they came from, once, also where they only waited behind another of their key."""
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


def test_a_function_is_a_stream(site: Any, topic: Any, headrace: Any, tmp_path: Path) -> None:
    """What it consumed and what it wrote have events of their own types."""
    name, target = topic(), topic()
    site.write_json(name, 0, 1, 2)
    (tmp_path / "work.py").write_text(HANDLER)
    attributes = {"topics": [name], "consumerGroup": f"{name}-work", "outputTopic": target, "attempts": 1}
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


def test_what_is_steered_and_replayed_is_noted(site: Any, topic: Any, push: Any, backend: Any) -> None:
    """Who did it, and the records once more under the job's id."""
    name = topic()
    site.write_json(name, {"n": 0}, {"n": 1})
    process = push(name, more=audited(name), backend={"mode": "status"})
    site.wait_committed(f"{name}-push", name, 2)
    assert site.ask(f"{process.url}/adm/reactive-consumers/{name}/pause", {"reason": "ticket 12"}).status == 200
    assert site.ask(f"{process.url}/adm/reactive-consumers/{name}/resume", {}).status == 200
    replay = {"topic": name, "partition": 0, "offsets": {"start": 0, "end": 1}, "to": {"consumer": name}}
    job = site.ask(f"{process.url}/adm/replays", replay).body["id"]
    site.wait_until(lambda: len(events(site, f"{name}-audit", "REACTIVE_CONSUMER")) == 3, "the event of the replay")
    assert process.terminate() == 0
    found = events(site, f"{name}-audit", "REACTIVE_CONSUMER")
    assert sorted((event["offset"], event.get("replay", "")) for event in found) == [(0, ""), (0, job), (1, "")]
    done = events(site, f"{name}-audit", "CONTROL")
    assert [event["action"] for event in done][:2] == ["pause", "resume"]
    assert done[0]["reason"] == "ticket 12"


def test_a_redrive_over_http_is_noted(site: Any, topic: Any, push: Any, backend: Any) -> None:
    """Who asked for it, the record that was written again, and its delivery under the place it had first."""
    name = topic()
    site.write_json(name, 0)
    backend.response = lambda request: PlannedResponse(fails=lambda record: len(backend.requests) == 1)
    process = push(name, more=audited(name), retry={"attempts": 1})
    site.wait_committed(f"{name}-push", name, 1)
    assert site.ask(f"{process.url}/adm/dead-letters/{name}.dlq/redrive", {}).status == 202
    site.wait_until(lambda: len(events(site, f"{name}-audit", "REACTIVE_CONSUMER")) == 2, "the second delivery")
    assert process.terminate() == 0
    delivered = events(site, f"{name}-audit", "REACTIVE_CONSUMER")
    assert [(n["offset"], n["auditStatus"], n.get("redriveOf")) for n in delivered] == [
        (0, "FAILURE", None),
        (1, "SUCCESS", f"{name}:0:0"),
    ]
    assert [n["topic"] for n in events(site, f"{name}-audit", "PRODUCER")] == [f"{name}.dlq", name]
    assert [n["action"] for n in events(site, f"{name}-audit", "CONTROL")] == ["redrive"]


@pytest.mark.parametrize("to", ["topic", "file"])
def test_a_client_reports_what_became_of_its_records(
    site: Any, topic: Any, headrace: Any, tmp_path: Path, to: str
) -> None:
    """Noted whatever the switches say, and answered; bad input leaves nothing."""
    name = f"{topic()}-audit"
    process = headrace({**site.config, "audit": {"to": to, "records": "none", "topic": name}})
    url = f"{process.url}/consumers/active/audit"
    results = [{"record": {"topic": "orders", "partition": 0, "offset": n}, "processed": not n} for n in range(3)]
    response = site.ask(url, results)
    assert response.status == 200
    refused = site.ask(url, [*results, {"processed": True}])
    assert (refused.status, refused.body["code"], refused.body["metadata"]["index"]) == (400, "ERR30004", 3)
    assert process.terminate() == 0
    if to == "topic":
        found = events(site, name, "ACTIVE_CONSUMER")
    else:
        [file] = tmp_path.rglob("sidecar-audit.log")
        found = [json.loads(line) for line in file.read_text().splitlines()]
    assert found == response.body
    assert [event["auditStatus"] for event in found] == ["SUCCESS", "FAILURE", "FAILURE"]
