"""What is to be replayed: a window that an operator names, as offsets that are there."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.config.internal_topics import kind_by_name
from headrace.control.selection import Selection, selected_window
from headrace.errors import InvalidRequest, NotFound
from headrace.kafka import Admin
from headrace.records import TopicPartition


class Offsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A window of one partition: from `start` to before `end`."""

    start: int
    end: int


class Window(msgspec.Struct, frozen=True):
    """Offsets of a topic, and which topic of that name it is."""

    topic: str
    topic_id: str
    ranges: dict[int, tuple[int, int]]
    """Partition to its first offset and the one behind its last."""

    @property
    def total(self) -> int:
        """Offsets in all."""
        return sum(end - start for start, end in self.ranges.values())

    @property
    def ends(self) -> dict[TopicPartition, int]:
        """Where each partition ends."""
        return {TopicPartition(self.topic, number): end for number, (_, end) in self.ranges.items()}

    def overlaps(self, other: Window) -> bool:
        """Whether the two have an offset in common."""
        return self.topic_id == other.topic_id and any(
            number in other.ranges and start < other.ranges[number][1] and other.ranges[number][0] < end
            for number, (start, end) in self.ranges.items()
        )


def check_readable(topic: str) -> None:
    """Return if a topic is one to replay from.

    Raises:
        InvalidRequest: It is Kafka's own, or Headrace's.
    """
    if kind_by_name(topic) == "state":
        raise InvalidRequest(f"{topic} is internal: its records are not for anybody else", topic=topic)


async def find_window(admin: Admin, topic: str, selection: Selection, offsets: Offsets | None, now_ms: int) -> Window:
    """Return the offsets that are meant.

    Raises:
        TopicNotFound, PartitionNotFound: There is no such place.
        InvalidRequest: The window is empty, reversed, in the future, beyond the log or before it.
    """
    check_readable(topic)
    if selection.until_ms is not None and selection.until_ms > now_ms:
        raise InvalidRequest("the window ends in the future: leave until out to go up to what is there now")
    starts, ends = await selected_window(admin, topic, msgspec.structs.replace(selection, until_ms=None), now_ms)
    if selection.until_ms is not None:
        if selection.since_ms is not None and selection.until_ms <= selection.since_ms:
            raise InvalidRequest("the window is empty or reversed: until must be later than since")
        later = await admin.offsets_since(starts, selection.until_ms)
        ends = {place: min(end, later.get(place, end)) for place, end in ends.items()}
    if offsets:
        starts, ends = _cut(starts, ends, offsets)
    ranges = {place.partition: (start, ends[place]) for place, start in starts.items() if start < ends[place]}
    if not ranges:
        raise InvalidRequest(f"the window is empty: {topic} holds no record in it", topic=topic)
    found = await admin.topic_ids([topic])
    if topic not in found:
        raise NotFound(f"topic {topic} was deleted just now", topic=topic)
    return Window(topic, found[topic], ranges)


def _cut(
    starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], offsets: Offsets
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    if len(starts) > 1:
        raise InvalidRequest("offsets need a partition: they count within one")
    ((place, first),) = starts.items()
    end = ends[place]
    if offsets.start < 0 or offsets.start >= offsets.end:
        what = "empty" if offsets.start == offsets.end else "reversed or negative"
        raise InvalidRequest(f"offsets {offsets.start} to {offsets.end} are {what}: end is one more than the last")
    if offsets.end > end:
        raise InvalidRequest(f"offsets {offsets.start} to {offsets.end} are beyond the log: {place} ends at {end}")
    if offsets.end <= first:
        raise InvalidRequest(f"offsets before {offsets.end} are no longer in the log: {place} begins at {first}")
    return {place: offsets.start}, {place: offsets.end}
