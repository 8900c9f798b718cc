"""What failures mean, on a real broker: statuses, splitting, roll-backs, and dead letters that cannot be written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.kafka import Producer
from headrace.records import OutgoingRecord, Produced, Record
from headrace_devkit.devcluster import Received
from headrace_devkit.testing import Cluster, HeadraceProcess, MakeTopic, PlannedResponse, RecordingBackend
from headrace_devkit.testing.scenario import Scenario


def spoiled_by(status: int, *offsets: int) -> Callable[[Received], PlannedResponse]:
    """Answer a whole request with a status when one of these records is in it."""

    def answer(request: Received) -> PlannedResponse:
        bad = any(entry["offset"] in offsets for entry in request.body)
        return PlannedResponse(status=status, body={"no": "such order"}) if bad else PlannedResponse()

    return answer


def history(dead: Record) -> dict[str, str]:
    return {name.removeprefix("headrace.dlq."): (data or b"").decode(errors="replace") for name, data in dead.headers}


def firsts(offsets: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(offsets))


def test_a_bad_record_of_a_batch_is_found_and_ends_alone(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """The response is for the whole batch: it is sent in halves, in order, and the dead letter has the response."""
    name = topic()
    site.write_json(name, *range(40))
    backend.response = spoiled_by(500, 17)
    push(name, batch={"max_records": 40}, backend={"mode": "status"})
    site.wait_committed(f"{name}-push", name, 40)
    (dead,) = site.records(f"{name}.dlq")
    said = history(dead)
    assert (dead.key, dead.value) == (b"k17", b"17")
    assert (said["offset"], said["attempts"], said["status"], said["error"]) == ("17", "3", "500", "HTTP 500")
    assert said["excerpt"] == '{"no":"such order"}'
    assert firsts(entry["offset"] for entry in backend.accepted) == [n for n in range(40) if n != 17]
    alone = [request.body[0] for request in backend.requests if len(request.body) == 1]
    assert firsts(entry["attempt"] for entry in alone if entry["offset"] == 17) == [1, 2, 3]


def test_a_dead_letter_topic_that_is_missing_holds_its_partition_until_it_is_there(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend, kafka: Cluster
) -> None:
    """No record is skipped; readiness and the log say what it waits for, and it resumes by itself."""
    name = topic()
    site.write_json(name, *range(3))
    backend.response = spoiled_by(422, 1)
    process = push(name, more={"kafka": {**site.config["kafka"], "create_topics": False}}, backend={"mode": "status"})
    site.wait_until(
        lambda: "dead letters" in site.reasons(process.url).get(f"reactive {name} delivery", ""), "the reason", 60
    )
    site.wait_until(lambda: f"group {name}-push, {name}-0 is waiting" in process.output, "the log", 60)
    site.wait_committed(f"{name}-push", name, 1)
    kafka.create_topic(f"{name}.dlq", 1, {})
    site.wait_committed(f"{name}-push", name, 3)
    assert [dead.value for dead in site.records(f"{name}.dlq")] == [b"1"]
    site.wait_until(lambda: site.ask(f"{process.url}/health/readiness").status == 200, "readiness")


@pytest.mark.parametrize("ours", [True, False])
def test_a_record_as_large_as_its_topic_allows_lands(
    site: Scenario,
    topic: MakeTopic,
    push: Callable[..., HeadraceProcess],
    backend: RecordingBackend,
    kafka: Cluster,
    ours: bool,
) -> None:
    """With all of its history where we make the topic; in one with the same limit, with what there is room for."""
    name = topic(max_message_bytes=20_000)
    if not ours:
        kafka.create_topic(f"{name}.dlq", 1, {"max.message.bytes": "20000"})
    value = asyncio.run(write_largest(site.kafka, name, 20_000))
    backend.response = PlannedResponse(status=422, body="e" * 2000)
    process = push(name, value_format="string", backend={"mode": "status"})
    site.wait_committed(f"{name}-push", name, 1)
    (dead,) = site.records(f"{name}.dlq")
    assert (dead.key, dead.value, dead.headers[:1]) == (b"k", value, [("own", b"\xff")])
    if ours:
        assert {"offset", "status", "excerpt", "reason", "StackTrace"} <= history(dead).keys()
    else:
        assert dead.headers == [("own", b"\xff")]
        said = f"{name}.dlq rejects records of that size; raise its max.message.bytes"
        site.wait_until(lambda: said in process.output, "the log")


async def write_largest(kafka: KafkaConfig, topic: str, limit: int) -> bytes:
    """Write the largest record that a topic takes, and return its value."""
    producer = Producer(kafka, ProducerConfig())
    await producer.start()
    try:
        for size in range(limit, 0, -1):
            value = b"x" * size
            (result,) = await producer.produce([OutgoingRecord(topic, b"k", value, [("own", b"\xff")])])
            if isinstance(result, Produced):
                return value
        raise AssertionError("it takes none")
    finally:
        await producer.stop()
