"""The buffer of an instance: nothing lost, nothing twice, in order, within the limits of a read."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headrace.records import Record, TopicPartition
from headrace.sidecar.active.buffer import RecordBuffer
from headrace.sidecar.active.entries import fitting

PARTITIONS = [TopicPartition("t", n) for n in range(3)]


class BufferMachine(RuleBasedStateMachine):
    """Compares with a list per partition."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = RecordBuffer()
        self.waiting: dict[TopicPartition, list[Record]] = {partition: [] for partition in PARTITIONS}
        self.next = dict.fromkeys(PARTITIONS, 0)

    @rule(partition=st.sampled_from(PARTITIONS), sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5))
    def add(self, partition: TopicPartition, sizes: list[int]) -> None:
        records = [
            Record(*partition, self.next[partition] + n, 0, None, b"", size_bytes=s) for n, s in enumerate(sizes)
        ]
        self.next[partition] += len(sizes)
        self.buffer.add(partition, records)
        self.waiting[partition] += records

    @rule(partition=st.sampled_from(PARTITIONS))
    def drop(self, partition: TopicPartition) -> None:
        self.buffer.drop([partition])
        self.waiting[partition].clear()

    @rule(most=st.integers(1, 120), count=st.integers(1, 6), delivered=st.integers(0, 6))
    def read(self, most: int, count: int, delivered: int) -> None:
        taken = self.buffer.take(most, count)
        assert len(taken) <= count
        assert len(taken) == 1 or sum(record.size_bytes for record in taken) <= most
        assert bool(taken) == any(self.waiting.values())
        for partition, waiting in self.waiting.items():
            own = [record for record in taken if record.topic_partition == partition]
            assert own == waiting[: len(own)]
        self.buffer.put_back(taken[delivered:])
        for record in taken[:delivered]:
            self.waiting[record.topic_partition].remove(record)

    @invariant()
    def counts(self) -> None:
        records = [record for waiting in self.waiting.values() for record in waiting]
        assert (self.buffer.records, self.buffer.size_bytes) == (len(records), sum(r.size_bytes for r in records))


TestBuffer = BufferMachine.TestCase


def test_an_answer_has_at_least_one_entry_and_a_bound() -> None:
    """8 MiB of text."""
    part = "x" * 4_194_304
    for entries, count in (([], 0), ([part * 3, ""], 1), ([part, part], 2), ([part, part, "x"], 2), (["", part], 2)):
        assert fitting(entries) == entries[:count]
