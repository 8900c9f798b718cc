"""Which partitions have records in flight, and which are paused."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.config.consumers import FlowControl
from headrace.kafka.fetch_flow import MOST_WAITING_RECORDS, FetchFlowControl
from headrace.records import RecordBatch, TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


class Flow(FetchFlowControl):
    """A flow control, what it has passed on, and a partition's log, which is read again from where it was dropped."""

    def __init__(self, records: int = 10_000, size: int = 10_000_000, partitions: int = 2) -> None:
        super().__init__(FlowControl(max_records=records, max_bytes=size))
        self.places = [TopicPartition("t", number) for number in range(partitions)]
        self.assigned(dict.fromkeys(self.places, 1))
        self.passed = dict.fromkeys(self.places, 0)
        self.next = dict.fromkeys(self.places, 0)
        self.stopped: set[TopicPartition] = set()

    def fill_with(self, partition: TopicPartition, count: int, size: int = 1) -> None:
        first = self.next[partition]
        self.next[partition] += count
        nulls, sizes = [None] * count, [size] * count
        offsets = [*range(first, first + count)]
        self.received(partition, RecordBatch(partition, offsets, offsets, [*nulls], [*nulls], None, sizes))

    def pass_on(self, now: float) -> None:
        for partition, epoch, part in self.take(now):
            assert epoch == 1
            if isinstance(part, RecordBatch):
                assert part.offsets == [*range(self.passed[partition], self.passed[partition] + len(part))]
                self.passed[partition] += len(part)
            else:
                assert part == self.passed[partition]

    def turn(self, now: float) -> tuple[list[TopicPartition], list[TopicPartition]]:
        self.pass_on(now)
        pause, resume = self.changes(now)
        self.stopped = (self.stopped | set(pause)) - set(resume)
        for partition, offset in self.take_dropped():
            assert partition in self.stopped
            self.next[partition] = offset
        return [*pause], [*resume]


def test_partitions_take_turns_however_fast_one_of_them_arrives() -> None:
    """With a backlog in all of them each has records in flight, also if one arrived first, and no batch is tiny."""
    for partitions in (2, 8, 20):
        made = Flow(20_000, partitions=partitions)
        for partition in made.places:
            made.fill_with(partition, 2000)
        for now in range(50):
            made.pass_on(now)
            assert all(made.passed.values())
            assert made.records <= 20_000
            for partition in made.places[1:]:
                made.released(partition, 1, 500, 500, now)
                made.fill_with(partition, 500)
        assert made.passed[A] < 20_000 / 2
        assert min(made.passed[place] for place in made.places[1:]) > 2000


def test_the_end_of_a_partition_comes_after_its_records() -> None:
    made = Flow(1000)
    made.fill_with(A, 1500)
    made.received(A, 1500)
    made.received(B, 0)
    made.pass_on(0)
    assert made.passed[A] < 1000
    for now in range(1, 20):
        made.released(A, 1, 200, 200, now)
        made.pass_on(now)
    assert made.passed[A] == 1500
    assert not made.has_waiting


def test_without_room_for_a_while_everything_is_paused_and_polling_goes_on() -> None:
    """With every partition paused a poll brings no records, so the membership lives. What waited is fetched again."""
    made = Flow()
    made.fill_with(A, MOST_WAITING_RECORDS)
    assert made.turn(0.0) == ([], [])
    made.fill_with(A, MOST_WAITING_RECORDS // 2)
    assert not made.poll_limit_records
    made.turn(0.0)
    assert made.turn(1.0) == ([A, B], [])
    assert made.all_paused
    assert made.poll_limit_records
    assert made.next[A] == made.passed[A]
    made.released(A, 1, made.records, made.records, 2)
    assert made.turn(2) == ([], [A, B])


def test_a_partition_that_hangs_leaves_room_for_the_others() -> None:
    made = Flow()
    made.fill_with(A, 9000)
    assert made.turn(0) == ([], [])
    assert made.turn(1) == ([A], [])
    assert not made.has_waiting
    for now in range(2, 100):
        made.fill_with(B, 2000)
        assert made.turn(now) == ([], [])
        made.released(B, 1, 2000, 10, now)
    assert made.passed[B] == 98 * 2000


@given(
    steps=st.lists(
        st.tuples(st.sampled_from([A, B]), st.booleans(), st.integers(1, 4000), st.floats(0, 2)),
        min_size=1,
        max_size=60,
    )
)
def test_the_budget_holds_and_no_partition_is_paused_for_ever(
    steps: list[tuple[TopicPartition, bool, int, float]],
) -> None:
    """Nothing is in flight beyond the budget, nothing is lost, and once everything has ended all are resumed."""
    made, now = Flow(), 0.0
    completed = {A: 0, B: 0}
    for partition, take, count, seconds in steps:
        now += seconds
        if take and partition not in made.stopped and made.poll_limit_records:
            made.fill_with(partition, count, size=2000)
        else:
            part = min(count, made.passed[partition] - completed[partition])
            made.released(partition, 1, part, part * 2000, now)
            completed[partition] += part
        made.turn(now)
        assert made.records == sum(made.passed.values()) - sum(completed.values())
        assert made.bytes <= 10_000_000
    for _ in range(20_000):
        for partition in (A, B):
            made.released(partition, 1, made.passed[partition] - completed[partition], 10**9, now)
            completed[partition] = made.passed[partition]
        made.turn(now)
        if not made.has_waiting:
            break
    assert not made.stopped
    assert made.passed == made.next
