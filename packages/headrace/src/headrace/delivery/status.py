"""The status of a running pump, and the settings that can be changed while it runs."""

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
"""A delivery that takes longer counts as slow."""
_MANY_RECORDS, _MUCH = 50, 0.2
"""The share of a key in fewer records, or a smaller one, says little."""


class SettingsInForce(msgspec.Struct, frozen=True, rename="camel"):
    """The current settings."""

    rate_records: float | None
    """Most records per second, over all partitions; None for no limit."""
    max_records: int
    """Most records per delivery."""
    max_bytes: int
    """Most bytes of keys and values per delivery; one record always fits."""
    linger_seconds: float
    """How long a delivery waits for more records."""
    max_in_flight: int
    """Most deliveries in flight at a time; fewer while the destination refuses some."""


class HeadRecord(NamedTuple):
    """The first record of a partition that is not completed."""

    offset: int
    timestamp_ms: int
    attempts: int
    """Deliveries of it so far, including one in flight."""
    since: float
    """When it became the first; seconds since the epoch."""


class PartitionStatus(NamedTuple):
    """The progress of a pump in one partition of its assignment."""

    epoch: int
    """Number of the assignment."""
    position: int | None
    """The next offset to receive from Kafka; None while it is not known."""
    committed: int | None
    """The committed offset, or the one that will be committed next; None while there is none."""
    records_in_flight: int
    """Records received from Kafka that are not completed."""
    in_flight: int
    """Those of them that are being delivered now."""
    head: HeadRecord | None
    why: str
    """Why it does not move, in one sentence; empty while it does."""
    key_share: float | None = None
    """With order `key`: the share of one key in the records in flight, if many have it; they wait for each other."""


class PumpStatus(NamedTuple):
    """The progress of a pump."""

    partitions: Mapping[TopicPartition, PartitionStatus]
    """Those of the current assignment."""
    breaker: BreakerStatus


def status_of(lane: Lane, context: PumpContext, member: Membership | None) -> PartitionStatus:
    """Return the progress of a pump in a partition. Reads each record in flight there at most once."""
    tracker = lane.tracker
    offset = tracker.frontier
    record = lane.find(offset) if tracker.has_in_flight else None
    head = None
    if record:
        begun = lane.begun(offset)
        head = HeadRecord(offset, record.timestamp_ms, begun.attempts if begun else 0, lane.head_since)
    condition = lane.condition
    why = condition.reason if condition.is_ending or condition.state is LaneState.PAUSED else ""
    why = why or (member.trouble(lane.partition) if member else "")
    why = why or (_why(lane, context) if record else condition.reason)
    if offset in lane.acks.awaiting_ack and context.clock.time() - lane.head_since >= _SLOW_SECONDS:
        why = why or f"offset {offset} waits for its explicit acknowledgement"
    share = round(lane.backlog.most_of_key / max(1, tracker.in_flight_records), 2)
    return PartitionStatus(
        tracker.epoch,
        tracker.position,
        tracker.commit_offset,
        tracker.in_flight_records,
        lane.in_flight.records,
        head,
        why or (member.pause_reason(lane.partition) if member else ""),
        share if tracker.in_flight_records >= _MANY_RECORDS and share >= _MUCH else None,
    )


def _why(lane: Lane, context: PumpContext) -> str:
    """Return why the first record is not completed, in one sentence; empty while it makes progress."""
    if lane.condition.is_blocked:
        return lane.condition.reason
    breaker = context.breaker
    limit = breaker.limit
    begun = lane.begun(lane.tracker.frontier)
    if begun and begun.since is not None:
        return _in_flight(lane, begun.work, context.clock.monotonic() - begun.since)
    not_due = lane.condition.reason if lane.condition.state is LaneState.NOT_DUE else ""
    if why := breaker.waits_for or (begun.why if begun else "") or not_due or context.rate.waits_for:
        return why
    if limit.in_flight >= limit.concurrency and not lane.in_flight.each:
        return f"limit reached: all {limit.concurrency} deliveries in flight are of other partitions"
    return ""


def _in_flight(lane: Lane, work: Work, seconds: float) -> str:
    if seconds < _SLOW_SECONDS:
        return ""
    if isinstance(work, DeadLetterBatch):
        first = work.dead_letters[0].record.offset
        return (
            f"dead letters={len(work.dead_letters)} from offset {first} on are not acknowledged after {seconds:.0f} s"
        )
    return (
        f"the handler is slow: no response for offset {lane.tracker.frontier} after {seconds:.0f} s, "
        f"attempt {work.attempt}"
    )
