"""What people are told of a consumer, from what the process knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.control.lag import PartitionLag
from headrace.control.steered_status import PartitionStatus, Statuses
from headrace.delivery.live import PartitionStatus as Here
from headrace.delivery.live import PumpStatus
from headrace.records import TopicPartition

PLACE = TopicPartition("orders", 0)


def status(here: Here, lag: PartitionLag | None) -> PartitionStatus:
    """Return what is told of the one partition a process has."""
    clock: Any = SimpleNamespace(time=lambda: 0.0)
    pump: Any = SimpleNamespace(group="billing", status=lambda: PumpStatus({PLACE: here}, None))  # type: ignore[arg-type]
    steering: Any = SimpleNamespace(holds_of=lambda consumer: {})
    statuses = Statuses(steering, lambda group: {PLACE: lag} if lag else {}, "here:1", clock)
    consumer: Any = SimpleNamespace(pumps=[pump], group="billing", reads=lambda topic: True)
    (found,) = statuses._partitions(consumer, None)
    return found


def here(position: int | None, committed: int | None) -> Here:
    return Here(1, position, committed, 0, 0, None, "")


def test_the_log_ends_no_earlier_than_what_was_read_of_it() -> None:
    """Ends are asked for every few seconds, and a lag of 0 beside records that wait would be a lie."""
    found = status(here(31, 0), PartitionLag(PLACE, 0, 0, 0, 0))
    assert (found.end, found.lag) == (31, 31)


@pytest.mark.parametrize(("position", "lag"), [(None, None), (31, 31)])
def test_before_anybody_has_asked_the_lag_is_at_least_what_was_read(position: int | None, lag: int | None) -> None:
    """Without a position nothing is known."""
    assert status(here(position, 0), None).lag == lag


def test_a_transaction_that_holds_records_back_is_the_reason() -> None:
    """The log goes on behind what can be read, and everything that can be is read."""
    found = status(here(5, 5), PartitionLag(PLACE, 5, 5, 0, 9))
    assert found.why.startswith("a transaction is open at offset 5")
    assert status(here(4, 4), PartitionLag(PLACE, 4, 5, 1, 9)).why == ""
