"""What is seen and changed of a pump while it runs: where each partition stands and why, and how much is delivered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headrace.delivery.backlog import LaneRules
from headrace.delivery.batch import Batch
from headrace.delivery.breaker import BreakerStatus
from headrace.delivery.lane import Lane
from headrace.delivery.protocols import Membership
from headrace.records import Record, TopicPartition

_SLOW_SECONDS = 5.0
"""A delivery that is under way for so long is said to be slow."""


class LiveSettings(NamedTuple):
    """How much a pump delivers; can be changed while it runs."""

    rate_records: float | None
    """Records per second at most, over all partitions; None for no limit."""
    max_records: int
    """Records per delivery at most."""
    max_bytes: int
    """Bytes of keys and values per delivery at most; one record always fits."""
    linger_seconds: float
    """How long a delivery waits to fill up."""
    max_in_flight: int
    """Deliveries under way at a time at most; fewer while the destination pushes back."""


class HeadRecord(NamedTuple):
    """The first record of a partition that has not ended."""

    offset: int
    timestamp_ms: int
    attempts: int
    """Deliveries of it so far, one under way included."""
    since: float
    """Since when it is the first; seconds since the epoch."""


class PartitionStatus(NamedTuple):
    """Where a pump stands in one partition of its assignment."""

    epoch: int
    """Number of the assignment."""
    position: int | None
    """The offset that comes next from Kafka; None as long as it is not known."""
    committed: int | None
    """What is committed, or will be within a moment; None as long as nothing is."""
    open_records: int
    """Records taken from Kafka that have not ended."""
    in_flight: int
    """Those of them that are being delivered."""
    head: HeadRecord | None
    why: str
    """Why it does not move, in one sentence; empty while it does."""


class PumpStatus(NamedTuple):
    """Where a pump stands."""

    partitions: Mapping[TopicPartition, PartitionStatus]
    """Those of the present assignment."""
    breaker: BreakerStatus


def status_of(lane: Lane, rules: LaneRules, member: Membership | None) -> PartitionStatus:
    """Return where a pump stands in a partition. Costs a look at what is open there, at most."""
    tracker, offset = lane.tracker, lane.tracker.frontier
    batch, pause, began = next(
        ((batch, why, at) for batch, why, at in lane.begun() if batch.has(offset)), (None, "", None)
    )
    record = _find(lane, batch, offset) if tracker.has_open else None
    head = None
    if record:
        tried = batch.attempt - (began is None and not batch.letters) if batch else 0
        head = HeadRecord(offset, record.timestamp_ms, tried, lane.head_since)
    return PartitionStatus(
        tracker.epoch,
        tracker.position,
        tracker.commit_offset,
        tracker.open_records,
        sum(len(batch.records) for batch in lane.under_way.values()),
        head,
        lane.leaves
        or lane.held
        or (member.trouble(lane.partition) if member else "")
        or (_why(lane, rules, batch, pause, began) if record else lane.trouble)
        or (member.pause_reason(lane.partition) if member else ""),
    )


def _why(lane: Lane, rules: LaneRules, batch: Batch | None, pause: str, began: float | None) -> str:
    """Return why the first unfinished record has not ended, in one sentence; empty while it moves."""
    if lane.blocked:
        return lane.trouble
    if batch and began is not None:
        return _under_way(lane, batch, rules.clock.monotonic() - began)
    if rules.breaker.waits_for or pause or lane.sleeps or rules.rate.waits_for:
        return rules.breaker.waits_for or pause or lane.sleeps or rules.rate.waits_for
    limit = rules.breaker.limit
    if limit.under_way >= limit.places and not lane.under_way:
        return f"all {limit.places} deliveries that may be under way at a time are those of other partitions"
    return ""


def _under_way(lane: Lane, batch: Batch, seconds: float) -> str:
    if seconds < _SLOW_SECONDS:
        return ""
    if batch.letters:
        first = batch.letters[0].record.offset
        return f"dead letters={len(batch.letters)} from offset {first} on are not acknowledged for {seconds:.0f} s"
    return (
        f"the handler is slow: offset {lane.tracker.frontier} is in flight for {seconds:.0f} s, "
        f"attempt {batch.attempt}, and no answer has come"
    )


def _find(lane: Lane, batch: Batch | None, offset: int) -> Record | None:
    records = batch.records if batch else lane.waiting()
    return next((record for record in records if record.offset == offset), None)
