"""What is committed, and what is not any more: with a client that keeps what it is given."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from headrace.kafka.commits import Commits, commit_now
from headrace.records import Committed, TopicPartition
from headrace.testing import ManualClock

PLACE = TopicPartition("t", 0)


class Bench:
    """Commits of one partition that is ours in epoch 1."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.epochs = {PLACE: 1}
        self.sent: list[int] = []
        self.refuses = False
        self.commits = Commits("c", self.clock, self.epochs)

    def commit(self, offsets: list[Any], asynchronous: bool) -> None:
        assert asynchronous
        if self.refuses:
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._STATE))
        self.sent += [item.offset for item in offsets]

    def want(self, offset: int, epoch: int) -> None:
        self.commits.request({PLACE: Committed(offset)}, {PLACE: epoch})
        self.commits.send_due(self)

    def report(self, offset: int, *, failed: bool) -> None:
        item = SimpleNamespace(topic="t", partition=0, offset=offset, metadata="", error=None)
        moved = confluent_kafka.KafkaError(confluent_kafka.KafkaError.NOT_COORDINATOR)
        self.commits.reported(moved if failed else None, [item])

    def wait(self) -> None:
        asyncio.run(self.clock.advance(2))
        self.commits.send_due(self)


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_one_is_under_way_and_the_newest_follows(bench: Bench) -> None:
    """What comes meanwhile is sent when the report is there."""
    for offset in (5, 6, 7):
        bench.want(offset, 1)
    assert bench.sent == [5]
    bench.report(5, failed=False)
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
    bench.commits.when_settled([PLACE, TopicPartition("t", 1)], settled.append)
    bench.report(5, failed=True)
    bench.wait()
    assert (bench.sent, settled) == ([5, 6], [[]])
    bench.report(6, failed=False)
    assert settled == [[], []]
    bench.want(7, 1)
    bench.commits.when_settled([PLACE], settled.append)
    bench.commits.forget([PLACE])
    assert settled == [[], [], [PLACE]]


@pytest.mark.parametrize(
    ("answers", "calls", "failed"),
    [
        (["ILLEGAL_GENERATION", None], 2, None),
        (["ILLEGAL_GENERATION", "REBALANCE_IN_PROGRESS", "REBALANCE_IN_PROGRESS", None], 4, None),
        (["ILLEGAL_GENERATION"] * 2, 2, "ILLEGAL_GENERATION"),
        (["UNKNOWN_MEMBER_ID"], 1, "UNKNOWN_MEMBER_ID"),
    ],
)
def test_a_commit_that_meets_a_rebalance_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, answers: list[str | None], calls: int, failed: str | None
) -> None:
    """One that waited behind the own request to join has the generation before; a member that is out stays refused."""
    monkeypatch.setattr("headrace.kafka.commits.time.sleep", lambda _: None)
    left = iter(answers)

    def commit(offsets: list[Any], asynchronous: bool) -> None:
        if answer := next(left):
            raise confluent_kafka.KafkaException(
                confluent_kafka.KafkaError(getattr(confluent_kafka.KafkaError, answer))
            )

    failure = commit_now(SimpleNamespace(commit=commit), {PLACE: Committed(1)})
    assert (failure.name() if failure else None) == failed
    assert len(list(left)) == len(answers) - calls
