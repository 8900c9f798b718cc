"""The contracts of the delivery core: where records come from, where they go, and the outcome of each.

The core knows neither Kafka nor HTTP. A consumer of Kafka implements `Source` and `Membership`; a push backend and a
function implement `Destination`; the writer of dead letters and the retry topics implement `DeadLetterWriter`.
"""

import enum
import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

from headrace.errors import HeadraceError
from headrace.records import CommitOffsets, Committed, Record, TopicPartition
from headrace.runtime import Deadline

REPLAY = "X-Headrace-Replay"
"""Header with the id of the replay job that delivers a record."""


class Outcome(enum.StrEnum):
    """What happens to a record after a delivery. Only `policy.judge` decides it."""

    DELIVERED = "delivered"
    """Completed: the destination took it."""
    AWAITING_ACK = "awaiting acknowledgement"
    """Delivered, and in flight until it is acknowledged explicitly."""
    HANDED_OFF = "handed_off"
    """Completed without a delivery: it is blocked by its key, was delivered before, or was not requested."""
    FILTERED = "filtered"
    """Completed without a delivery: it does not meet the condition of its consumer."""
    SKIPPED = "skipped"
    """Completed: the policy treats its failure as already handled."""
    SKIPPED_BY_HAND = "skipped by hand"
    """Completed: an operator skipped it, with a reason."""
    DEAD_LETTER = "dead letter"
    """Failed for good; completed once it is in the dead letter topic."""
    DELAYED = "delayed"
    """Completed here: it is in a retry topic, from which it is delivered again."""
    DISCARDED = "discarded"
    """Failed for good, and discarded without a dead letter because `retry.last_retry` is on."""
    RETRY = "retry"
    """Failed; delivered again after a pause, as its next attempt."""
    ROLL_BACK = "roll back"
    """Too much of its delivery failed; the whole delivery is repeated, as its next attempt."""
    SPLIT = "split"
    """Failed with others by one response that blames no single record; delivered in halves, as the same attempt."""
    UNAVAILABLE = "unavailable"
    """The destination is to blame; delivered again, as the same attempt."""


class Reply(NamedTuple):
    """What a destination reported about one record. It never contains keys, values or secrets."""

    error: str = ""
    """Class of the failure, such as `ValueError` or `HTTP 400`; empty for a success."""
    reason: str = ""
    """Text of the failure, cut to a paragraph."""
    status: int | None = None
    """HTTP status of the response, if it concerns the records and is not a success."""
    details: tuple[tuple[str, str], ...] = ()
    """Further facts by name: headers `headrace.dlq.<name>` of the dead letter."""
    stack: str = ""
    """The stack trace, cut; empty if there is only a `reason`."""
    reached: bool = True
    """Whether the record reached the destination; if not, its reply says nothing about the destination."""
    permanent: bool = False
    """Whether another attempt cannot succeed."""
    shared: bool = False
    """Whether it concerns several records and blames none of them, as does a status of several records."""
    awaiting_ack: bool = False
    """Whether the record was delivered, and is not completed before it is acknowledged explicitly."""
    calls: int = 1
    """How often the destination was called for the record; more than once if its workers died."""


ACK = Reply()
"""A success; compared by identity on the fast path."""
AWAITING_ACK = Reply(awaiting_ack=True)
"""A success that does not complete the record."""
NOT_BEGUN = Reply("not begun", reached=False)
"""The record was not started: its partition is being revoked, or it waits for an earlier record that failed."""
HANDED_OFF = Reply(reached=False)
"""The record is completed here without a delivery: it waits in a retry topic, or was not requested."""

FILTERED = Reply(reason="where is not true", reached=False)
"""The record does not meet the condition `where`; it is completed, counted and audited."""


def not_taken(cause: HeadraceError) -> Reply:
    """Return the reply for a record that did not reach its destination, though others of its delivery did."""
    return Reply(cause.description or "not taken", reached=False)


def in_turn(replies: Sequence[Reply]) -> list[Reply]:
    """Return the replies in order `partition`: what follows the first record that is retried has not begun."""
    first = next((index for index, reply in enumerate(replies) if reply.error and not reply.permanent), len(replies))
    return [*replies[: first + 1], *[NOT_BEGUN] * (len(replies) - first - 1)]


class Delivery(NamedTuple):
    """One attempt to deliver records of one partition, in offset order."""

    group: str
    partition: TopicPartition
    epoch: int
    """Number of the partition's live assignment; 0 if this process has none."""
    records: Sequence[Record]
    """A `RecordBatch` as a rule; `RecordBatch.of` returns its columns."""
    attempt: int
    """1 for the first attempt of these records."""
    replay: str = ""
    """Id of the replay job; empty for deliveries of the group."""


class DelayedRecord(NamedTuple):
    """A record in a retry topic: what it was, its history, and when it is due."""

    origin: Record
    """The record as it is in its original topic."""
    attempts: int = 0
    """Deliveries so far."""
    first_failed_at: float = 0.0
    """Seconds since the epoch; 0 if it has not failed, and is blocked by one that has."""
    due: float = 0.0
    """When it may be delivered again, seconds since the epoch."""
    entry: int | None = None
    """Offset of its entry in the topic of blocked keys; None if the order of its key is not kept."""
    table_id: str = ""
    """Kafka's id of that topic; empty if it was not known."""
    delay_seconds: float = math.inf
    """Longest wait after this process received it, whatever the writer's clock was."""


EpochOf = Callable[[TopicPartition], int]
"""Returns the epoch of a partition's live assignment in this process; 0 if it has none."""


def no_epoch(_: TopicPartition) -> int:
    """Return 0: no partition has a live assignment."""
    return 0


class Destination(Protocol):
    """Takes deliveries: a backend or a function."""

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        """Deliver records and return a reply for each, in the order of the records.

        If it is cancelled, the records may have been handled; they will be delivered again.

        Raises:
            DeliveryError: The destination as a whole failed. No attempt is used up. The delivery is repeated after a
                pause until it succeeds or its partition is revoked.
        """


class DeadLetter(NamedTuple):
    """A record that could not be delivered, and its history."""

    record: Record
    group: str
    attempts: int
    reply: Reply
    first_failed_at: float
    """Seconds since the epoch."""
    last_failed_at: float
    """Seconds since the epoch."""


class DeadLetterWriter(Protocol):
    """Writes dead letters."""

    async def write(self, dead_letters: Sequence[DeadLetter]) -> Collection[int] | None:
        """Write every dead letter until all in-sync replicas have it; return indexes of those in a retry topic.

        Raises:
            DeadLetterFailed: At least one is not acknowledged; it will be retried, so some may be written twice.
        """


class OnCompleted(Protocol):
    """Called on the event loop with records that were completed together. Must not block."""

    def __call__(
        self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply], replay: str
    ) -> None:
        """Report completed records.

        Args:
            how: `DELIVERED`, `DEAD_LETTER`, `FILTERED`, `SKIPPED`, `DISCARDED` or `SKIPPED_BY_HAND`.
            replies: The reply for each record that was not delivered; its `error` is the reason of a skip by hand.
            replay: Id of the replay job; otherwise empty.
        """


class PartitionListener:
    """Follows the partitions of a pump, for a destination with state for each; a subclass overrides what it needs."""

    def assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Add partitions, before their first record."""

    def draining(self, partitions: Collection[TopicPartition]) -> None:
        """Begin nothing more of partitions that are about to be revoked."""

    async def drained(self, partitions: Collection[TopicPartition], deadline: Deadline) -> None:
        """Close partitions before a revoke, while deliveries in flight may still finish; also called after a loss."""


class KeyUnblocker:
    """Unblocks keys that records in retry topics block; a subclass overrides what it needs."""

    async def unblock(self, record: Record) -> None:
        """Unblock the key of a record that is skipped.

        Raises:
            DeadLetterFailed: The write failed, so the record is not completed.
        """

    async def rewind(self, partition: TopicPartition, offset: int) -> None:
        """Unblock the keys of records from an offset on, which will be read again.

        Raises:
            DeadLetterFailed: The write failed.
        """


class Source(Protocol):
    """Where records come from: a consumer of Kafka, or a fake."""

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        """Release the bytes of completed records of a partition."""

    def commit(self, offsets: CommitOffsets) -> None:
        """Commit offsets and their metadata; returns at once, and the newest call per partition wins."""


class Membership(Protocol):
    """A consumer's membership of its group: why nothing arrives, and how to seek to another offset."""

    @property
    def keeps_offsets_elsewhere(self) -> bool:
        """Whether the backend stores the group's offsets, so that a seek is not possible."""

    def trouble(self, partition: TopicPartition) -> str:
        """Return why a partition cannot be read, in one sentence; empty if it can."""

    def pause_reason(self, partition: TopicPartition) -> str:
        """Return why fetching of a partition is paused although nothing failed; empty while it is fetched."""

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        """Commit another offset instead of the position of this epoch, and continue to read there.

        Nothing that was fetched before is handed over afterwards; the partition is assigned again, in a new epoch.
        Return True once the commit is acknowledged, and False if the partition is no longer assigned in this epoch.
        """
