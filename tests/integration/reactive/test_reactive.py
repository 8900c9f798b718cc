"""Reactive consumers in a running process: every record ends once and in order, whatever the backend does."""

import json
import signal
from collections.abc import Callable
from typing import Any

import pytest

from headrace.records import Header, OutgoingRecord, TopicPartition
from headrace_devkit.testing import HeadraceProcess, MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

EVENT = {"specversion": b"1.0", "id": b"e 1", "source": b"/shop", "type": b"sold"}


def offsets(records: list[dict[str, Any]]) -> list[int]:
    return [record["offset"] for record in records]


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_every_other_mode_delivers_every_record(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend
) -> None:
    """One record per request, and CloudEvents in both ways: order, identity, trace, tombstones and events."""
    name = topic()
    attributes: list[Header] = [(f"ce_{n}", v) for n, v in EVENT.items()]
    site.write(
        name,
        OutgoingRecord(name, "\u00e4 1".encode(), b'{"n": 0}', [("traceparent", PARENT.encode()), ("raw", b"\xff\n")]),
        OutgoingRecord(name, b"k", None),
        OutgoingRecord(name, None, b"[2]", [*attributes, ("content-type", b"application/json")]),
    )
    modes = ["single", "cloudevents_structured", "cloudevents_binary"]
    consumers = {
        mode: {
            "topics": [name],
            "group": f"{name}-{mode}",
            "backend": {"url": backend.url.replace("/kafka/records", f"/{mode}"), "mode": mode},
        }
        for mode in modes
    }
    headrace({**site.config, "reactive_consumers": consumers})
    for mode in modes:
        site.wait_committed(f"{name}-{mode}", name, 3)
    plain = {n: v.decode() for n, v in EVENT.items()}
    bodies = {}
    for mode in modes:
        sent = {r.headers["idempotency-key"]: r for r in backend.requests if r.path == f"/{mode}"}
        assert sorted(sent) == [f"{name}-{mode}:{name}:0:{n}" for n in range(3)]
        bodies[mode] = [sent[key].body for key in sorted(sent)]
        heads = [sent[key].headers for key in sorted(sent)]
        assert [head.get("x-headrace-tombstone") for head in heads] == [None, "true", None]
        assert [head.get("x-headrace-key") for head in heads] == ["%C3%A4%201", "k", None]
        assert (heads[0]["traceparent"], json.loads(heads[0]["x-headrace-headers"])[1]) == (PARENT, ["raw", "/wo="])
        if mode == "cloudevents_binary":
            assert {n: heads[2][f"ce-{n}"] for n in EVENT} == {**plain, "id": "e%201"}
    assert bodies["single"] == bodies["cloudevents_binary"] == [{"n": 0}, None, [2]]
    structured = bodies["cloudevents_structured"]
    assert [event.get("data") for event in structured] == [{"n": 0}, None, [2]]
    assert structured[2] == {**plain, "datacontenttype": "application/json", "data": [2]}


def test_a_failed_record_is_retried_alone_and_becomes_a_dead_letter(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """The way of a bad record: attempts, dead letter byte for byte, redrive under the same delivery id."""
    name = topic()
    own = [("trace", b"\x00\xff"), ("trace", None), ("a", b"")]
    site.write(name, *(OutgoingRecord(name, b"k\xfe%d" % n, b'{"n": %d}' % n, own) for n in range(5)))
    backend.response = PlannedResponse(fails=lambda record: record["value"]["n"] in (1, 3))
    push(name, key_format="binary", retry={"attempts": 3, "first_delay_seconds": 0.05})
    site.wait_committed(f"{name}-push", name, 5)
    assert offsets(backend.accepted) == [0, 2, 4]
    first = backend.requests[0]
    assert (first.path, first.headers["content-type"]) == ("/kafka/records", "application/json")
    tries = [(entry["offset"], entry["attempt"]) for entry in backend.records if entry["offset"] in (1, 3)]
    assert tries == [(offset, attempt) for attempt in (1, 2, 3) for offset in (1, 3)]

    dead_letters = site.records(f"{name}.dlq")
    assert [(dead.key, dead.value) for dead in dead_letters] == [(b"k\xfe1", b'{"n": 1}'), (b"k\xfe3", b'{"n": 3}')]
    for dead in dead_letters:
        assert dead.headers[:3] == own
        history = dict(dead.headers[3:])
        assert history["headrace.dlq.attempts"] == b"3"
        assert history["headrace.dlq.error"] == b"not processed"
        assert history["headrace.dlq.offset"] in (b"1", b"3")

    backend.response = PlannedResponse()
    said = site.cli("dlq", "redrive", f"{name}.dlq").stdout
    assert said == f"2 dead letters of {name}.dlq back and acknowledged: 2 to {name}\n"
    site.wait_committed(f"{name}-push", name, 7)
    again = backend.accepted[3:]
    assert offsets(again) == [5, 6]
    assert [entry["deliveryId"] for entry in again] == [f"{name}-push:{name}:0:{first}" for first in (1, 3)]
    assert [entry["attempt"] for entry in again] == [1, 1]
    assert site.cli("groups", "describe", f"{name}-push").stdout.splitlines()[1].split()[-1] == "0"


def test_sigterm_finishes_what_is_in_flight_and_commits_it(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """What is at the backend ends and is committed, nothing comes twice, and the exit code is 0."""
    name = topic()
    site.write_json(name, *range(20))
    backend.response = PlannedResponse(delay_seconds=600)
    process = push(name, alone=True, batch={"max_records": 5})
    backend.wait_for(lambda b: len(b.requests) == 1)
    process.server.ask_to_stop()
    site.wait_until(lambda: site.ask(f"{process.url}/health/readiness").status == 503, "the drain")
    backend.response = PlannedResponse()
    backend.release()
    site.wait_until(lambda: process.exit_code is not None, "the end")
    assert process.exit_code == 0
    assert site.committed(f"{name}-push") == {TopicPartition(name, 0): len(backend.accepted)}
    assert "in_flight_at_revoke" not in process.output
    push(name, alone=True)
    backend.wait_for(lambda b: len(b.accepted) == 20)
    assert offsets(backend.accepted) == list(range(20))


@pytest.mark.parametrize("drain_seconds", [1, 600])
def test_a_drain_ends_at_its_limit_or_with_a_second_sigterm(
    site: Scenario,
    topic: MakeTopic,
    push: Callable[..., HeadraceProcess],
    backend: RecordingBackend,
    drain_seconds: int,
) -> None:
    """What is in flight is abandoned, not committed, and counted in the log; so it comes again."""
    name = topic()
    site.write_json(name, 1)
    backend.response = PlannedResponse(delay_seconds=600)
    process = push(name, more={"drain_seconds": drain_seconds})
    backend.wait_for(lambda b: len(b.requests) == 1)
    process.server.signal(signal.SIGTERM)
    if drain_seconds > 1:
        site.wait_until(lambda: site.ask(f"{process.url}/health/readiness").status == 503, "the drain")
        process.server.signal(signal.SIGTERM)
    site.wait_until(lambda: process.exit_code is not None, "the end")
    assert process.exit_code == 0
    assert site.committed(f"{name}-push").get(TopicPartition(name, 0), 0) == 0
    assert "in_flight_at_revoke=1" in process.output
    assert "Traceback" not in process.output
