"""The contracts of the delivery core: where records come from, where they go, and how one delivery ends.

The core knows neither Kafka nor HTTP. A consumer of Kafka implements `Source`; a push backend and a function
implement `Destination`; a producer of dead letters implements `DeadLetterWriter`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

from headrace.errors import HeadraceError
from headrace.records import Committed, Record, TopicPartition

REPLAY = "X-Headrace-Replay"
"""Header that tells a backend or a function which job delivers a record once more."""


class Verdict(enum.Enum):
    """How one delivery of one record ended."""

    ACK = "ack"
    """Handled; the record has ended."""
    RETRY = "retry"
    """Failed this time; counts as an attempt and is delivered again after a pause."""
    DEAD_LETTER = "dead_letter"
    """Failed for good; goes to the dead letter topic without further attempts."""
    NOT_TAKEN = "not_taken"
    """Not delivered, though others of the delivery have ended; comes again and uses up no attempt."""


class Outcome(NamedTuple):
    """A verdict with its reason. Reasons never hold keys, values or secrets."""

    verdict: Verdict
    error: str = ""
    """Class of the failure, such as `ValueError` or `HTTP 400`."""
    reason: str = ""
    """What the destination said, cut to a paragraph."""
    status: int | None = None
    """HTTP status of the answer, when it speaks of the records and is not a success."""
    details: tuple[tuple[str, str], ...] = ()
    """What else the destination said of the record, by name: headers `headrace.dlq.<name>` of its dead letter."""
    stack: str = ""
    """The stack trace, cut; empty if there is none, or if `reason` is all that was said."""
    reached: bool = True
    """Whether the record came to the destination; if not, its outcome says nothing of the destination."""


ACK = Outcome(Verdict.ACK)
"""The outcome of a success; compared by identity on the hot path."""
ELSEWHERE = Outcome(Verdict.ACK, "elsewhere", reached=False)
"""The outcome of a record that has ended here without a delivery: it waits in a tier, or was not asked for."""


def not_taken(cause: HeadraceError) -> Outcome:
    """Return the outcome of a record that did not reach its destination."""
    return Outcome(Verdict.NOT_TAKEN, cause.description, reached=False)


class Delivery(NamedTuple):
    """One attempt to deliver records of one partition, in offset order."""

    group: str
    partition: TopicPartition
    epoch: int
    """Number of the live assignment of the partition; 0 if this process has none, and the destination is told none."""
    records: Sequence[Record]
    attempt: int
    """1 for the first attempt of these records."""
    replay: str = ""
    """Id of the job that delivers them once more; empty for what the group delivers."""


class Waiting(NamedTuple):
    """What a record in a retry tier is, and has been through."""

    origin: Record
    """The record as it lies in the topic it came from."""
    attempts: int = 0
    """Deliveries so far."""
    first_failed_at: float = 0.0
    """Seconds since the epoch; 0 if it has not failed, and waits behind one that has."""
    due: float = 0.0
    """When it may be delivered again, seconds since the epoch."""
    parked: int | None = None
    """Offset of its entry among the parked keys; None if the order of its key is not kept."""
    delay_seconds: float = math.inf
    """How long it waits at most from when this process saw it, whatever the clock of its writer says."""


EpochOf = Callable[[TopicPartition], int]
"""Returns the epoch of a partition's live assignment in this process; 0 if it has none."""


def no_epoch(_: TopicPartition) -> int:
    """Return 0: no partition has a live assignment."""
    return 0


class Destination(Protocol):
    """Takes deliveries: a backend or a function."""

    async def deliver(self, delivery: Delivery) -> Sequence[Outcome]:
        """Deliver records and say how each ended, in the order of the records.

        If cancelled, the records may or may not have been handled; they will be delivered again.

        Raises:
            DeliveryError: The destination as a whole failed; no record's attempts are used up, and the delivery
                is repeated after a pause until it succeeds or its partition is revoked.
        """


class DeadLetterWriter(Protocol):
    """Writes dead letters."""

    async def write(self, letters: Sequence[DeadLetter]) -> Collection[int] | None:
        """Write every letter and return when all are acknowledged by all in-sync replicas.

        Returns:
            Places of those that are no dead letters yet and will be delivered again, because a retry tier took them.

        Raises:
            DeadLetterFailed: At least one is not acknowledged; the call is repeated, so letters may come twice.
        """


class DeadLetter(NamedTuple):
    """A record that could not be delivered, and its history."""

    record: Record
    group: str
    attempts: int
    outcome: Outcome
    first_failed_at: float
    """Seconds since the epoch."""
    last_failed_at: float
    """Seconds since the epoch."""


class Witness(Protocol):
    """Is told of everything that has ended, on the loop and in whole batches; so it keeps them, and works later."""

    def __call__(
        self, records: Sequence[Record], size_bytes: int, how: str, outcomes: Sequence[Outcome], replay: str
    ) -> None:
        """Take note of records that have ended together.

        Args:
            records: As they lie where they came from at first.
            size_bytes: What they count for.
            how: `delivered`, `dead letter`, `skipped`, `given up`, or `skipped by hand` with the reason.
            outcomes: What was said of each, if anything was.
            replay: Id of the job that delivered them once more; else empty.
        """


class Source(Protocol):
    """Where records come from: a consumer of Kafka, or a fake."""

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        """Give back room: so many records and bytes of the partition have ended."""

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        """Commit offsets with what lies beside them; returns at once, the newest call per partition wins."""


class Membership(Protocol):
    """How a consumer stands in its group: why nothing comes, and another place to go on at."""

    @property
    def keeps_offsets_elsewhere(self) -> bool:
        """Whether somebody else says where this group goes on, so that it cannot be sent anywhere."""

    def trouble(self, partition: TopicPartition) -> str:
        """Return why nothing comes from a partition, or from any, in one sentence; empty while it does."""

    def pause_reason(self, partition: TopicPartition) -> str:
        """Return why a partition is not fetched now though nothing is wrong; empty while it is fetched."""

    async def seek(self, partition: TopicPartition, epoch: int, offset: int) -> bool:
        """Commit another offset, in the place of everything that was reached in this epoch, and go on there.

        Nothing that was fetched before comes after that; the partition is assigned anew, in a new epoch.

        Returns:
            True once the commit is acknowledged; False if the partition is not ours any more in this epoch.
        """
