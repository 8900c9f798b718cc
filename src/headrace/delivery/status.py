"""The status of a pump while it runs, and the settings that can be changed then."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from headrace.delivery.breaker import BreakerStatus
from headrace.delivery.lane import Lane
from headrace.delivery.lane_state import LaneState
from headrace.delivery.outcomes import Membership
from headrace.delivery.pump_context import DeadLetterBatch, PumpContext, Work
from headrace.records import TopicPartition

_SLOW_SECONDS = 5.0
"""A delivery that is in flight for so long counts as slow."""


class SettingsInForce(msgspec.Struct, frozen=True, rename="camel"):
    """The settings that hold now."""

    rate_records: float | None
    """Records per second at most, over all partitions; None for no limit."""
    max_records: int
    """Records per delivery at most."""
    max_bytes: int
    """Bytes of keys and values per delivery at most; one record always fits."""
    linger_seconds: float
    """How long a delivery waits to fill up."""
    max_in_flight: int
    """Deliveries in flight at a time at most; fewer while the destination refuses some."""


class HeadRecord(NamedTuple):
    """The first record of a partition that has not ended."""

    offset: int
    timestamp_ms: int
    attempts: int
    """Deliveries of it so far, one in flight included."""
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


def status_of(lane: Lane, context: PumpContext, member: Membership | None) -> PartitionStatus:
    """Return where a pump stands in a partition. Costs a look at every open record there, at most."""
    tracker, offset = lane.tracker, lane.tracker.frontier
    record = lane.find(offset) if tracker.has_open else None
    head = None
    if record:
        begun = lane.begun(offset)
        head = HeadRecord(offset, record.timestamp_ms, begun.attempts if begun else 0, lane.head_since)
    condition = lane.condition
    why = condition.reason if condition.is_ending or condition.state is LaneState.PAUSED else ""
    why = why or (member.trouble(lane.partition) if member else "")
    why = why or (_why(lane, context) if record else condition.reason)
    if offset in lane.acks.held and context.clock.time() - lane.head_since >= _SLOW_SECONDS:
        why = why or f"offset {offset} waits for its explicit acknowledgement"
    return PartitionStatus(
        tracker.epoch,
        tracker.position,
        tracker.commit_offset,
        tracker.open_records,
        lane.in_flight.records,
        head,
        why or (member.pause_reason(lane.partition) if member else ""),
    )


def _why(lane: Lane, context: PumpContext) -> str:
    """Return why the first unfinished record has not ended, in one sentence; empty while it moves."""
    if lane.condition.is_blocked:
        return lane.condition.reason
    breaker, limit = context.breaker, context.breaker.limit
    begun = lane.begun(lane.tracker.frontier)
    if begun and begun.since is not None:
        return _in_flight(lane, begun.work, context.clock.monotonic() - begun.since)
    not_due = lane.condition.reason if lane.condition.state is LaneState.NOT_DUE else ""
    if why := breaker.waits_for or (begun.why if begun else "") or not_due or context.rate.waits_for:
        return why
    if limit.in_flight >= limit.concurrency and not lane.in_flight:
        return f"all {limit.concurrency} deliveries that may be in flight at a time are those of other partitions"
    return ""


def _in_flight(lane: Lane, work: Work, seconds: float) -> str:
    if seconds < _SLOW_SECONDS:
        return ""
    if isinstance(work, DeadLetterBatch):
        first = work.dead_letters[0].record.offset
        return f"dead letters={len(work.dead_letters)} from offset {first} on are not acknowledged for {seconds:.0f} s"
    return (
        f"the handler is slow: offset {lane.tracker.frontier} is in flight for {seconds:.0f} s, "
        f"attempt {work.attempt}, and no response has come"
    )
