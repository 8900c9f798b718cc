"""Which records an operator means: a window of a topic, and what its records must be like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from headrace.control.dead_letters import iso_ms
from headrace.control.topics import window
from headrace.delivery.dead_letter import Origin, redriven_count
from headrace.errors import InvalidRequest
from headrace.kafka import Admin
from headrace.records import Header, Record, TopicPartition


class Selection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A window of a topic and conditions that must all hold. Empty selects everything."""

    partition: int | None = None
    """Only this partition of the topic that is read."""
    first: int | None = None
    """Offsets from this one on; needs `partition`."""
    last: int | None = None
    """Offsets up to this one; needs `partition`."""
    since_ms: int | None = None
    """Records with this timestamp or a later one; of a dead letter that is when it was written."""
    until_ms: int | None = None
    """Records with an earlier timestamp than this."""
    topics: Sequence[str] = ()
    """Dead letters that came from one of these topics."""
    groups: Sequence[str] = ()
    """Dead letters of one of these groups."""
    errors: Sequence[str] = ()
    """Dead letters of one of these error classes."""
    keys: Sequence[bytes] = ()
    """Records with one of these keys."""
    headers: Sequence[tuple[str, bytes]] = ()
    """Records that have each of these headers with this value."""
    redrives_below: int | None = None
    """Records that came back less often than this."""

    @property
    def filters(self) -> bool:
        """Whether a record of the window may be left out."""
        timed = self.since_ms is not None or self.until_ms is not None
        counted = self.redrives_below is not None
        return bool(timed or counted or self.topics or self.groups or self.errors or self.keys or self.headers)

    def matches(self, record: Record, origin: Origin | None, headers: Sequence[Header] | None = None) -> bool:
        """Return whether a record of the window is meant.

        Args:
            record: The record.
            origin: What its headers say, if it is a dead letter; without it no condition on letters holds.
            headers: Its headers, if the caller has read them already.
        """
        if self.since_ms is not None and record.timestamp_ms < self.since_ms:
            return False
        if self.until_ms is not None and record.timestamp_ms >= self.until_ms:
            return False
        if self.keys and record.key not in self.keys:
            return False
        if (self.topics or self.groups or self.errors) and not (
            origin is not None
            and (not self.topics or origin.partition.topic in self.topics)
            and (not self.groups or origin.group in self.groups)
            and (not self.errors or origin.error in self.errors)
        ):
            return False
        if not self.headers and self.redrives_below is None:
            return True
        found = record.headers if headers is None else headers
        if self.redrives_below is not None and redriven_count(found) >= self.redrives_below:
            return False
        return all(header in found for header in self.headers)


async def selected_window(
    admin: Admin, topic: str, selection: Selection, now_ms: int
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return where reading starts and ends in each partition: everything outside is not meant.

    Raises:
        TopicNotFound: The cluster does not have the topic.
        PartitionNotFound: The topic does not have the partition.
        InvalidRequest: The window is empty, reversed, in the future or beyond the log.
    """
    _check(selection, now_ms)
    starts, ends = await window(admin, topic, selection.partition)
    for place, first in starts.items():
        end = ends[place]
        wanted = [offset for offset in (selection.first, selection.last) if offset is not None]
        if any(not first <= offset < end for offset in wanted):
            held = f"it holds {first} to {end - 1}" if end > first else "it is empty"
            asked = " to ".join(map(str, wanted))
            raise InvalidRequest(f"offset {asked} is not in {place}: {held}", topic=topic, partition=place.partition)
        starts[place] = first if selection.first is None else selection.first
        ends[place] = end if selection.last is None else selection.last + 1
    if selection.since_ms is not None:
        found = await admin.offsets_since(starts, selection.since_ms)
        starts = {place: min(max(first, found.get(place, ends[place])), ends[place]) for place, first in starts.items()}
    if selection.since_ms is not None and _is_empty(starts, ends):
        raise InvalidRequest(f"{topic} holds nothing since {iso_ms(selection.since_ms)}: take an earlier start")
    return starts, ends


def _check(selection: Selection, now_ms: int) -> None:
    first, last, since, until = selection.first, selection.last, selection.since_ms, selection.until_ms
    if selection.partition is None and (first is not None or last is not None):
        raise InvalidRequest("an offset needs a partition: offsets count within one")
    if first is not None and last is not None and last < first:
        raise InvalidRequest(f"offsets {first} to {last} are reversed: the first comes first")
    if since is not None and since > now_ms:
        raise InvalidRequest(f"{iso_ms(since)} is in the future: nothing is there yet")
    if since is not None and until is not None and until <= since:
        what = "empty: its end is its start" if until == since else "reversed: it ends before it starts"
        raise InvalidRequest(f"the window from {iso_ms(since)} to {iso_ms(until)} is {what}")


def _is_empty(starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]) -> bool:
    return all(first >= ends[place] for place, first in starts.items())
