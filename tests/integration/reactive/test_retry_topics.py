"""Delayed retries on a real broker: to success, to the dead letter topic, over a restart, and in the order of keys."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from headrace.consumers.lag import lag_of
from headrace.delivery.retry_topics import delayed_of
from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster, HeadraceProcess, MakeTopic, PlannedResponse, RecordingBackend
from headrace_devkit.testing.scenario import Scenario


def fail(backend: Any, fails: Callable[[dict[str, Any]], bool]) -> None:
    """Have the backend response that it did not process some records."""
    backend.response = PlannedResponse(fails=fails)


def seen(backend: Any, number: int) -> list[dict[str, Any]]:
    """Return the deliveries of one record, in their order."""
    return [record for record in backend.records if record["value"]["n"] == number]


def write(site: Any, topic: str, key: bytes, *numbers: int) -> None:
    site.write(topic, *(OutgoingRecord(topic, key, b'{"n":%d}' % n, [("own", b"x"), ("own", b"y")]) for n in numbers))


def test_a_record_too_large_for_its_retry_topic_is_a_dead_letter_and_its_partition_goes_on(
    site: Scenario, kafka: Cluster, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """The retry topic was made by hand, and takes less than a topic that is read."""
    small, large = topic(max_message_bytes=20_000), topic()
    kafka.create_topic(f"{small}-push.retry.1s", 1, {"max.message.bytes": "20000"})
    fail(backend, lambda entry: entry["topic"] == large and entry["value"]["n"] < 2)
    push(small, retry={"attempts": 1, "topics": [1]}, topics=[small, large])
    big = OutgoingRecord(large, b"k", b'{"n":0,"x":"%s"}' % (b"x" * 200_000))
    site.write(large, big, *(OutgoingRecord(large, b"k", b'{"n":%d}' % n) for n in range(1, 5)))
    group = f"{small}-push"
    site.wait_committed(group, large, 5)
    site.wait_committed(f"{group}.retry", f"{group}.retry.1s", 1)
    assert sorted(json.loads(dead.value)["n"] for dead in site.records(f"{large}.dlq")) == [0, 1]
    assert [record["value"]["n"] for record in backend.accepted if record["topic"] == large] == [2, 3, 4]


def test_what_waits_survives_a_restart_and_keeps_its_time(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """The process that was to deliver it is gone; the next one does, when the record says, with the next attempt."""
    name = topic()
    fail(backend, lambda entry: entry["attempt"] == 1)
    process = push(name, alone=True, retry={"attempts": 1, "topics": [3]})
    write(site, name, b"k", 0)
    group = f"{name}-push"
    site.wait_committed(group, name, 1)
    assert process.terminate() == 0
    (waiting,) = site.records(f"{group}.retry.3s")
    push(name, alone=True, retry={"attempts": 1, "topics": [3]})
    backend.wait_for(lambda b: b.accepted)
    site.wait_committed(f"{group}.retry", f"{group}.retry.3s", 1)
    assert {record["attempt"] for record in seen(backend, 0)} == {1, 2}
    assert delayed_of(waiting).due > waiting.timestamp_ms / 1000


def test_keys_keep_their_order_when_who_holds_their_records_is_killed(
    site: Scenario, topic: MakeTopic, push: Callable[..., HeadraceProcess], backend: RecordingBackend
) -> None:
    """Two processes, and a key in the retry topic, others pass; one process dies, more come; none passes."""
    name = topic(2)
    fail(backend, lambda entry: entry["value"]["n"] == 0 and entry["attempt"] <= 3)
    settings: dict[str, Any] = {"ordering": "key", "batch": {"max_records": 4}}
    settings["retry"] = {"attempts": 3, "topics": [4], "keep_key_order": True}
    first, _second = (push(name, alone=True, **settings) for _ in range(2))
    write(site, name, b"a", *range(4))
    write(site, name, b"b", *range(100, 104))
    group = f"{name}-push"
    site.wait_until(lambda: len(site.records(f"{group}.retry.4s")) >= 4, "records of the key to wait")
    first.kill()
    write(site, name, b"a", *range(4, 8))
    push(name, alone=True, **settings)
    wanted = {*range(8), *range(100, 104)}
    backend.wait_for(lambda b: {record["value"]["n"] for record in b.accepted} == wanted, 240)
    site.wait_until(lambda: not waiting_in(site, group), "no key to wait")
    for each in (group, f"{group}.retry"):
        site.wait_until(lambda each=each: not lag_in(site, each), f"{each} to have no lag")
    order = [record["value"]["n"] for record in backend.accepted if record["key"] == "a"]
    assert all(later <= earlier + 1 for earlier, later in zip([-1, *order], order, strict=False)), order
    assert order[-1] == 7


def lag_in(site: Any, group: str) -> int:
    """Return how many records a group has not ended."""
    return sum(partition.lag for partition in asyncio.run(lag_of(site.admin, group)))


def waiting_in(site: Any, group: str) -> list[Any]:
    """Return the blocked keys of a group."""
    entries = {record.key: record.value for record in site.records(f"_headrace-{group}.blocked")}
    return [json.loads(place) for place, value in entries.items() if value is not None]
