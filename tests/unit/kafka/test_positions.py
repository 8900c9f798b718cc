"""Where a group begins, and what is missing: with a client that answers from a table."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from headrace.kafka.loop_proxy import ConsumerProblems
from headrace.kafka.positions import PositionResolver, ReadPolicy, StartPosition, has_committed
from headrace.records import Committed, TopicPartition
from headrace_devkit.testing import ManualClock

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
UNKNOWN = confluent_kafka.OFFSET_INVALID


class FakeClient:
    """Three partitions of one topic, whose logs go from 40 to 100."""

    def __init__(self, committed: dict[int, int], error: Any = None) -> None:
        self._committed = committed
        self._error = error

    def committed(self, wanted: list[Any], timeout: float) -> list[Any]:
        return [
            SimpleNamespace(
                topic=at.topic,
                partition=at.partition,
                offset=self._committed.get(at.partition, UNKNOWN) if at.topic == "t" else UNKNOWN,
                metadata="note",
                error=self._error,
            )
            for at in wanted
        ]

    def offsets_for_times(self, wanted: list[Any], timeout: float) -> list[Any]:
        assert {at.offset for at in wanted} == {confluent_kafka.OFFSET_END}
        return [confluent_kafka.TopicPartition(at.topic, at.partition, -1 if at.partition else 100) for at in wanted]

    def list_topics(self, timeout: float) -> Any:
        partitions = {0: None, 1: None, 2: None}
        return SimpleNamespace(topics=dict.fromkeys(("t", "u"), SimpleNamespace(partitions=partitions)))


def resolver(policy: ReadPolicy, *, subscribed: Sequence[str] = ()) -> PositionResolver:
    made = PositionResolver(policy, ManualClock(), ConsumerProblems("g"))
    made.subscribed = subscribed
    return made


def starts(client: FakeClient, partitions: list[TopicPartition], policy: ReadPolicy, **more: Any) -> Any:
    """Return where partitions start, without their epochs."""
    found = resolver(policy, **more).starts(client, partitions)
    return {partition: start._replace(epoch=0) for partition, start in found.items()}


def test_a_group_resumes_at_its_committed_offset_with_its_metadata() -> None:
    """Whatever the policy is for groups without committed offsets."""
    for policy in (ReadPolicy("earliest"), ReadPolicy("latest")):
        assert starts(FakeClient({0: 50}), [P0], policy) == {P0: StartPosition(50, Committed(50, "note"))}


def test_latest_is_a_number_that_is_to_be_committed_now() -> None:
    """So that a restart before the first record does not choose a later one. One request asks for all partitions, and
    what has no number in the response is not known."""
    found = starts(FakeClient({}), [P0, P1], ReadPolicy("latest"))
    assert found == {P0: StartPosition(100, Committed(100), is_new=True)}


def test_what_was_added_begins_at_its_start() -> None:
    """A partition, and a topic that this process has read before or that a pattern adds; else "latest" is the end."""
    latest, as_one, begin = ReadPolicy("latest"), ReadPolicy("latest", as_one=True), confluent_kafka.OFFSET_BEGINNING
    assert {at.offset for at in starts(FakeClient({2: 7}), [P0, P1], latest).values()} == {begin}
    added = TopicPartition("u", 0)
    reads = resolver(latest)
    reads.starts(FakeClient({0: 50}), [P0])
    assert reads.starts(FakeClient({}), [P0])[P0].offset == begin
    assert starts(FakeClient({0: 50}), [added], as_one, subscribed=["t", "u"])[added].offset == begin
    assert starts(FakeClient({0: 50}), [added], latest, subscribed=["t", "u"])[added].offset == 100
    assert starts(FakeClient({}), [added], as_one, subscribed=["t", "u"])[added].offset == 100


def test_what_cannot_be_read_is_not_guessed() -> None:
    """An error about one partition is an error, not "nothing committed"; nor is it when another topic is looked at."""
    error = confluent_kafka.KafkaError(14)
    for policy in (ReadPolicy("earliest"), ReadPolicy("latest")):
        made = resolver(policy)
        assert (made.starts(FakeClient({}, error=error), [P0]), made.is_open(P0)) == ({}, True)
    with pytest.raises(confluent_kafka.KafkaException):
        has_committed(FakeClient({}, error=error), ["t"])
