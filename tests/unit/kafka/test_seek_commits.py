"""A place that was sought is begun once its commit is acknowledged, in its own epoch, and not by anybody else's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError

from headrace.kafka.commits import Commits
from headrace.kafka.loop_proxy import ConsumerProblems
from headrace.kafka.positions import PositionResolver, ReadPolicy, StartPosition
from headrace.records import Committed, TopicPartition
from headrace.testing import ManualClock

PLACE, OTHER = TopicPartition("t", 0), TopicPartition("t", 1)


class Bench:
    """Commits and places of two partitions, with a client that only takes what it is given."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.epochs = {PLACE: 1, OTHER: 1}
        self.problems = ConsumerProblems("g")
        self.resolver = PositionResolver(ReadPolicy(), self.clock, self.problems)
        self.commits = Commits("c", self.clock, self.epochs, self.resolver.acknowledged)
        self.sent: list[tuple[int, int]] = []

    def commit(self, offsets: list[Any], asynchronous: bool) -> None:
        self.sent += [(item.partition, item.offset) for item in offsets]

    def seek(self, offset: int, epoch: int) -> StartPosition:
        start = StartPosition(offset, Committed(offset), epoch=epoch)
        self.commits.forget([PLACE])
        self.epochs[PLACE] = epoch
        self.resolver.wait_for_commit(PLACE, start)
        self.want(PLACE, offset, epoch)
        return start

    def want(self, partition: TopicPartition, offset: int, epoch: int) -> None:
        self.commits.request({partition: Committed(offset)}, {partition: epoch})
        self.commits.send_due(self)

    def report(self, partition: TopicPartition, offset: int, failed: str | None = None) -> None:
        error = KafkaError(KafkaError.NOT_COORDINATOR, failed) if failed else None
        item = SimpleNamespace(topic="t", partition=partition.partition, offset=offset, metadata="", error=error)
        self.commits.reported(None, [item])
        self.commits.send_due(self)

    def begun(self) -> list[Any]:
        return list(self.resolver.resolve(self))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_it_is_committed_behind_what_was_under_way(bench: Bench) -> None:
    """A report of the epoch before, or of another partition, begins nothing; the old offset is not sent again."""
    bench.want(PLACE, 9, 1)
    start = bench.seek(5, 2)
    assert bench.sent == [(0, 9)]
    bench.report(PLACE, 9, failed="not the coordinator")
    assert bench.begun() == []
    bench.clock._now += 2
    bench.commits.send_due(bench)
    assert bench.sent == [(0, 9), (0, 5)]
    bench.report(PLACE, 5)
    assert bench.begun() == [(PLACE, start)]


def test_a_commit_that_fails_is_sent_until_it_is_taken(bench: Bench) -> None:
    """As long as the partition is ours."""
    start = bench.seek(5, 2)
    bench.report(PLACE, 5, failed="not the coordinator")
    assert bench.begun() == []
    bench.clock._now += 2
    bench.commits.send_due(bench)
    assert bench.sent == [(0, 5), (0, 5)]
    bench.report(PLACE, 5)
    assert bench.begun() == [(PLACE, start)]


def test_what_is_lost_meanwhile_is_not_begun(bench: Bench) -> None:
    """Before its commit is acknowledged or after; nor by an acknowledgement of a seek before the last."""
    bench.seek(5, 2)
    bench.resolver.forget([PLACE])
    bench.report(PLACE, 5)
    assert bench.begun() == []
    bench.seek(5, 2)
    bench.report(PLACE, 5)
    bench.resolver.forget([PLACE])
    assert bench.begun() == []
    bench.seek(6, 3)
    start = bench.seek(7, 4)
    bench.report(PLACE, 6)
    assert bench.begun() == []
    bench.report(PLACE, 7)
    assert bench.begun() == [(PLACE, start)]


def test_a_report_of_another_commit_acknowledges_nothing(bench: Bench) -> None:
    """A revoke commits its partitions by itself, and that is reported while the seek's commit is under way."""
    start = bench.seek(5, 2)
    bench.report(OTHER, 9)
    assert bench.begun() == []
    bench.report(PLACE, 5)
    assert bench.begun() == [(PLACE, start)]


def test_problems_are_those_of_the_partition_or_of_the_membership(bench: Bench) -> None:
    """The partition's own goes first."""
    assert bench.problems.of(PLACE) == "group g: not joined yet"
    bench.problems.report(str(PLACE), "offset 5 is gone")
    assert (bench.problems.of(PLACE), bench.problems.of(OTHER)) == ("offset 5 is gone", "group g: not joined yet")
    bench.problems.report("", "")
    bench.problems.report(str(PLACE), "")
    assert (bench.problems.of(PLACE), bench.problems.all()) == ("", [])
