"""The checker of exactly-once functions: what is visible is the function of the input, each output once.

It reads the topics at read_committed and the offsets of the group itself, and believes nothing that Headrace says.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.records import OutgoingRecord, Record, TopicPartition
from tests.function_calls import function_file

Expected = Callable[[Record], Sequence[bytes | None]]
"""Returns the outputs that a record must have."""
LaneOf = Callable[[Record], Hashable]
"""Returns what a record has in common with those that must stay in order with it."""
HANDLER = """
def handler(context, event):
    return event.id
"""
SLOW = """
import time
def handler(context, event):
    time.sleep(0.002)
    return event.id
"""


def violations(
    inputs: Iterable[Record],
    outputs: Iterable[Record],
    committed: Mapping[TopicPartition, int],
    expected: Expected,
    *,
    lane_of: LaneOf | None = None,
) -> list[str]:
    """Return what is wrong, a sentence each.

    Args:
        inputs: Every record of the input.
        outputs: What is visible, outputs and dead letters.
        committed: The offsets of the group; below them every record has its outputs, above them none has.
        expected: The function of a record; its outputs name the record, so no two records have the same.
        lane_of: Inputs with the same result must have their outputs in the order of the input; None for no order.
    """
    due: Counter[bytes | None] = Counter()
    early: Counter[bytes | None] = Counter()
    for record in inputs:
        below = record.offset < committed.get(record.topic_partition, 0)
        (due if below else early).update(expected(record))
    found = Counter(record.value for record in outputs)
    wrong = [f"output {value!r} is missing" for value in due if value not in found]
    for value, count in found.items():
        if count > 1:
            wrong.append(f"output {value!r} is visible {count} times")
        if value in early:
            wrong.append(f"output {value!r} is visible, and the offset of its record is not committed")
        elif value not in due:
            wrong.append(f"output {value!r} belongs to no record")
    return sorted(wrong) + (_out_of_order(inputs, outputs, expected, lane_of) if lane_of else [])


def _out_of_order(
    inputs: Iterable[Record], outputs: Iterable[Record], expected: Expected, lane_of: LaneOf
) -> list[str]:
    origin = {value: record for record in inputs for value in expected(record)}
    last: dict[Hashable, int] = {}
    wrong = []
    for output in outputs:
        if output.value not in origin:
            continue
        record = origin[output.value]
        lane = (lane_of(record), output.topic_partition)
        if record.offset < last.get(lane, -1):
            wrong.append(f"the output of {record.topic_partition} offset {record.offset} follows that of {last[lane]}")
        last[lane] = record.offset
    return wrong


def by_id(record: Record) -> list[bytes | None]:
    """Return the output of a record: its place."""
    return [f"{record.topic}-{record.partition}-{record.offset}".encode()]


def write_function(folder: Path, source: str, target: str, code: str = HANDLER, **attributes: Any) -> str:
    """Write a function from one topic to another, exactly once, and return its file."""
    own = {"topics": [source], "consumerGroup": f"{source}-work", "delivery": "exactly_once"}
    trigger = {
        "kind": "kafka-cluster",
        "numWorkers": 2,
        "attributes": {**own, "retry": {"attempts": 2}, "outputTopic": target, "outputFormat": "string", **attributes},
    }
    return function_file(folder, code, {"in": trigger})


def fill(site: Any, source: str, count: int, partitions: int = 3, keys: int = 1_000_000) -> None:
    """Write records, in turns to every partition; the value of each is its number."""
    numbers = [(n, b"k%d" % (n % keys), n % partitions) for n in range(count)]
    site.write(source, *(OutgoingRecord(source, key, b"%d" % n, None, partition) for n, key, partition in numbers))


def committed_records(site: Any, source: str) -> int:
    """Return how many records of the input are committed."""
    return sum(site.committed(f"{source}-work").values())


def check(site: Any, source: str, target: str, expected: Expected = by_id, *, lane_of: LaneOf | None = None) -> None:
    """Check what is visible, once nothing is missing: Kafka may show offsets of a transaction before its outputs."""

    def found() -> list[str]:
        outputs = site.records(target)
        if f"{source}.dlq" in {topic.name for topic in asyncio.run(site.admin.list_topics())}:
            outputs += site.records(f"{source}.dlq")
        return violations(site.records(source), outputs, site.committed(f"{source}-work"), expected, lane_of=lane_of)

    site.wait_until(lambda: not [text for text in found() if text.endswith("missing")], "every output visible")
    assert found() == []
