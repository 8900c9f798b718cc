"""Parts of a transaction, each with the offsets that are right without the other parts."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from headrace.delivery.offset_map import decode, encode
from headrace.functions.held_outputs import HeldOutput, HeldRun
from headrace.records import CommitOffsets, Committed, TopicPartition

Event = tuple[TopicPartition, int]
"""A record by its partition and offset."""


class Portion(NamedTuple):
    """Offsets, and the outputs of what was completed since the offsets that were committed before."""

    offsets: CommitOffsets
    runs: Sequence[HeldRun]

    @property
    def outputs(self) -> list[HeldOutput]:
        """Each output, in the order in which they are written."""
        return [(run.partition, *each) for run in self.runs for each in zip(run.offsets, run.records, strict=True)]

    @property
    def halvings(self) -> int:
        """How often halves of it can be tried, and some more."""
        return sum(len(run.offsets) for run in self.runs).bit_length() + 3

    @property
    def events(self) -> list[Event]:
        """The events with outputs, by partition and offset."""
        return sorted({(run.partition, offset) for run in self.runs for offset in run.offsets})

    def of(self, partitions: Collection[TopicPartition]) -> "Portion":
        return Portion(
            {partition: at for partition, at in self.offsets.items() if partition in partitions},
            [run for run in self.runs if run.partition in partitions],
        )

    def before(self, ends: Mapping[TopicPartition, int], committed: CommitOffsets) -> "Portion":
        """Return what was completed below these offsets, and other partitions as a whole.

        A partition without events below its offset is left out. `committed` are the offsets before this portion.
        """
        runs = [run.where(ends[run.partition].__gt__) if run.partition in ends else run for run in self.runs]
        left = {run.partition for run in runs if run.offsets}
        offsets = {
            partition: cut(at, committed.get(partition), ends[partition]) if partition in ends else at
            for partition, at in self.offsets.items()
            if partition in left or partition not in ends
        }
        return Portion(offsets, runs)

    def split(self, suspects: Collection[Event], committed: CommitOffsets) -> tuple["Portion", "Portion"]:
        """Return two parts: the events before the suspects and the others, or halves if no event is before them.

        The first must be committed before the second, which begins where the first ends.
        """
        events, ends = self.events, firsts_of(suspects)
        before = [each for each in events if each[1] < ends.get(each[0], math.inf)]
        first = before if 0 < len(before) < len(events) else events[: len(events) // 2]
        ends = firsts_of(set(events).difference(first))
        rest = [run.where(ends[run.partition].__le__) for run in self.runs if run.partition in ends]
        return self.before(ends, committed), Portion({p: self.offsets[p] for p in ends}, rest)


def firsts_of(events: Collection[Event]) -> dict[TopicPartition, int]:
    """Return the first offset of each partition."""
    return dict(sorted(events, reverse=True))


def cut(ended: Committed, before: Committed | None, end: int) -> Committed:
    """Return what to commit if, of all records that are completed, only those below an offset are committed now.

    Records that were committed `before` stay committed, also those above the offset.
    """
    now, earlier = decode(ended.metadata, ended.offset), before and decode(before.metadata, before.offset)
    in_flight = [offset for offset in now.in_flight if offset < end] if now else []
    behind = end
    if earlier and earlier.end > end:
        in_flight += [offset for offset in earlier.in_flight if offset >= end]
        behind = earlier.end
    in_flight.sort()
    while in_flight and in_flight[-1] == behind - 1:
        behind = in_flight.pop()
    first = in_flight[0] if in_flight else behind
    tries = now.tries if now and now.base == first else None
    return Committed(first, encode(first, behind, in_flight, tries) if in_flight or tries else "")
