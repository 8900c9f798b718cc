"""Where a member goes on in its partitions, as long as that is not known: asked again until Kafka, or the store of
whoever keeps offsets with its own data, has answered; and where it goes on as soon as that is committed.

For the thread that owns the consumer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import confluent_kafka

from headrace.kafka.positions import Gap, ReadPolicy, Start, find_gap, find_starts
from headrace.lifecycle import Clock, Deadline
from headrace.records import Committed, TopicPartition

_AGAIN_SECONDS = 1.0
_ASK_SECONDS = 3.0
"""For the logs of all partitions that are asked for at once."""

AskStore = Callable[[Mapping[TopicPartition, int]], None]
"""Asks for stored offsets in these epochs, and returns at once; the answer comes by `answered` or `failed`."""


class Placement:
    """Partitions that are ours, and in which we cannot go on yet; they are paused."""

    def __init__(
        self, policy: ReadPolicy, clock: Clock, say: Callable[[str, str], None], ask_store: AskStore | None
    ) -> None:
        """Prepare.

        Args:
            policy: What is done where the group's place is not known, or is no longer there.
            clock: For the pauses.
            say: Takes what readiness is to say about a partition; empty when there is nothing more to say.
            ask_store: None when offsets are Kafka's alone.
        """
        self.subscribed: Sequence[str] = ()
        """Topics the group reads."""
        self._policy = policy
        self._clock = clock
        self._say = say
        self._ask_store = ask_store
        self._open: dict[TopicPartition, int | None] = {}
        """Partition to the position that is out of range, or None if there is none yet."""
        self._sought: dict[TopicPartition, Start] = {}
        """Where to go on, once that is committed."""
        self._committed: set[TopicPartition] = set()
        self._positions: dict[TopicPartition, int] = {}
        self._asked: dict[TopicPartition, tuple[int, float]] = {}
        """The epoch in which the store is asked, and when it is asked again."""
        self._stored: dict[TopicPartition, tuple[int, int | None]] = {}
        self._seen: set[str] = set()
        self._at_end: set[TopicPartition] = set()
        self._again_at = 0.0
        self._last_epoch = 0

    def new_epoch(self) -> int:
        """Return a number for an assignment: larger than any before it, of other processes too, as clocks agree."""
        self._last_epoch = max(self._last_epoch + 1, int(self._clock.time() * 1000))
        return self._last_epoch

    def starts(self, client: Any, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Start]:
        """Return where to begin, with the epoch to do it in; what is not known yet stays open."""
        begun_at = self._clock.monotonic()
        self._open.update(dict.fromkeys(partitions))
        wanted = self._answered_by_store(partitions) if self._ask_store else partitions
        passed, policy = self._limit(), self._policy
        answers: Mapping[TopicPartition, Any] = {}
        try:
            if wanted:
                answers = find_starts(client, wanted, policy, self._seen, self.subscribed, passed, self._at_end)
        except confluent_kafka.KafkaException as cause:
            answers = dict.fromkeys(wanted, cause.args[0])
        found: dict[TopicPartition, Start] = {}
        for partition, start in answers.items():
            if not isinstance(start, Start):
                self._ask_last(partition)
                self._say(str(partition), f"{partition}: where to begin cannot be read: {start.str()}")
                continue
            self._say(str(partition), "")
            self._seen.add(partition.topic)
            self._open.pop(partition, None)
            self._at_end.discard(partition)
            epoch, stored = self._stored.pop(partition, (self.new_epoch(), None))
            found[partition] = start._replace(epoch=epoch)
            if stored is not None and (start.committed is None or start.committed.offset != stored):
                found[partition] = Start(stored, Committed(stored), is_new=True, epoch=epoch)
        self._pause(begun_at)
        return found

    def read_to(self, positions: Mapping[TopicPartition, int]) -> None:
        """Keep the offsets behind what was handed over in this assignment, or where it begins."""
        self._positions.update(positions)

    def out_of_range(self, partition: TopicPartition, position: int | None) -> None:
        """Keep a position whose record is not in the log or cannot be read.

        The client names none if the log was cut (KIP-320), and the first offset of a batch that cannot be read, of
        which a part may have been handed over.
        """
        known = self._positions.get(partition, confluent_kafka.OFFSET_BEGINNING)
        self._open[partition] = known if position is None else max(position, known)

    def is_open(self, partition: TopicPartition) -> bool:
        """Whether we cannot go on yet."""
        return partition in self._open or partition in self._sought

    def wait_for_commit(self, partition: TopicPartition, start: Start) -> None:
        """Go on at another place, as soon as that is committed in its epoch."""
        self._sought[partition] = start

    def acknowledged(self, epochs: Mapping[TopicPartition, int]) -> None:
        """Take note of commits that are acknowledged."""
        self._committed |= {p for p, start in self._sought.items() if epochs.get(p) == start.epoch}

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop partitions that are no longer ours."""
        for partition in partitions:
            for known in (self._open, self._sought, self._positions, self._asked, self._stored):
                known.pop(partition, None)
            self._committed.discard(partition)
            self._at_end.discard(partition)
            self._say(str(partition), "")

    def found(self, client: Any) -> Iterator[tuple[TopicPartition, Start | Gap | int]]:
        """Yield open partitions for which it is known by now: where to begin, what is missing, or where it goes on."""
        while self._committed:
            partition = self._committed.pop()
            yield partition, self._sought.pop(partition)
        if not self._open or self._clock.monotonic() < self._again_at:
            return
        begun_at = self._clock.monotonic()
        yield from self.starts(client, [p for p, position in self._open.items() if position is None]).items()
        passed = self._limit()
        for partition, position in list(self._open.items()):
            if position is not None and not passed():
                try:
                    gap = find_gap(client, partition, position)
                except confluent_kafka.KafkaException as cause:
                    self._ask_last(partition)
                    self._say(str(partition), f"{partition}: offset {position} is out of range: {cause.args[0].str()}")
                    continue
                del self._open[partition]
                self._say(str(partition), "")
                yield partition, position if gap is None else gap
        self._pause(begun_at)

    def _pause(self, begun_at: float) -> None:
        """Ask nothing for as long as was just asked, so that the thread polls."""
        now = self._clock.monotonic()
        self._again_at = now + max(_AGAIN_SECONDS, now - begun_at)

    def _limit(self) -> Callable[[], bool]:
        deadline = Deadline(self._clock, _ASK_SECONDS)
        return lambda: deadline.passed

    def _ask_last(self, partition: TopicPartition) -> None:
        """Ask for the other partitions first: each that does not answer takes from the time of the others."""
        self._open[partition] = self._open.pop(partition)

    # The store of others ---------------------------------------------------------------------------------------------

    def answered(self, partition: TopicPartition, epoch: int, offset: int | None) -> None:
        """Take a stored offset that was asked for in this epoch."""
        if self._asked.get(partition, (0, 0))[0] == epoch:
            del self._asked[partition]
            self._stored[partition] = epoch, offset
            self._again_at = 0.0

    def failed(self, partition: TopicPartition, epoch: int, why: str) -> None:
        """Ask again after a pause: the store did not answer."""
        if self._asked.get(partition, (0, 0))[0] == epoch:
            self._asked[partition] = 0, self._clock.monotonic() + _AGAIN_SECONDS
            self._say(str(partition), f"{partition}: its offset is kept by the backend, which does not say: {why}")

    def _answered_by_store(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        assert self._ask_store is not None
        now = self._clock.monotonic()
        missing = [p for p in partitions if p not in self._stored and self._asked.get(p, (0, now))[1] <= now]
        if missing:
            epochs = {partition: self.new_epoch() for partition in missing}
            self._asked.update({partition: (epoch, math.inf) for partition, epoch in epochs.items()})
            self._ask_store(epochs)
        return [partition for partition in partitions if partition in self._stored]
