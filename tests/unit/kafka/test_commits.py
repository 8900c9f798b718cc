"""What is committed, and what is not any more; a place that was sought begins once its own commit is acknowledged."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from headrace.kafka.commits import Commits, commit_now
from headrace.kafka.loop_proxy import ConsumerProblems
from headrace.kafka.positions import PositionResolver, ReadPolicy, StartPosition
from headrace.records import Committed, TopicPartition
from headrace.testing import ManualClock

PLACE, OTHER = TopicPartition("t", 0), TopicPartition("t", 1)


class Bench:
    """Commits and places of two partitions that are ours in epoch 1; a client that only takes what it is given."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.epochs = {PLACE: 1, OTHER: 1}
        self.sent: list[int] = []
        self.refuses = False
        self.problems = ConsumerProblems("g")
        self.resolver = PositionResolver(ReadPolicy(), self.clock, self.problems)
        self.commits = Commits("c", self.clock, self.epochs, self.resolver.acknowledged)

    def commit(self, offsets: list[Any], asynchronous: bool) -> None:
        assert asynchronous
        if self.refuses:
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._STATE))
        self.sent += [item.offset for item in offsets]

    def want(self, offset: int, epoch: int, partition: TopicPartition = PLACE) -> None:
        self.commits.request({partition: Committed(offset)}, {partition: epoch})
        self.commits.send_due(self)

    def seek(self, offset: int, epoch: int) -> StartPosition:
        start = StartPosition(offset, Committed(offset), epoch=epoch)
        self.commits.forget([PLACE])
        self.epochs[PLACE] = epoch
        self.resolver.wait_for_commit(PLACE, start)
        self.want(offset, epoch)
        return start

    def report(
        self, offset: int, *, failed: bool = False, fails_alone: bool = False, partition: TopicPartition = PLACE
    ) -> None:
        moved = confluent_kafka.KafkaError(confluent_kafka.KafkaError.NOT_COORDINATOR)
        item = SimpleNamespace(topic="t", partition=partition.partition, offset=offset, metadata="", error=None)
        item.error = moved if fails_alone else None
        self.commits.reported(moved if failed else None, [item])

    def wait(self) -> None:
        asyncio.run(self.clock.advance(2))
        self.commits.send_due(self)

    def begun(self) -> list[Any]:
        return list(self.resolver.resolve(self))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_is_under_way_and_the_newest_follows(bench: Bench) -> None:
    """What comes meanwhile is sent when the report is there."""
    for offset in (5, 6, 7):
        bench.want(offset, 1)
    assert bench.sent == [5]
    bench.report(5)
    bench.commits.send_due(bench)
    assert bench.sent == [5, 7]


def test_what_failed_is_sent_again_after_a_pause_unless_newer_is_there(bench: Bench) -> None:
    """The repetition never sets back what was reached meanwhile."""
    bench.want(5, 1)
    bench.report(5, failed=True)
    bench.commits.send_due(bench)
    assert bench.sent == [5]
    bench.wait()
    assert bench.sent == [5, 5]
    bench.want(8, 1)
    bench.report(5, failed=True)
    bench.wait()
    assert bench.sent == [5, 5, 8]


def test_what_the_client_does_not_take_is_sent_again_after_a_pause(bench: Bench) -> None:
    """It refuses a commit at once in the middle of a rebalance; without more records nothing newer would ever come."""
    bench.refuses = True
    bench.want(5, 1)
    bench.refuses = False
    bench.commits.send_due(bench)
    assert bench.sent == []
    bench.wait()
    assert bench.sent == [5]


def test_a_late_report_of_an_earlier_assignment_is_not_sent_again(bench: Bench) -> None:
    """Another member had the partition in between and may have gone further (row F5)."""
    bench.want(5, 1)
    bench.commits.forget([PLACE])
    bench.epochs[PLACE] = 2
    bench.report(5, failed=True)
    bench.wait()
    assert bench.sent == [5]


def test_offsets_of_an_earlier_assignment_are_not_sent_at_all(bench: Bench) -> None:
    """Nor those of a partition that is not ours."""
    bench.epochs[PLACE] = 2
    bench.want(5, 1)
    del bench.epochs[PLACE]
    bench.want(6, 2)
    assert bench.sent == []


def test_commits_are_settled_when_the_last_one_is_acknowledged_or_revoked(bench: Bench) -> None:
    """A transaction that commits offsets must not be overtaken by an earlier commit, or by its repetition."""
    settled: list[Any] = []
    bench.commits.when_settled([PLACE], settled.append)
    assert settled == [[]]
    bench.want(5, 1)
    bench.want(6, 1)
    bench.commits.when_settled([PLACE, OTHER], settled.append)
    bench.report(5, failed=True)
    bench.wait()
    assert (bench.sent, settled) == ([5, 6], [[]])
    bench.report(6)
    assert settled == [[], []]
    bench.want(7, 1)
    bench.commits.when_settled([PLACE], settled.append)
    bench.commits.forget([PLACE])
    assert settled == [[], [], [PLACE]]


def test_another_client_commits_though_the_one_before_has_not_reported(bench: Bench) -> None:
    """Its report never comes."""
    bench.want(5, 1)
    bench.commits.restart()
    bench.want(6, 1)
    assert bench.sent == [5, 6]


@pytest.mark.parametrize(
    ("responses", "calls", "failed"),
    [
        (["ILLEGAL_GENERATION", None], 2, None),
        (["ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS", "REBALANCE_IN_PROGRESS", None], 4, None),
        (["ILLEGAL_GENERATION"] * 2, 2, "ILLEGAL_GENERATION"),
        (["UNKNOWN_MEMBER_ID"], 1, "UNKNOWN_MEMBER_ID"),
    ],
)
def test_a_commit_that_meets_a_rebalance_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, responses: list[str | None], calls: int, failed: str | None
) -> None:
    """One that waited behind the own request to join has the generation before; a member that is out stays refused."""
    monkeypatch.setattr("headrace.kafka.commits.time.sleep", lambda _: None)
    left = iter(responses)

    def commit(offsets: list[Any], asynchronous: bool) -> None:
        if response := next(left):
            raise confluent_kafka.KafkaException(
                confluent_kafka.KafkaError(getattr(confluent_kafka.KafkaError, response))
            )

    failure = commit_now(SimpleNamespace(commit=commit), {PLACE: Committed(1)})
    assert (failure.name() if failure else None) == failed
    assert len(list(left)) == len(responses) - calls


def test_a_seek_is_committed_behind_what_was_under_way(bench: Bench) -> None:
    """A report of the epoch before begins nothing, and only the new offset is sent until it is taken."""
    bench.want(9, 1)
    start = bench.seek(5, 2)
    assert bench.sent == [9]
    bench.report(9, fails_alone=True)
    assert bench.begun() == []
    bench.wait()
    bench.report(5, fails_alone=True)
    assert bench.begun() == []
    bench.wait()
    assert bench.sent == [9, 5, 5]
    bench.report(5)
    assert bench.begun() == [(PLACE, start)]


def test_what_is_lost_before_a_seek_begins_is_not_begun(bench: Bench) -> None:
    """Before its commit is acknowledged or after; nor by an acknowledgement of a seek before the last."""
    for is_acknowledged in (False, True):
        bench.seek(5, 2)
        if is_acknowledged:
            bench.report(5)
        bench.resolver.forget([PLACE])
        bench.report(5)
        assert bench.begun() == []
    bench.seek(6, 3)
    start = bench.seek(7, 4)
    bench.report(6)
    bench.commits.send_due(bench)
    assert bench.begun() == []
    bench.report(7)
    assert bench.begun() == [(PLACE, start)]


def test_a_report_of_another_commit_acknowledges_no_seek(bench: Bench) -> None:
    """A revoke commits its partitions by itself, and that is reported while the seek's commit is under way."""
    start = bench.seek(5, 2)
    bench.report(9, partition=OTHER)
    assert bench.begun() == []
    bench.report(5)
    assert bench.begun() == [(PLACE, start)]


def test_problems_are_those_of_the_partition_or_of_the_membership(bench: Bench) -> None:
    """The partition's own goes first."""
    assert bench.problems.of(PLACE) == "group g: not joined yet"
    bench.problems.report(str(PLACE), "offset 5 is gone")
    assert (bench.problems.of(PLACE), bench.problems.of(OTHER)) == ("offset 5 is gone", "group g: not joined yet")
    bench.problems.report("", "")
    bench.problems.report(str(PLACE), "")
    assert (bench.problems.of(PLACE), bench.problems.all()) == ("", [])
