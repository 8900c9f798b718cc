"""The records of a topic that an operator selects: a window of offsets or time, and conditions."""

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.config.topic_names import kind_by_name
from headrace.delivery.dead_letter import Origin
from headrace.errors import InvalidRequest, TopicNotFound
from headrace.kafka import Admin, window
from headrace.kafka.timestamps import iso_ms, milliseconds
from headrace.records import Header, Record, TopicPartition

Moment = Annotated[datetime, Meta(tz=True, description="ISO 8601 with a time zone.")]


class Span(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, rename="camel"):
    """A part of a topic; an absent field sets no limit."""

    partition: Annotated[int, Meta(ge=0, description="Only this partition of the topic that is read.")] | None = None
    first: Annotated[int, Meta(ge=0, description="First offset; needs `partition`.")] | None = None
    last: Annotated[int, Meta(ge=0, description="Last offset; needs `partition`.")] | None = None
    since: Moment | None = None
    """Records with this timestamp or a later one; the timestamp of a dead letter is when it was written."""
    until: Moment | None = None
    """Records with an earlier timestamp."""


class Selection(Span, frozen=True, kw_only=True, omit_defaults=True):
    """A part of a topic, and conditions that its records must all meet. Empty selects everything."""

    topics: Sequence[str] = ()
    """Dead letters of one of these origin topics."""
    groups: Sequence[str] = ()
    """Dead letters of one of these groups."""
    errors: Sequence[str] = ()
    """Dead letters of one of these error classes."""
    keys: Sequence[str] = ()
    """Records with one of these keys."""
    headers: dict[str, str] = {}
    """Records that have each of these headers with this value."""

    @property
    def has_conditions(self) -> bool:
        """Whether some records of the window may not be selected."""
        timed = self.since is not None or self.until is not None
        return bool(timed or self.topics or self.groups or self.errors or self.keys or self.headers)


class Matcher:
    """Checks records against the conditions of a selection."""

    def __init__(self, selection: Selection) -> None:
        self._since_ms = None if selection.since is None else milliseconds(selection.since)
        self._until_ms = None if selection.until is None else milliseconds(selection.until)
        self._topics, self._groups, self._errors = selection.topics, selection.groups, selection.errors
        self._of_origin = bool(selection.topics or selection.groups or selection.errors)
        self._keys = {to_bytes(key) for key in selection.keys}
        self._headers = [(name, to_bytes(value)) for name, value in selection.headers.items()]

    def matches(self, record: Record, origin: Origin | None, headers: Sequence[Header] | None = None) -> bool:
        """Return whether a record of the window is selected; without an origin, no dead letter condition matches."""
        if self._since_ms is not None and record.timestamp_ms < self._since_ms:
            return False
        if self._until_ms is not None and record.timestamp_ms >= self._until_ms:
            return False
        if self._keys and record.key not in self._keys:
            return False
        if self._of_origin and not (
            origin is not None
            and (not self._topics or origin.partition.topic in self._topics)
            and (not self._groups or origin.group in self._groups)
            and (not self._errors or origin.error in self._errors)
        ):
            return False
        if not self._headers:
            return True
        found = record.headers if headers is None else headers
        return all(header in found for header in self._headers)


class Window(msgspec.Struct, frozen=True):
    """Offsets of a topic, and the id of the topic."""

    topic: str
    topic_id: str
    ranges: dict[int, tuple[int, int]]
    """Partition to its first offset and the one after its last."""

    @property
    def total(self) -> int:
        """Number of offsets."""
        return sum(end - start for start, end in self.ranges.values())

    @property
    def starts(self) -> dict[TopicPartition, int]:
        return {TopicPartition(self.topic, number): start for number, (start, _) in self.ranges.items()}

    @property
    def ends(self) -> dict[TopicPartition, int]:
        return {TopicPartition(self.topic, number): end for number, (_, end) in self.ranges.items()}

    def overlaps(self, other: "Window") -> bool:
        """Whether the two have an offset in common."""
        return self.topic_id == other.topic_id and any(
            number in other.ranges and start < other.ranges[number][1] and other.ranges[number][0] < end
            for number, (start, end) in self.ranges.items()
        )

    @classmethod
    async def resolve(cls, admin: Admin, topic: str, span: Span, *, cut_until: bool = True) -> "Window":
        """Return the offsets that a span of a topic has now; partitions may be empty.

        With `cut_until` the window ends at the first record that is not before `until`. Without it, records after that
        one stay in the window, and their timestamps decide.

        Raises:
            TopicNotFound: The cluster does not have the topic.
            PartitionNotFound: The topic does not have the partition.
            InvalidRequest: The window is empty, reversed or beyond the log; or the topic is internal.
        """
        if kind_by_name(topic) == "state":
            raise InvalidRequest(f"{topic} is internal: its records cannot be read here", topic=topic)
        _check(span)
        starts, ends = await window(admin, topic, span.partition)
        if span.first is not None or span.last is not None:
            ((partition, first),) = starts.items()
            _check_offsets(span, partition, first, ends[partition])
            if span.first is not None:
                starts = {partition: span.first}
            if span.last is not None:
                ends = {partition: span.last + 1}
        if span.since is not None:
            found = await admin.offsets_since(starts, milliseconds(span.since))
            starts = {p: min(max(first, found.get(p, ends[p])), ends[p]) for p, first in starts.items()}
            if all(first >= ends[p] for p, first in starts.items()):
                raise InvalidRequest(
                    f"{topic} has no records since {iso_ms(milliseconds(span.since))}: use an earlier start"
                )
        if span.until is not None and cut_until:
            later = await admin.offsets_since(starts, milliseconds(span.until))
            ends = {p: max(starts[p], min(end, later.get(p, end))) for p, end in ends.items()}
        found_id = (await admin.topic_ids([topic], "Read")).get(topic)
        if found_id is None:
            raise TopicNotFound(f"topic {topic} does not exist: check its spelling", topic=topic)
        return cls(topic, found_id, {p.partition: (start, ends[p]) for p, start in starts.items()})


def to_bytes(text: str) -> bytes:
    """Return a text as UTF-8; bytes of a command line that are not UTF-8 stay unchanged."""
    return text.encode(errors="surrogateescape")


def _check(span: Span) -> None:
    first, last, since, until = span.first, span.last, span.since, span.until
    if span.partition is None and (first is not None or last is not None):
        raise InvalidRequest("offsets need a partition: they count within one")
    if first is not None and last is not None and last < first:
        raise InvalidRequest(f"offsets {first} to {last} are reversed: put the lower one first")
    if since is not None and until is not None and until <= since:
        raise InvalidRequest(f"until must be later than since, which is {iso_ms(milliseconds(since))}")


def _check_offsets(span: Span, partition: TopicPartition, start: int, end: int) -> None:
    """Raise unless offsets of a partition exist; some of them may have been removed from the log."""
    given = [offset for offset in (span.first, span.last) if offset is not None]
    if given[-1] >= end or (span.last is not None and span.last < start):
        log = f"it has {start} to {end - 1}" if end > start else "it is empty"
        text = f"offset {' to '.join(map(str, dict.fromkeys(given)))} is not in the log of {partition}: {log}"
        raise InvalidRequest(text, topic=partition.topic, partition=partition.partition)
