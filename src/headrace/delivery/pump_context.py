"""What the parts of one pump share: its settings, its counters, and what is delivered together."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

from headrace.config.consumers import BatchConfig, Ordering, RetryConfig
from headrace.delivery.breaker import Breaker
from headrace.delivery.explicit_acks import AckRules
from headrace.delivery.limit import DeliveryRate
from headrace.delivery.outcomes import DeadLetter, DelayedRecord, KeyUnblocker, OnEnded, Outcome, PartitionListener
from headrace.records import Record, RecordBatch, TopicPartition
from headrace.runtime import Clock

_NAMES = {
    Outcome.DELIVERED: "delivered",
    Outcome.HANDED_OFF: "handed_off",
    Outcome.DEAD_LETTER: "dead_letters",
    Outcome.DELAYED: "delayed",
    Outcome.SKIPPED: "skipped",
    Outcome.SKIPPED_BY_HAND: "skipped_by_hand",
    Outcome.GIVEN_UP: "given_up",
}


class Counts:
    """What a pump has done since it began."""

    def __init__(self) -> None:
        self.ended = dict.fromkeys(_NAMES, 0)
        """Records that ended, by outcome."""
        self.taken = 0
        """Records the source handed over."""
        self.redeliveries = 0
        """Attempts after the first, in records."""
        self.refusals = 0
        """Deliveries the destination as a whole did not take."""
        self.gap = 0
        """Offsets that were removed from the log before they were read, and passed as `on_gap` allows."""
        self.already_completed = 0
        """Records that had ended before a restart, a rebalance or a seek, and are not delivered again."""
        self.in_flight_at_revoke = 0
        """Records in flight when their partition had to be given up: so many duplicates to expect."""
        self.late_results = 0
        """Records that ended after their partition was given up; they are delivered again by its next owner."""
        self.commits = 0
        """Positions of partitions that were handed to the source."""
        self.assignment_changes = 0
        """Times that partitions were assigned, revoked or lost."""

    def read(self) -> dict[str, int]:
        """Return every count by its name."""
        others = {name: count for name, count in vars(self).items() if name != "ended"}
        return {**others, **{_NAMES[outcome]: count for outcome, count in self.ended.items()}}


class PumpHooks(NamedTuple):
    """What else a pump calls or is; all of it is optional."""

    on_ended: OnEnded | None = None
    """Called with what has ended."""
    partitions: PartitionListener | None = None
    """Follows which partitions the pump has."""
    most_records: Callable[[], int] | None = None
    """Returns how many records the next delivery may hold; never more than the settings allow."""
    blocked_keys: KeyUnblocker | None = None
    """Unblocks keys of records that are skipped by hand, or come again after a seek."""
    delayed: Callable[[Record], DelayedRecord] | None = None
    """Decodes a record of a retry topic. The pump is paused with the one it shares with, and under the same rate."""
    replay: str = ""
    """Id of the replay job; empty for deliveries of the group."""
    commit_seconds: float = 0.2
    """Time from one commit to the next."""
    acks: AckRules = AckRules()
    """How commits and revokes wait for acknowledgements."""


@dataclasses.dataclass(slots=True)
class PumpContext:
    """What the lanes and the deliverer of one pump share."""

    group: str
    ordering: Ordering
    batch: BatchConfig
    """Size of deliveries; changes while the pump runs."""
    retry: RetryConfig
    clock: Clock
    chance: Random
    counts: Counts
    breaker: Breaker
    rate: DeliveryRate
    lanes: Mapping[TopicPartition, Any]
    """The lanes of the present assignment."""
    later: Callable[[float, Callable[[], None]], asyncio.Task[None]]
    """Calls something after a pause, unless the task is cancelled."""
    delayed: Callable[[Record], DelayedRecord] | None
    """In a pump of retry topics: decodes a record. Such records are delivered one by one, when they are due."""
    portion: Callable[[], int] | None
    """Returns how many records the destination takes at a time now; None for as many as `batch` allows."""
    ack_window: int = 0
    """Records by which the committed offset stays behind what has ended."""

    @property
    def most_records(self) -> int:
        """Records of the next delivery at most."""
        most = self.batch.max_records
        return min(most, self.portion()) if self.portion else most


class Batch(NamedTuple):
    """Records that are delivered together, and their history."""

    records: RecordBatch
    attempt: int = 1
    first_failed_at: float = 0.0
    """Seconds since the epoch; 0 before the first failure."""
    refusals: int = 0
    """How often the destination did not take these records though it took others."""
    broken_off: int = 0
    """How often the destination closed the connection at these records, or at others with them."""
    suspected: int = 0
    """The newest attempt id when that happened first."""


class DeadLetterBatch(NamedTuple):
    """Dead letters that are to be written; their records have not ended before."""

    dead_letters: Sequence[DeadLetter]

    @property
    def records(self) -> RecordBatch:
        return RecordBatch.of([dead_letter.record for dead_letter in self.dead_letters])

    @property
    def attempt(self) -> int:
        """Deliveries of the first record so far."""
        return self.dead_letters[0].attempts


Work = Batch | DeadLetterBatch
"""What a worker does for a lane."""
