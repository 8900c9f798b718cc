"""The partitions that an instance has: what its client got of each, and which offsets may be taken from it."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

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
class Holding:
    """One assigned partition; its offsets are those of next records. A seek replaces it, without the last four."""

    assignment: str
    """Names the assignment to clients; a seek does not change it."""
    epoch: int
    """Of the consumer; a seek changes it."""
    committed: int
    """What the group has committed, or an offset before it that the client has sought."""
    most: int = 0
    """After the last record that was sent, since such a seek."""
    start: int | None = None
    """Of what was sent; None while nothing was."""
    sent: int | None = None
    """After what was sent and may not have arrived; None if nothing is in doubt."""
    delivered: int | None = None
    """After what has arrived; None if nothing has."""
    confirmed: int | None = None
    """To commit: with auto commit what the next read has confirmed, else what was committed last."""

    @property
    def back(self) -> int:
        """Where what was sent and has not arrived begins."""
        return max(self.start or 0, self.delivered or 0)

    @property
    def end(self) -> int:
        """After what was sent."""
        return max(self.back, self.sent or 0)

    def seek_back(self, at: int) -> None:
        """Allow commits behind the committed offset, of what is sent from here on."""
        if at < self.committed:
            self.committed, self.most = at, 0

    def take(self, at: int) -> None:
        """Count an offset as committed: what was sent before it has arrived."""
        self.committed = self.confirmed = at
        if self.sent is not None:
            self.delivered = max(self.back, min(at, self.sent))
            self.sent = None if at >= self.sent else self.sent


class Holdings(dict[TopicPartition, Holding]):
    """The assigned partitions, and those that were revoked before what was delivered of them was committed."""

    def __init__(self) -> None:
        super().__init__()
        self.revoked: dict[TopicPartition, int] = {}
        """With the offset after what was delivered; until a commit was refused, or new records were delivered."""

    def assign(self, epochs: Epochs, committed: CommitOffsets) -> None:
        """Begin assignments; of a partition that is there it is a seek."""
        for partition, epoch in epochs.items():
            if before := self.get(partition):
                again: dict[str, Any] = dict.fromkeys(("start", "sent", "delivered", "confirmed"))
                self[partition] = dataclasses.replace(before, epoch=epoch, **again)
            else:
                found = committed.get(partition)
                self[partition] = Holding(f"{epoch:x}", epoch, found.offset if found else 0)

    @property
    def in_doubt(self) -> dict[TopicPartition, int]:
        """Where those partitions must be read again of which something was sent and may not have arrived."""
        return {partition: held.back for partition, held in self.items() if held.sent is not None}

    @property
    def uncommitted(self) -> dict[TopicPartition, int]:
        """The offsets after what was delivered, where less is committed or confirmed."""
        return {
            partition: held.delivered
            for partition, held in self.items()
            if held.delivered is not None and (held.confirmed is None or held.confirmed < held.delivered)
        }

    def sent(self, partition: TopicPartition, held: Holding, first: int, end: int, *, auto_commit: bool) -> None:
        """Count offsets as sent."""
        held.start = first if held.start is None else held.start
        held.sent, held.most = end, max(held.most, end)
        if held.confirmed is None and not auto_commit:
            held.confirmed = first
        self.revoked.pop(partition, None)

    def lose(self, partitions: Iterable[TopicPartition], unanswered: Collection[TopicPartition] = ()) -> None:
        """End assignments. Commits that are not acknowledged are lost, too."""
        for partition in partitions:
            held = self.pop(partition, None)
            if held and held.start is not None:
                kept = 0 if partition in unanswered else held.confirmed or 0
                if held.end > kept:
                    self.revoked[partition] = held.end

    def deliver(self) -> None:
        """Count what was sent as delivered."""
        for held in self.values():
            held.delivered, held.sent = held.sent or held.delivered, None

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
            held = self[partition]
            held.confirmed, held.committed = at, max(at, held.committed)

    def take(self, offsets: CommitOffsets, before: Mapping[TopicPartition, Holding]) -> None:
        """Count offsets as committed, where neither a seek nor another assignment has begun since."""
        for partition, at in offsets.items():
            if self.get(partition) is before[partition]:
                before[partition].take(at.offset)

    def moved(self, before: Mapping[TopicPartition, Holding], targets: Offsets) -> None:
        """Keep what was known of partitions that are read again; until `targets` all is delivered."""
        for partition, old in before.items():
            held = self.get(partition)
            if held and held.assignment == old.assignment:
                held.start, held.delivered, held.confirmed = old.start, old.delivered, old.confirmed
                if partition in targets:
                    held.start = held.delivered = targets[partition]

    def require(self, processed: Iterable[Processed]) -> None:
        """Raise CommitRefused if not all of it may be taken."""
        if refusals := self.refusals(processed):
            raise self.refuse(refusals)

    def require_delivered(self, processed: Iterable[Processed]) -> None:
        """Raise InstanceState if not all of it was sent since the last commit or seek back."""
        for partition, at, _ in processed:
            held = self[partition]
            first, end = held.committed, held.most
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
            held = self.get(one.partition)
            if held is None:
                found[one] = GONE
            elif one.assignment and one.assignment != held.assignment:
                found[one] = _EARLIER
            elif not one.assignment and one.partition in self.revoked:
                found[one] = _REVOKED
            elif commits and one.at.offset < held.committed:
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
