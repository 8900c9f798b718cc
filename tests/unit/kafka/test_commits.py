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
from headrace_devkit.testing import ManualClock

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


class Harness:
    """Commits and places of two partitions that are ours in epoch 1; a client that only takes what it is given."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.epochs = {P0: 1, P1: 1}
        self.sent: list[int] = []
        self.refuses = False
        self.problems = ConsumerProblems("g")
        self.resolver = PositionResolver(ReadPolicy(), self.clock, self.problems)
        self.commits = Commits("c", self.clock, self.epochs, self.problems)

    def commit(self, offsets: list[Any], asynchronous: bool) -> None:
        assert asynchronous
        if self.refuses:
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._STATE))
        self.sent += [item.offset for item in offsets]

    def request(self, offset: int, epoch: int, partition: TopicPartition = P0) -> None:
        self.commits.request({partition: Committed(offset)}, {partition: epoch})
        self.commits.send_due(self)

    def seek(self, offset: int, epoch: int) -> StartPosition:
        start = StartPosition(offset, Committed(offset), epoch=epoch)
        self.commits.forget([P0])
        self.epochs[P0] = epoch
        self.resolver.wait_for_commit(P0, start)
        self.request(offset, epoch)
        return start

    def report(
        self, offset: int, *, failed: bool = False, fails_alone: bool = False, partition: TopicPartition = P0
    ) -> None:
        moved = confluent_kafka.KafkaError(confluent_kafka.KafkaError.NOT_COORDINATOR)
        item = SimpleNamespace(topic="t", partition=partition.partition, offset=offset, metadata="", error=None)
        item.error = moved if fails_alone else None
        self.commits.reported(moved if failed else None, [item])

    def wait(self) -> None:
        asyncio.run(self.clock.advance(2))
        self.commits.send_due(self)

    def begun(self) -> list[Any]:
        return list(self.resolver.resolve(self, self.commits.is_open))


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_what_failed_is_sent_again_after_a_pause_unless_there_is_a_newer_one(harness: Harness) -> None:
    """Also what the client refuses in the middle of a rebalance. The retry never sets back what was reached since."""
    harness.refuses = True
    harness.request(5, 1)
    harness.refuses = False
    harness.commits.send_due(harness)
    assert harness.sent == []
    harness.wait()
    harness.report(5, failed=True)
    harness.commits.send_due(harness)
    assert harness.sent == [5]
    harness.wait()
    assert harness.sent == [5, 5]
    harness.request(8, 1)
    harness.report(5, failed=True)
    harness.wait()
    assert harness.sent == [5, 5, 8]


def test_offsets_of_an_earlier_assignment_are_not_sent_again_nor_at_all(harness: Harness) -> None:
    """Another member had the partition in between and may have committed a later one (row F5)."""
    harness.request(5, 1)
    harness.commits.forget([P0])
    harness.epochs[P0] = 2
    harness.report(5, failed=True)
    harness.request(6, 1)
    del harness.epochs[P0]
    harness.request(7, 2)
    harness.wait()
    assert harness.sent == [5]


def test_commits_are_settled_when_the_last_one_is_acknowledged_or_revoked(harness: Harness) -> None:
    """A transaction that commits offsets must not be overtaken by an earlier commit, or by its repetition."""
    settled: list[Any] = []
    harness.commits.when_settled([P0], settled.append)
    assert settled == [[]]
    harness.request(5, 1)
    harness.request(6, 1)
    harness.commits.when_settled([P0, P1], settled.append)
    harness.report(5, failed=True)
    harness.wait()
    assert (harness.sent, settled) == ([5, 6], [[]])
    harness.report(6)
    assert settled == [[], []]
    harness.request(7, 1)
    harness.commits.when_settled([P0], settled.append)
    harness.commits.forget([P0])
    assert settled == [[], [], [P0]]


def test_another_client_commits_though_the_one_before_has_not_reported(harness: Harness) -> None:
    """Its report never comes."""
    harness.request(5, 1)
    harness.commits.restart()
    harness.request(6, 1)
    assert harness.sent == [5, 6]


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
    monkeypatch.setattr("headrace.runtime.blocking.sleep", lambda _: None)
    left = iter(responses)

    def commit(offsets: list[Any], asynchronous: bool) -> None:
        if response := next(left):
            raise confluent_kafka.KafkaException(
                confluent_kafka.KafkaError(getattr(confluent_kafka.KafkaError, response))
            )

    failure = commit_now(SimpleNamespace(commit=commit), {P0: Committed(1)})
    assert (failure.name() if failure else None) == failed
    assert len(list(left)) == len(responses) - calls


def test_a_seek_is_committed_behind_what_was_under_way(harness: Harness) -> None:
    """A report of the epoch before begins nothing, and only the new offset is sent until it is taken."""
    harness.request(9, 1)
    start = harness.seek(5, 2)
    assert harness.sent == [9]
    harness.report(9, fails_alone=True)
    assert harness.begun() == []
    harness.wait()
    harness.report(5, fails_alone=True)
    assert harness.begun() == []
    harness.wait()
    assert harness.sent == [9, 5, 5]
    harness.report(5)
    assert harness.begun() == [(P0, start)]


def test_a_seek_begins_only_with_its_own_acknowledgement(harness: Harness) -> None:
    """Not that of an earlier seek, of another partition's commit on revoke, or after the partition was lost."""
    for is_acknowledged in (False, True):
        harness.seek(5, 2)
        if is_acknowledged:
            harness.report(5)
        harness.resolver.forget([P0])
        harness.report(5)
        assert harness.begun() == []
    harness.seek(6, 3)
    start = harness.seek(7, 4)
    harness.report(6)
    harness.commits.send_due(harness)
    harness.report(9, partition=P1)
    assert harness.begun() == []
    harness.report(7)
    assert harness.begun() == [(P0, start)]
