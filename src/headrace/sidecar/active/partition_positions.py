"""The partitions that an instance has: how far its client is in each, and which offsets may be taken from it."""

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
    """What a client says it has processed of a partition."""

    partition: TopicPartition
    at: Committed
    """The offset after its last processed record."""
    assignment: str = ""
    """Of that record; empty if the client does not say."""


@dataclasses.dataclass(slots=True)
class PartitionPosition:
    """How far an instance is in one assigned partition. A seek replaces it by a new one.

    Each offset is that of the next record. The buffer has what was fetched, and the offsets follow in this order:
    fetched >= sent >= delivered >= handled >= start. What is committed follows `handled`.
    """

    # Of the assignment: a seek keeps them, and changes the epoch.
    assignment: str
    """Names the assignment to clients."""
    epoch: int
    """Of the consumer."""
    committed: int
    """What the group has committed, or an offset before it that the client has sought."""
    highest_sent: int = 0
    """Since such a seek."""

    # Since the assignment or the last seek: None while there is nothing.
    start: int | None = None
    """Of what was sent."""
    sent: int | None = None
    """What was sent and may not have arrived; None if nothing is in doubt."""
    delivered: int | None = None
    """What has arrived."""
    handled: int | None = None
    """What needs no commit any more: at first all before `start`, then what was committed or confirmed last."""
    confirmed: int | None = None
    """What auto commit commits: confirmed by the next read, or committed by the client."""
    promised: Committed | None = None
    """What an asynchronous commit has promised, until it is acknowledged."""

    @property
    def back(self) -> int:
        """Where what was sent and has not arrived begins."""
        return max(self.start or 0, self.delivered or 0)

    @property
    def end(self) -> int:
        """After what was sent."""
        return max(self.back, self.sent or 0)

    def after_seek(self, epoch: int) -> "PartitionPosition":
        """Return the position of the same assignment from which nothing was sent."""
        return PartitionPosition(self.assignment, epoch, self.committed, self.highest_sent)

    def count_sent(self, first: int, end: int) -> None:
        """Count offsets as sent."""
        if self.start is None:
            self.start = first
        if self.handled is None:
            self.handled = first
        self.sent = end
        self.highest_sent = max(self.highest_sent, end)

    def confirm(self, at: int) -> None:
        """Have auto commit take what is before an offset."""
        self.handled = self.confirmed = at
        self.committed = max(at, self.committed)

    def commit(self, at: int) -> None:
        """Count an offset as committed: what was sent before it has arrived."""
        self.committed = self.handled = self.confirmed = at
        if self.sent is not None:
            self.delivered = max(self.back, min(at, self.sent))
            self.sent = None if at >= self.sent else self.sent

    def seek_back(self, at: int) -> None:
        """Allow commits behind the committed offset, of what is sent from here on."""
        if at < self.committed:
            self.committed = at
            self.highest_sent = 0


class PartitionPositions(dict[TopicPartition, PartitionPosition]):
    """The assigned partitions, and those that were revoked before what was delivered of them was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.revoked: dict[TopicPartition, int] = {}
        """With the offset after what was delivered; until a commit was refused, or new records were delivered."""

    def assign(self, epochs: Epochs, committed: CommitOffsets) -> None:
        """Begin assignments; of a partition that is there it is a seek."""
        for partition, epoch in epochs.items():
            if before := self.get(partition):
                self[partition] = before.after_seek(epoch)
            else:
                found = committed.get(partition)
                self[partition] = PartitionPosition(f"{epoch:x}", epoch, found.offset if found else 0)

    @property
    def in_doubt(self) -> dict[TopicPartition, int]:
        """Where those partitions must be read again of which something was sent and may not have arrived."""
        return {partition: one.back for partition, one in self.items() if one.sent is not None}

    @property
    def uncommitted(self) -> dict[TopicPartition, int]:
        """The offsets after what was delivered, where less is committed or confirmed."""
        return {
            partition: one.delivered
            for partition, one in self.items()
            if one.delivered is not None and (one.handled is None or one.handled < one.delivered)
        }

    def lose(self, partitions: Iterable[TopicPartition], *, with_commits: bool = False) -> None:
        """End assignments; with `with_commits` also commits are lost that are not acknowledged."""
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
        """Return what a commit takes that names nothing.

        Raises:
            InstanceState: Something went out on a stream, and only the client knows whether it has arrived.
        """
        if doubts := self.in_doubt:
            raise InstanceState(
                f"what went out on a stream of {names_of([*doubts])} may not have arrived: commit with `offsets`, "
                "which name the last processed record of each partition",
                partitions=[partition._asdict() for partition in doubts],
            )
        return [Processed(partition, Committed(at)) for partition, at in (self.revoked | self.uncommitted).items()]

    def confirm(self) -> None:
        """Have auto commit take what was delivered."""
        for partition, at in self.uncommitted.items():
            self[partition].confirm(at)

    def take(self, offsets: CommitOffsets, before: Mapping[TopicPartition, PartitionPosition]) -> None:
        """Count offsets as committed, where neither a seek nor another assignment has begun since."""
        for partition, at in offsets.items():
            if self.get(partition) is before[partition]:
                before[partition].commit(at.offset)

    def moved(self, before: Mapping[TopicPartition, PartitionPosition], targets: Offsets) -> None:
        """Keep what was known of partitions that are read again; until `targets` all is delivered."""
        for partition, old in before.items():
            now = self.get(partition)
            if now and now.assignment == old.assignment:
                now.start = targets.get(partition, old.start)
                now.delivered = targets.get(partition, old.delivered)
                now.handled = old.handled
                now.confirmed = old.confirmed

    def require(self, processed: Iterable[Processed]) -> None:
        """Raise CommitRefused if not all of it may be taken."""
        if refusals := self.refusals(processed):
            raise self.refuse(refusals)

    def require_delivered(self, processed: Iterable[Processed]) -> None:
        """Raise InstanceState if not all of it was sent since the last commit or seek back."""
        for partition, at, _ in processed:
            position = self[partition]
            first, end = position.committed, position.highest_sent
            if not first < at.offset <= end:
                which = f"{first} to {end - 1} were" if first < end else "none was"
                raise InstanceState(
                    f"offset {at.offset - 1} of {partition} was not delivered since its last commit or seek: {which}"
                )

    def refusals(self, processed: Iterable[Processed], *, commits: bool = False) -> dict[Processed, str]:
        """Return what may not be taken from a client, and why; with `commits` no committed offset goes back either.

        Commits, transactions, seeks and resumptions are all judged here, and nowhere else.
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
        """Return the error that says what is refused, which is said once of a partition that was revoked."""
        reasons: dict[str, dict[TopicPartition, None]] = {}
        for one, reason in refusals.items():
            reasons.setdefault(reason, {})[one.partition] = None
            self.revoked.pop(one.partition, None)
        text = "; ".join(f"{reason}: {names_of([*partitions])}" for reason, partitions in reasons.items())
        claims = dict.fromkeys((one.partition, one.assignment) for one in refusals)
        return CommitRefused(
            f"refused, {text}; records that are not committed are delivered again to the member that has them",
            refused=[{**p._asdict(), **({"assignment": name} if name else {})} for p, name in claims],
            committed=[{**p._asdict(), "offset": at.offset} for p, at in committed.items()],
        )


def newest(processed: Sequence[Processed]) -> dict[TopicPartition, Committed]:
    """Return the highest offset of each partition."""
    return {one.partition: one.at for one in sorted(processed, key=lambda one: one.at.offset)}
