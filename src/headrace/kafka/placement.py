"""Where a member goes on in its partitions, as long as that is not known: asked again until Kafka, or the store of
whoever keeps offsets with its own data, has answered; and where it goes on as soon as that is committed.

For the thread that owns the consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import confluent_kafka

from headrace.kafka.positions import Gap, ReadPolicy, Start, find_gap, find_starts
from headrace.lifecycle import Clock
from headrace.records import Committed, TopicPartition

_AGAIN_SECONDS = 1.0

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
        self._asked: dict[TopicPartition, int] = {}
        self._stored: dict[TopicPartition, tuple[int, int | None]] = {}
        self._seen: set[str] = set()
        self._again_at = 0.0
        self._last_epoch = 0

    def new_epoch(self) -> int:
        """Return a number for an assignment: larger than any before it, of other processes too, as clocks agree."""
        self._last_epoch = max(self._last_epoch + 1, int(self._clock.time() * 1000))
        return self._last_epoch

    def starts(self, client: Any, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Start]:
        """Return where to begin, with the epoch to do it in; what is not known yet stays open."""
        self._open.update(dict.fromkeys(partitions))
        wanted = self._answered_by_store(partitions) if self._ask_store else partitions
        try:
            found = find_starts(client, wanted, self._policy, self._seen, self.subscribed) if wanted else {}
        except confluent_kafka.KafkaException as cause:
            for partition in wanted:
                self._say(str(partition), f"{partition}: committed offsets cannot be read: {cause.args[0].str()}")
            return {}
        for partition, start in found.items():
            self._say(str(partition), "")
            self._seen.add(partition.topic)
            self._open.pop(partition, None)
            epoch, stored = self._stored.pop(partition, (self.new_epoch(), None))
            found[partition] = start._replace(epoch=epoch)
            if stored is not None and (start.committed is None or start.committed.offset != stored):
                found[partition] = Start(stored, Committed(stored), is_new=True, epoch=epoch)
        return found

    def out_of_range(self, partition: TopicPartition, position: int) -> None:
        """Take note that the next record is not in the log."""
        self._open[partition] = position

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
            for known in (self._open, self._sought, self._asked, self._stored):
                known.pop(partition, None)
            self._committed.discard(partition)
            self._say(str(partition), "")

    def found(self, client: Any) -> Iterator[tuple[TopicPartition, Start | Gap | int]]:
        """Yield open partitions for which it is known by now: where to begin, what is missing, or where it goes on."""
        while self._committed:
            partition = self._committed.pop()
            yield partition, self._sought.pop(partition)
        if not self._open or self._clock.monotonic() < self._again_at:
            return
        self._again_at = self._clock.monotonic() + _AGAIN_SECONDS
        yield from self.starts(client, [p for p, position in self._open.items() if position is None]).items()
        for partition, position in list(self._open.items()):
            if position is not None:
                try:
                    gap = find_gap(client, partition, position)
                except confluent_kafka.KafkaException as cause:
                    self._say(str(partition), f"{partition}: offset {position} is out of range: {cause.args[0].str()}")
                    continue
                del self._open[partition]
                self._say(str(partition), "")
                yield partition, position if gap is None else gap

    # The store of others ---------------------------------------------------------------------------------------------

    def answered(self, epochs: Mapping[TopicPartition, int], offsets: Mapping[TopicPartition, int | None]) -> None:
        """Take stored offsets that were asked for in these epochs."""
        for partition, epoch in epochs.items():
            if self._asked.get(partition) == epoch:
                del self._asked[partition]
                self._stored[partition] = epoch, offsets.get(partition)
                self._again_at = 0.0

    def failed(self, epochs: Mapping[TopicPartition, int], why: str) -> None:
        """Take note that the store did not answer; it is asked again."""
        for partition, epoch in epochs.items():
            if self._asked.get(partition) == epoch:
                del self._asked[partition]
                self._say(str(partition), f"{partition}: its offset is kept by the backend, which does not say: {why}")

    def _answered_by_store(self, partitions: Sequence[TopicPartition]) -> list[TopicPartition]:
        assert self._ask_store is not None
        missing = [p for p in partitions if p not in self._stored and p not in self._asked]
        if missing:
            epochs = {partition: self.new_epoch() for partition in missing}
            self._asked.update(epochs)
            self._ask_store(epochs)
        return [partition for partition in partitions if partition in self._stored]
