"""Transactions by their pure parts: the coordinator, the sequence numbers of a partition, its markers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from headrace_devkit.simulation.producer_states import AppendedBatch, ProducerStates
from headrace_devkit.simulation.transaction_coordinator import LAST_EPOCH, ProducerEpoch, TransactionCoordinator

PLACE, OTHER = ("t", 0), ("t", 1)


def code_of(call: Callable[[], Any]) -> str:
    """Return the name of the error that a call raises; empty if there is none."""
    try:
        call()
    except KafkaException as cause:
        return str(cause.args[0].name())
    return ""


class Writer:
    """A transactional id `x` with its producer."""

    def __init__(self) -> None:
        self.coordinator = TransactionCoordinator()
        self.producer = self.coordinator.open("x", 10.0)

    def add(self, now: float = 0.0) -> bool:
        return self.coordinator.add("x", self.producer, [PLACE], now)

    def end(self, committed: bool = True, version: int = 1, producer: ProducerEpoch | None = None) -> ProducerEpoch:
        return self.coordinator.end("x", producer or self.producer, committed=committed, version=version)

    def mark(self) -> bool:
        transaction = self.coordinator.transaction("x")
        assert transaction
        return self.coordinator.marked("x", PLACE, transaction.marker)

    @property
    def state(self) -> str:
        transaction = self.coordinator.transaction("x")
        assert transaction
        return transaction.state


def test_a_transaction_ends_when_each_partition_has_its_marker() -> None:
    writer = Writer()
    assert (writer.add(), writer.add()) == (True, False)
    writer.end()
    assert (writer.state, code_of(writer.add), code_of(writer.end)) == (
        "prepare_commit",
        "CONCURRENT_TRANSACTIONS",
        "CONCURRENT_TRANSACTIONS",
    )
    assert writer.mark()
    assert (writer.state, code_of(writer.end)) == ("complete_commit", "")
    assert code_of(lambda: writer.end(committed=False)) == "INVALID_TXN_STATE"
    assert writer.add()


def test_a_late_end_ends_the_next_transaction_unless_each_has_an_epoch() -> None:
    """Of version 1 all transactions have one epoch; of version 2 the late request is fenced. Source: KIP-890."""
    writer = Writer()
    for version, refusal in ((1, ""), (2, "PRODUCER_FENCED")):
        old = writer.producer
        writer.add()
        writer.producer = writer.end(version=version)
        writer.mark()
        assert code_of(lambda: writer.end(version=version, producer=old)) == ""  # noqa: B023 a repeated request
        writer.add()
        assert code_of(lambda: writer.end(version=version, producer=old)) == refusal  # noqa: B023
        if version == 1:
            writer.mark()


def test_a_producer_that_continues_may_repeat_its_request() -> None:
    writer = Writer()
    opened = [writer.coordinator.open("x", 10.0, writer.producer) for _ in range(2)]
    assert opened == [ProducerEpoch(writer.producer.id, 1)] * 2


def test_the_last_epoch_is_followed_by_another_id() -> None:
    writer = Writer()
    transaction = writer.coordinator.transaction("x")
    assert transaction
    transaction.epoch = LAST_EPOCH
    opened = writer.coordinator.open("x", 10.0)
    assert (opened.id != writer.producer.id, opened.epoch) == (True, 0)


def test_only_partitions_of_the_transaction_are_written() -> None:
    writer = Writer()
    writer.add()
    verify = lambda key: code_of(lambda: writer.coordinator.verify("x", writer.producer, key))  # noqa: E731
    assert (verify(PLACE), verify(OTHER)) == ("", "TRANSACTION_ABORTABLE")
    writer.end()
    assert verify(PLACE) == "CONCURRENT_TRANSACTIONS"


@pytest.mark.parametrize(
    ("epoch", "sequence", "count", "expected"),
    [
        (1, 3, 1, None),
        (1, 0, 3, 100),
        (1, 0, 2, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER),
        (1, 4, 1, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER),
        (0, 0, 1, KafkaError.INVALID_PRODUCER_EPOCH),
        (2, 0, 1, None),
        (2, 3, 1, KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER),
    ],
)
def test_the_leader_takes_the_next_sequence_number_only(epoch: int, sequence: int, count: int, expected: Any) -> None:
    states = ProducerStates()
    first = ProducerEpoch(7, 1)
    assert states.check(first, 40, 3) is None  # of a producer that is not known
    states.appended(first, AppendedBatch(0, 2, 100))
    try:
        found: Any = states.check(ProducerEpoch(7, epoch), sequence, count)
    except KafkaException as cause:
        found = cause.args[0].code()
    assert found == expected


def test_a_marker_fences_earlier_epochs() -> None:
    states = ProducerStates()
    states.marked(ProducerEpoch(7, 3))
    assert code_of(lambda: states.check(ProducerEpoch(7, 2), 0, 1)) == "INVALID_PRODUCER_EPOCH"
    assert code_of(lambda: states.marked(ProducerEpoch(7, 2))) == "INVALID_PRODUCER_EPOCH"
