"""What the parts of one pump share: its settings, its counters, and what is delivered together."""

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.config.consumers import BatchConfig, Ordering, RetryConfig
from headrace.delivery.breaker import Breaker
from headrace.delivery.explicit_acks import AckRules
from headrace.delivery.limit import DeliveryRate
from headrace.delivery.outcomes import DeadLetter, DelayedRecord, KeyUnblocker, OnCompleted, Outcome, PartitionListener
from headrace.records import Record, RecordBatch, TopicPartition
from headrace.runtime import Clock
from headrace.runtime.chance import Random

_NAMES = {
    Outcome.DELIVERED: "delivered",
    Outcome.HANDED_OFF: "handed_off",
    Outcome.DEAD_LETTER: "dead_letters",
    Outcome.DELAYED: "delayed",
    Outcome.FILTERED: "filtered",
    Outcome.SKIPPED: "skipped",
    Outcome.SKIPPED_BY_HAND: "skipped_by_hand",
    Outcome.DISCARDED: "discarded",
}


class Counts:
    """What a pump has done since it started."""

    def __init__(self) -> None:
        self.completed = dict.fromkeys(_NAMES, 0)
        """Completed records, by outcome."""
        self.taken = 0
        """Records received from the source."""
        self.redeliveries = 0
        """Attempts after the first, in records."""
        self.refusals = 0
        """Deliveries that the destination as a whole did not take."""
        self.gap = 0
        """Offsets that were removed from the log before they were read, and skipped as `on_gap` allows."""
        self.already_completed = 0
        """Records that were completed before a restart, a rebalance or a seek, and are not delivered again."""
        self.in_flight_at_revoke = 0
        """Records that were being delivered when their partition was revoked: the number of duplicates to expect."""
        self.late_results = 0
        """Records whose result arrived after their partition was revoked; its next owner delivers them again."""
        self.commits = 0
        """Commits of partitions."""
        self.assignment_changes = 0
        """Times that partitions were assigned, revoked or lost."""

    def read(self) -> dict[str, int]:
        """Return every count by its name."""
        others = {name: count for name, count in vars(self).items() if name != "completed"}
        return {**others, **{_NAMES[outcome]: count for outcome, count in self.completed.items()}}


class CommitPace(NamedTuple):
    """How often a partition is committed: after 100 records, and at the latest after `most_seconds`.

    Each commit is a record of Kafka. With few partitions they are cheap, and a crash repeats little.
    """

    seconds: float = 0.2
    """Time from one commit of a partition to its next, at least."""
    partitions: Callable[[], int] = int
    """Returns how many partitions the process has."""

    @property
    def most_seconds(self) -> float:
        return max(self.seconds, min(_MOST_COMMIT_SECONDS, (self.partitions() - _FEW) * _SECONDS_PER_PARTITION))


COMMIT_RECORDS = 100
"""After so many completed records a partition does not wait for its time."""
_FEW, _SECONDS_PER_PARTITION, _MOST_COMMIT_SECONDS = 50, 0.03, 30.0
"""Up to `_FEW` partitions nothing waits. Beyond, a process writes about 33 offset records a second by time."""


class PumpHooks(NamedTuple):
    """Optional parts and callbacks of a pump."""

    on_completed: OnCompleted | None = None
    """Called with completed records."""
    partitions: PartitionListener | None = None
    """Follows the partitions of the pump."""
    most_records: Callable[[], int] | None = None
    """Returns the record limit of the next delivery; the settings may lower it."""
    blocked_keys: KeyUnblocker | None = None
    """Unblocks keys of records that are skipped by hand, or are read again after a seek."""
    delayed: Callable[[Record], DelayedRecord] | None = None
    """Decodes a record of a retry topic. Pauses and the rate of the other pump apply to this one, too."""
    replay: str = ""
    """Id of the replay job; empty for deliveries of the group."""
    commits: CommitPace = CommitPace()
    """How often partitions are committed."""
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
    """The lanes of the current assignment."""
    later: Callable[[float, Callable[[], None]], asyncio.Task[None]]
    """Calls a function after a pause, unless the task is cancelled."""
    delayed: Callable[[Record], DelayedRecord] | None
    """In a pump of retry topics: decodes a record. Such records are delivered one by one, when they are due."""
    portion: Callable[[], int] | None
    """Returns how many records the destination takes at a time; None if only `batch` limits them."""
    ack_window: int = 0
    """Records by which the committed offset stays behind what is completed."""

    @property
    def most_records(self) -> int:
        """Most records of the next delivery."""
        most = self.batch.max_records
        return min(most, self.portion()) if self.portion else most


BROKEN_OFF = 3
"""After this many closed connections a delivery is split."""


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
    """The newest attempt id when that first happened."""

    @property
    def is_suspect(self) -> bool:
        """Whether it is one record at which the destination has repeatedly closed the connection."""
        return self.broken_off >= BROKEN_OFF and len(self.records) == 1


class DeadLetterBatch(NamedTuple):
    """Dead letters to write; their records are not completed before that."""

    dead_letters: Sequence[DeadLetter]

    @property
    def records(self) -> RecordBatch:
        return RecordBatch.of([dead_letter.record for dead_letter in self.dead_letters])

    @property
    def attempt(self) -> int:
        """Deliveries of the first record so far."""
        return self.dead_letters[0].attempts

    @property
    def first_failed_at(self) -> float:
        return self.dead_letters[0].first_failed_at


Work = Batch | DeadLetterBatch
"""What a worker does for a lane."""
