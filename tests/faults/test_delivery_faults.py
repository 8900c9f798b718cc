"""Order by key, the offset map and gaps, while processes are killed and records removed under them."""

from __future__ import annotations

import re
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from headrace.delivery.offset_map import decode
from headrace.testing import Answer, RecordingBackend

STUCK = "7"


def first_accepted(backend: RecordingBackend) -> dict[tuple[int, str], list[int]]:
    """Return the offsets of each key of each partition, in the order in which they were first accepted."""
    found: dict[tuple[int, str], dict[int, None]] = defaultdict(dict)
    for record in list(backend.accepted):
        found[record["partition"], record["key"]].setdefault(record["offset"])
    return {key: list(offsets) for key, offsets in found.items()}


def unfinished(kafka: Any, topic: str, places: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Return which records a new owner would get again, as the group's commits say."""
    client = confluent_kafka.Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": f"{topic}-push"})
    try:
        wanted = [confluent_kafka.TopicPartition(topic, number) for number in {number for number, _ in places}]
        committed = {at.partition: at for at in client.committed(wanted, timeout=60)}
    finally:
        client.close()
    ended = {number: decode(at.metadata or "", at.offset) for number, at in committed.items()}
    return {
        (number, offset)
        for number, offset in places
        if offset >= committed[number].offset and not ((found := ended[number]) and found.has(offset))
    }


def consumer(topic: str, backend: RecordingBackend, **settings: Any) -> dict[str, Any]:
    return {"topics": [topic], "group": f"{topic}-push", "backend": {"url": backend.url}, **settings}


@pytest.mark.timeout(600)
def test_order_by_key_holds_and_only_the_unfinished_comes_again(
    kafka: Any, topic: Callable[..., str], headrace: Any, backend: Any, bed: Any
) -> None:
    """One key fails all the time, kill -9 hits while others are under way, and at last while only that key is open."""
    name = topic(2)
    ledger = bed.Ledger(kafka.bootstrap_servers)
    backend.answer = Answer(delay_seconds=0.01, fails=lambda record: record["key"] == STUCK)
    retry = {"attempts": 1000, "first_delay_seconds": 0.1, "max_delay_seconds": 0.5}
    push = consumer(name, backend, ordering="key", max_in_flight=8, batch={"max_records": 5}, retry=retry)
    place = {"bootstrap_servers": kafka.bootstrap_servers, "properties": {"session.timeout.ms": 2000}}
    config = {"kafka": place, "reactive_consumers": {"push": push}}
    source = headrace({"kafka": place})
    with bed.CommitWatch(ledger, f"{name}-push", backend) as watch:
        with bed.Poster(source.url, name) as poster:
            poster.wait_for(3000)
        for _ in range(2):
            process = headrace(config)
            had = len(backend.accepted)
            backend.wait_for(lambda b, had=had: len(b.accepted) > had + 300, 150)
            process.kill()
        everything = {(r.partition, r.offset): (r.key or b"").decode() for r in ledger.records(name)}
        stuck = {at for at, key in everything.items() if key == STUCK}
        process = headrace(config)
        bed.wait_until(lambda: bed.delivered_by(backend) == set(everything) - stuck, 60, "all but the stuck key")
        bed.wait_until(lambda: unfinished(kafka, name, set(everything)) == stuck, 30, "the offset map")
        process.kill()
        before = len(backend.accepted)
        backend.answer = Answer()
        headrace(config)
        bed.wait_until(lambda: ledger.lag(f"{name}-push") == 0, 60, "lag 0")
    again = {(record["partition"], record["offset"]) for record in backend.accepted[before:]}
    assert again == stuck
    assert all(offsets == sorted(offsets) for offsets in first_accepted(backend).values())
    ledger.check_acknowledged(name, poster)
    ledger.check_delivered(name, bed.delivered_by(backend))
    assert watch.violations == []


@pytest.mark.timeout(400)
def test_records_are_removed_before_they_are_read(
    kafka: Any, topic: Callable[..., str], headrace: Any, backend: Any, bed: Any
) -> None:
    """Headrace stands still and names what is missing; told to continue, it counts it and goes on (row B11)."""
    name = topic()
    ledger = bed.Ledger(kafka.bootstrap_servers)
    place = {"kafka": {"bootstrap_servers": kafka.bootstrap_servers}}
    process = headrace({**place, "reactive_consumers": {"push": consumer(name, backend)}})
    with bed.Poster(process.url, name) as poster:
        poster.wait_for(100)
    bed.wait_until(lambda: ledger.lag(f"{name}-push") == 0 and backend.accepted, 30, "lag 0")
    assert process.terminate() == 0
    source = headrace(place)
    with bed.Poster(source.url, name) as poster:
        poster.wait_for(100)
    end = len(ledger.records(name))
    first = max(offset for _, offset in bed.delivered_by(backend)) + 1
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for future in admin.delete_records([confluent_kafka.TopicPartition(name, 0, first + 10)]).values():
        future.result()
    standing = headrace({**place, "reactive_consumers": {"push": consumer(name, backend)}}, wait=False)
    missing = rf"offsets {first} to {first + 9} \(10\) are no longer in the log"
    bed.wait_until(lambda: re.search(missing, standing.output), 30, "the gap")
    standing.terminate()
    assert max(offset for _, offset in bed.delivered_by(backend)) == first - 1
    going_on = headrace({**place, "reactive_consumers": {"push": consumer(name, backend, on_gap="continue")}})
    bed.wait_until(lambda: ledger.lag(f"{name}-push") == 0, 30, "lag 0")
    with urllib.request.urlopen(f"{going_on.url}/metrics", timeout=60) as answer:
        counts = answer.read().decode()
    assert re.search(r'headrace_gap_offsets_total\{consumer="push",kind="reactive"\} 10\.0', counts)
    assert {offset for _, offset in bed.delivered_by(backend)} == set(range(end)) - set(range(first, first + 10))
