"""The checker of exactly-once functions: what is visible is the function of the input, each output once.

It reads the topics at read_committed and the offsets of the group itself, and believes nothing that Headrace says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from headrace.records import Record, TopicPartition

Expected = Callable[[Record], Sequence[bytes | None]]
"""Returns the outputs that a record must have."""


def violations(
    inputs: Iterable[Record],
    outputs: Iterable[Record],
    committed: Mapping[TopicPartition, int],
    expected: Expected,
    *,
    ordered: bool = False,
) -> list[str]:
    """Return what is wrong, a sentence each.

    Args:
        inputs: Every record of the input.
        outputs: What is visible, outputs and dead letters.
        committed: The offsets of the group; below them every record has its outputs, above them none has.
        expected: The function of a record; its outputs name the record, so no two records have the same.
        ordered: Whether outputs of a partition must be in the order of the input.
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
    return sorted(wrong) + (_out_of_order(inputs, outputs, expected) if ordered else [])


def _out_of_order(inputs: Iterable[Record], outputs: Iterable[Record], expected: Expected) -> list[str]:
    origin = {value: (record.topic_partition, record.offset) for record in inputs for value in expected(record)}
    last: dict[tuple[TopicPartition, int], int] = {}
    wrong = []
    for output in outputs:
        if output.value not in origin:
            continue
        partition, offset = origin[output.value]
        lane = (partition, output.partition)
        if offset < last.get(lane, -1):
            wrong.append(f"the output of {partition} offset {offset} follows that of offset {last[lane]}")
        last[lane] = offset
    return wrong
