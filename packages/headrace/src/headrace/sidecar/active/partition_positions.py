"""The partitions of an instance: how far its client is in each, and which offsets its client may name."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from headrace.errors import CommitRefused, InstanceState
from headrace.kafka.names import names_of
from headrace.records import CommitOffsets, Committed, Epochs, Offsets, TopicPartition

GONE: Final = "not assigned to this instance"
_EARLIER: Final = "of an earlier assignment"
_REVOKED: Final = "revoked since it was read"
_BEHIND: Final = "behind the committed offset; seek to go back"
_NONE: Final[CommitOffsets] = {}


class Processed(NamedTuple):
    """How far a client reports to have processed a partition."""

    partition: TopicPartition
    at: Committed
    """The offset after its last processed record."""
    assignment: str = ""
    """The assignment in which that record was read; empty if the client does not name it."""


@dataclasses.dataclass(slots=True)
class PartitionPosition:
    """How far an instance is in one assigned partition. A seek replaces it by a new one.

    Each offset is that of the next record. The buffer has what was fetched, and the offsets follow in this order:
    fetched >= sent >= delivered >= handled >= start. What is committed follows `handled`.
    """

    # Of the assignment: a seek keeps them, and changes the epoch.
    assignment: str
    """The name of the assignment, for clients."""
    epoch: int
    """The consumer's number of the assignment or seek."""
    committed: int
    """The committed offset of the group, or a lower one that the client has sought."""
    highest_sent: int = 0
    """The highest offset that was sent, since such a seek."""

    # Since the assignment or the last seek: None while there is nothing.
    start: int | None = None
    """The first record that was sent."""
    sent: int | None = None
    """After the records that were sent and may not have arrived; None if there are none."""
    delivered: int | None = None
    """After the records that have arrived."""
    handled: int | None = None
    """What is before it needs no commit: at first `start`, then the last offset that was committed or confirmed."""
    confirmed: int | None = None
    """What auto commit commits: confirmed by the next read, or committed by the client."""
    promised: Committed | None = None
    """The offset of an asynchronous commit, until it is acknowledged."""
    sent_again: int = 0
    """After the records that are sent again, because they may not have arrived."""
    ahead: int | None = None
    """Where to continue, because records were committed that were to be sent again."""

    @property
    def back(self) -> int:
        """The first record that was sent and may not have arrived."""
        return max(self.start or 0, self.delivered or 0)

    @property
    def end(self) -> int:
        """After the records that were sent."""
        return max(self.back, self.sent or 0)

    def after_seek(self, epoch: int) -> "PartitionPosition":
        """Return a position of the same assignment of which nothing was sent."""
        return PartitionPosition(self.assignment, epoch, self.committed, self.highest_sent)

    def count_sent(self, first: int, end: int) -> None:
        if self.start is None:
            self.start = first
        if self.handled is None:
            self.handled = first
        self.sent = end
        self.highest_sent = max(self.highest_sent, end)

    def confirm(self, at: int) -> None:
        """Let auto commit commit up to an offset."""
        self.handled = at
        self.confirmed = at
        self.committed = max(at, self.committed)

    def commit(self, at: int) -> None:
        """Count an offset as committed; what was sent before it has arrived."""
        self.committed = at
        self.handled = at
        self.confirmed = at
        if self.sent is not None:
            self.delivered = max(self.back, min(at, self.sent))
            self.sent = None if at >= self.sent else self.sent
        if self.end < at <= self.sent_again:
            self.ahead = at

    def seek_back(self, at: int) -> None:
        """Allow commits behind the committed offset, for records that are sent from now on."""
        if at < self.committed:
            self.committed = at
            self.highest_sent = 0


class PartitionPositions(dict[TopicPartition, PartitionPosition]):
    """The assigned partitions, and those that were revoked before their delivered records were committed."""

    def __init__(self) -> None:
        super().__init__()
        self.revoked: dict[TopicPartition, int] = {}
        """The offset after what was delivered; kept until a commit is refused or new records are delivered."""

    def assign(self, epochs: Epochs, committed: CommitOffsets) -> None:
        """Begin assignments; for a partition that is already assigned, it is a seek."""
        for partition, epoch in epochs.items():
            if before := self.get(partition):
                self[partition] = before.after_seek(epoch)
            else:
                found = committed.get(partition)
                self[partition] = PartitionPosition(f"{epoch:x}", epoch, found.offset if found else 0)

    @property
    def in_doubt(self) -> dict[TopicPartition, int]:
        """Where to read partitions again of which records may not have arrived."""
        return {partition: one.back for partition, one in self.items() if one.sent is not None}

    @property
    def ahead(self) -> dict[TopicPartition, int]:
        """Where to continue partitions whose records were committed while they waited to be sent again."""
        return {partition: one.ahead for partition, one in self.items() if one.ahead is not None}

    @property
    def uncommitted(self) -> dict[TopicPartition, int]:
        """The offset after the delivered records of each partition that has neither committed nor confirmed them."""
        return {
            partition: one.delivered
            for partition, one in self.items()
            if one.delivered is not None and (one.handled is None or one.handled < one.delivered)
        }

    def lose(self, partitions: Iterable[TopicPartition], *, with_commits: bool = False) -> None:
        """End assignments; with `with_commits`, unacknowledged commits are lost, too."""
        for partition in partitions:
            before = self.pop(partition, None)
            if before and before.start is not None:
                handled = 0 if with_commits and before.promised else before.handled or 0
                if before.end > handled:
                    self.revoked[partition] = before.end

    def deliver(self) -> None:
        """Count what was sent as delivered."""
        for one in self.values():
            if one.sent is not None:
                one.delivered = one.sent
                one.sent = None

    def to_commit(self) -> list[Processed]:
        """Return what a commit without offsets commits.

        Raises:
            InstanceState: Records were sent on a stream, and only the client knows whether they have arrived.
        """
        if doubts := self.in_doubt:
            raise InstanceState(
                f"records that were sent on a stream of {names_of([*doubts])} may not have arrived; commit with "
                "`offsets` that name the last processed record of each partition",
                partitions=[partition._asdict() for partition in doubts],
            )
        return [Processed(partition, Committed(at)) for partition, at in (self.revoked | self.uncommitted).items()]

    def confirm(self) -> None:
        """Let auto commit commit what was delivered."""
        for partition, at in self.uncommitted.items():
            self[partition].confirm(at)

    def take(self, offsets: CommitOffsets, before: Mapping[TopicPartition, PartitionPosition]) -> None:
        """Count offsets as committed, except after a seek or in another assignment."""
        for partition, at in offsets.items():
            if self.get(partition) is before[partition]:
                before[partition].commit(at.offset)

    def moved(self, before: Mapping[TopicPartition, PartitionPosition], targets: Offsets) -> None:
        """Keep the state of partitions that are read again; everything before `targets` counts as delivered."""
        for partition, old in before.items():
            now = self.get(partition)
            if now and now.assignment == old.assignment:
                now.start = targets.get(partition, old.start)
                now.delivered = targets.get(partition, old.delivered)
                now.handled = old.handled
                now.confirmed = old.confirmed
                now.sent_again = max(old.end, old.sent_again)

    def require(self, processed: Iterable[Processed]) -> None:
        """Raise CommitRefused if any of it is refused."""
        if refusals := self.refusals(processed):
            raise self.refuse(refusals)

    def require_delivered(self, processed: Iterable[Processed]) -> None:
        """Raise InstanceState if not all of it was sent since the last commit or seek back."""
        for partition, at, _ in processed:
            position = self[partition]
            first, end = position.committed, position.highest_sent
            if not first < at.offset <= end:
                which = f"{first} to {end - 1}" if first < end else "none"
                raise InstanceState(
                    f"offset {at.offset - 1} of {partition} was not delivered since its last commit or seek; "
                    f"delivered: {which}"
                )

    def refusals(self, processed: Iterable[Processed], *, commits: bool = False) -> dict[Processed, str]:
        """Return what must be refused, and why; with `commits`, also an offset behind the committed one.

        Commits, transactions, seeks and resumed streams are all checked here.
        """
        found = {}
        for one in processed:
            position = self.get(one.partition)
            if position is None:
                found[one] = GONE
            elif one.assignment and one.assignment != position.assignment:
                found[one] = _EARLIER
            elif not one.assignment and one.partition in self.revoked:
                found[one] = _REVOKED
            elif commits and one.at.offset < position.committed:
                found[one] = _BEHIND
        return found

    def refuse(self, refusals: Mapping[Processed, str], committed: CommitOffsets = _NONE) -> CommitRefused:
        """Return the error for refused offsets; a revoked partition is reported only once."""
        reasons: dict[str, dict[TopicPartition, None]] = {}
        for one, reason in refusals.items():
            reasons.setdefault(reason, {})[one.partition] = None
            self.revoked.pop(one.partition, None)
        text = "; ".join(f"{reason}: {names_of([*partitions])}" for reason, partitions in reasons.items())
        claims = dict.fromkeys((one.partition, one.assignment) for one in refusals)
        return CommitRefused(
            f"refused, {text}; uncommitted records are delivered again to the member that has their partition",
            refused=[{**p._asdict(), **({"assignment": name} if name else {})} for p, name in claims],
            committed=[{**p._asdict(), "offset": at.offset} for p, at in committed.items()],
        )


def newest(processed: Sequence[Processed]) -> dict[TopicPartition, Committed]:
    """Return the highest offset of each partition."""
    return {one.partition: one.at for one in sorted(processed, key=lambda one: one.at.offset)}
