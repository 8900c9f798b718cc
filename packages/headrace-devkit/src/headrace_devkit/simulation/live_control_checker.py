"""Watches a run of push that is controlled over HTTP: what seeks, skips and pauses allow and forbid.

A command is in force from some moment between its request and its response. Until a seek is known to be done, both the
offsets before it and those after it are allowed. From then on nothing before it is delivered.
"""

from typing import NamedTuple

from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.checkers import PushChecker, Rules
from headrace_devkit.simulation.world import World

_APPLIED_SECONDS = 5.0
"""How soon each process has read that something is paused."""


class SentSeek(NamedTuple):
    """A seek of a partition."""

    number: int
    offset: int
    at: float
    end: int
    """The end of the log at its request."""


class LiveControlChecker(PushChecker):
    """Checks deliveries and commits of one group while it is controlled."""

    def __init__(self, world: World, brokers: Brokers, rules: Rules) -> None:
        super().__init__(world, brokers, rules)
        self._topic = rules.topics[0]
        self._sought: dict[int, list[SentSeek]] = {}
        """By partition: seeks that may be done at any time."""
        self._first: dict[int, int] = {}
        """By partition: nothing before this offset is delivered any more."""
        self._again: dict[int, SentSeek] = {}
        """By partition: the last seek, whose records must be delivered after it."""
        self._delivered: dict[tuple[int, int], float] = {}
        """When a record was delivered last."""
        self._paused: dict[int, float] = {}
        """By partition: since when nothing of it is delivered."""
        self._skipped: set[tuple[int, int]] = set()
        self._changes: dict[int, int] = {}
        """How many seeks a partition has had."""

    # Commands

    def sends_seek(self, partition: int, offset: int) -> SentSeek:
        """Expect a seek, and that records before it are never completed."""
        log = self._brokers.log(self._topic, partition)
        self._changes[partition] = self._changes.get(partition, 0) + 1
        seek = SentSeek(self._changes[partition], offset, self._world.now, log.end if log else 0)
        self._sought.setdefault(partition, []).append(seek)
        self._first.pop(partition, None)
        self._again.pop(partition, None)
        self._skipped = {one for one in self._skipped if one[0] != partition or one[1] < offset}
        for at in range(offset):
            self.passes_over(partition, at)
        return seek

    def seek_is_done(self, partition: int, seek: SentSeek) -> None:
        """Expect nothing before the offset of a seek, if it is the last one of its partition."""
        self._sought[partition].remove(seek)
        if self._changes[partition] == seek.number and not self._sought[partition]:
            self._first[partition] = seek.offset
            self._again[partition] = seek

    def passes_over(self, partition: int, offset: int) -> None:
        """Expect that a record may never be delivered."""
        if value := self._value_at(self._topic, partition, offset):
            self._taken.add(value)

    def is_skipped(self, partition: int, offset: int) -> None:
        """Expect that a record is delivered only after a seek back."""
        self._skipped.add((partition, offset))

    def pauses(self, *partitions: int) -> None:
        """Expect soon nothing of these partitions."""
        for partition in partitions:
            self._paused.setdefault(partition, self._world.now)

    def resumes(self) -> None:
        """Expect deliveries of every partition again."""
        self._paused.clear()

    # What happens

    def _on_arrived(self, process: str, topic: str, partition: int, offset: int, attempt: int) -> None:
        super()._on_arrived(process, topic, partition, offset, attempt)
        now = self._world.now
        self._delivered[partition, offset] = now
        if not self._calm(process):
            return
        where = f"{process} delivered {topic}-{partition} {offset}"
        if now > self._paused.get(partition, now) + _APPLIED_SECONDS:
            self._world.problem("PAUSED", f"{where}, which is paused since {self._paused[partition]:.3f}")
        if offset < self._first.get(partition, 0):
            self._world.problem("BEFORE-SEEK", f"{where}, after a seek to {self._first[partition]}")
        if (partition, offset) in self._skipped and not self._sought.get(partition):
            self._world.problem("SKIPPED", f"{where}, which was skipped")

    def _on_commit(self, group: str, topic: str, partition: int, offset: int, member: str, error: int) -> None:
        if topic == self._topic and not error and any(one.offset == offset for one in self._sought.get(partition, ())):
            self._committed[group, topic, partition] = offset
            return
        super()._on_commit(group, topic, partition, offset, member, error)

    # The end

    def check_repeats(self) -> None:
        """Check that what was behind each last seek was delivered after it."""
        for partition, seek in self._again.items():
            for offset in range(seek.offset, seek.end):
                is_skipped = (partition, offset) in self._skipped
                if not is_skipped and self._delivered.get((partition, offset), -1.0) < seek.at:
                    text = f"{self._topic}-{partition} {offset} was not delivered after a seek to {seek.offset}"
                    self._world.problem("SOUGHT", text)
