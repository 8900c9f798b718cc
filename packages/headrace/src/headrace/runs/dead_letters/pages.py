"""Dead letters in pages and in numbers: read newest or oldest first, within limits that no client can raise.

No group is joined and nothing is committed. A page has a cursor, which the client sends for the next page, so no
process keeps state for a client.
"""

import asyncio
import contextlib
import heapq
import re
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Final, Literal, NamedTuple

import msgspec

from headrace.config.model import HeadraceConfig
from headrace.delivery.dead_letter import STACK_TRACE, Origin, redriven_count
from headrace.errors import InvalidRequest, TooManyRequests
from headrace.formats.choice import Codecs
from headrace.formats.stored_values import AUTO, StoredValues
from headrace.kafka import Admin, read_window
from headrace.kafka.timestamps import iso_ms, milliseconds, moment
from headrace.records import Record, TopicPartition
from headrace.runs.dead_letters.completed_offsets import CompletedOffsets
from headrace.runs.dead_letters.counts import DeadLetterTopics, not_one
from headrace.runs.dead_letters.dead_letter_readers import read_origin
from headrace.runs.selection import Matcher, Selection, Window
from headrace.runtime import Clock

Order = Literal["newest", "oldest"]
State = Literal["all", "left", "completed"]

_CURSOR: Final = re.compile(r"(newest|oldest)((?:\.\d{1,9}-\d{1,18})*)")
_FIRST_ROUND: Final = 50
_ROUND_RECORDS: Final = 8_000
_ROUND_BYTES: Final = 16_777_216
_TURN: Final = 200
_SCANS: Final = 2
_PAGE_BYTES: Final = 8_388_608
_NAMES: Final = 100
_HOUR_MS: Final = 3_600_000
_DAY_MS: Final = 86_400_000
_LONG_MS: Final = 2 * _DAY_MS
"""A longer window is counted by day."""


class FoundDeadLetter(NamedTuple):
    """A dead letter as stored in its topic, and its history."""

    record: Record
    origin: Origin
    completed: bool


class ScanOptions(NamedTuple):
    """Where a scan starts and how far it goes."""

    order: Order = "newest"
    """Within each partition; partitions are merged by the time of their dead letters."""
    cursor: str = ""
    """End of the previous page; empty starts at the first dead letter."""
    state: State = "all"
    """`left` selects dead letters that are not completed, `completed` those that are."""
    text: str = ""
    """Reason, excerpt or error class must contain this, in upper or lower case."""
    limit_records: int = 100_000
    """Maximum number of records to read."""
    limit_seconds: float = 5.0
    """No round of reading starts after this; a round that has started is completed."""


class Scan:
    """Reads a dead letter topic in one order, until a limit."""

    def __init__(
        self, admin: Admin, topic: str, completed: CompletedOffsets, clock: Clock, options: ScanOptions
    ) -> None:
        self._admin, self._topic, self._completed, self._clock = admin, topic, completed, clock
        self._options = options
        self._newest = options.order == "newest"
        self._ahead: dict[TopicPartition, list[int]] = {}
        """What is still to be read: partition to its first offset and the one after its last."""
        self._step = _FIRST_ROUND
        self._skipped_completed = False
        """Whether completed dead letters were skipped without reading them."""
        self.scanned = 0
        """Records read and examined."""
        self.foreign = 0
        """Those of them that no reader reads as a dead letter."""

    @property
    def remaining(self) -> int:
        """Offsets that are still to be read."""
        return sum(max(0, end - first) for first, end in self._ahead.values())

    @property
    def cursor(self) -> str:
        """Where the next scan starts; empty at the end."""
        if not self.remaining:
            return ""
        edge = 1 if self._newest else 0
        return self._options.order + "".join(f".{p.partition}-{at[edge]}" for p, at in sorted(self._ahead.items()))

    async def dead_letters(self, selection: Selection) -> AsyncGenerator[FoundDeadLetter, None]:
        """Yield the selected dead letters until a limit or the end; the caller may stop at any time and use the cursor.

        Raises:
            TopicNotFound, PartitionNotFound: The cluster does not have it.
            InvalidRequest: The window or the cursor is not valid, or none of the records is a dead letter.
        """
        await self._begin(selection)
        text = self._options.text.casefold()
        matcher = Matcher(selection)
        started_at = self._clock.monotonic()
        while windows := self._next_windows(self._clock.monotonic() - started_at):
            for record in self._merged(await self._read(windows)):
                if self.scanned % _TURN == _TURN - 1:
                    await asyncio.sleep(0)  # let deliveries run
                self.scanned += 1
                self._pass(record.topic_partition, record.offset + (not self._newest))
                headers = record.headers
                origin = read_origin(record, headers)
                if origin is None:
                    self.foreign += 1
                    continue
                completed = self._completed.is_completed(record.partition, record.offset)
                if self._selects(completed, origin, text) and matcher.matches(record, origin, headers):
                    yield FoundDeadLetter(record, origin, completed)
            for partition, (first, end) in windows.items():  # also past offsets without records
                self._pass(partition, first if self._newest else end)
        if self.scanned and self.scanned == self.foreign and not self._skipped_completed:
            raise not_one(
                self._topic, f"none of the {self.foreign} records that were read has headers of a dead letter"
            )

    async def _begin(self, selection: Selection) -> None:
        window = await Window.resolve(self._admin, self._topic, selection)
        cursor = parsed(self._options.cursor, self._options.order)
        for number, (first, end) in window.ranges.items():
            at = cursor.get(number)
            if at is not None and self._newest:
                end = min(at, end)
            elif at is not None:
                first = max(at, first)
            self._ahead[TopicPartition(self._topic, number)] = [first, end]

    def _next_windows(self, passed_seconds: float) -> dict[TopicPartition, tuple[int, int]]:
        allowed = self._options.limit_records - self.scanned
        if not self._newest and self._options.state == "left":
            for p, at in self._ahead.items():
                first_left = self._completed.first_left(p.partition, *at)
                self._skipped_completed = self._skipped_completed or first_left > at[0]
                at[0] = first_left
        ahead = {p: at for p, at in self._ahead.items() if at[0] < at[1]}
        if not ahead or allowed <= 0 or passed_seconds >= self._options.limit_seconds:
            return {}
        step = max(1, min(self._step, allowed // len(ahead)))
        if self._newest:
            return {p: (max(first, end - step), end) for p, (first, end) in ahead.items()}
        return {p: (first, min(end, first + step)) for p, (first, end) in ahead.items()}

    async def _read(self, windows: dict[TopicPartition, tuple[int, int]]) -> Mapping[TopicPartition, list[Record]]:
        """Read a round; if it is too large for memory, make it, `windows` and the next rounds smaller."""
        while True:
            found, size = await self._read_round(windows)
            if size <= _ROUND_BYTES or self._step == 1:
                if size < _ROUND_BYTES // 8:
                    self._step = min(self._step * 4, max(1, _ROUND_RECORDS // len(windows)))
                return found
            self._step = max(1, self._step // 4)
            windows.update(self._next_windows(0))

    async def _read_round(
        self, windows: Mapping[TopicPartition, tuple[int, int]]
    ) -> tuple[Mapping[TopicPartition, list[Record]], int]:
        starts = {p: first for p, (first, _) in windows.items()}
        ends = {p: end for p, (_, end) in windows.items()}
        found: dict[TopicPartition, list[Record]] = {partition: [] for partition in windows}
        size = 0
        async with contextlib.aclosing(read_window(self._admin.config, starts, ends)) as batches:
            async for batch in batches:
                for record in batch:
                    found[record.topic_partition].append(record)
                    size += record.size_bytes
                if size > _ROUND_BYTES and self._step > 1:
                    break
        return found, size

    def _merged(self, found: Mapping[TopicPartition, list[Record]]) -> Iterator[Record]:
        streams = [reversed(records) if self._newest else iter(records) for records in found.values()]
        return heapq.merge(*streams, key=lambda record: record.timestamp_ms, reverse=self._newest)

    def _pass(self, partition: TopicPartition, offset: int) -> None:
        self._ahead[partition][1 if self._newest else 0] = offset

    def _selects(self, completed: bool, origin: Origin, text: str) -> bool:
        if self._options.state != "all" and completed != (self._options.state == "completed"):
            return False
        parts = origin.error, origin.text("reason"), origin.text("excerpt")
        return not text or any(text in part.casefold() for part in parts)


def parsed(cursor: str, order: str) -> dict[int, int]:
    """Return a cursor's offset by partition; none for an empty cursor.

    Raises:
        InvalidRequest: It is not a cursor, or it belongs to the other order.
    """
    if not cursor:
        return {}
    found = _CURSOR.fullmatch(cursor)
    if not found:
        raise InvalidRequest("invalid cursor: send the cursor of the previous page")
    if found[1] != order:
        raise InvalidRequest(f"the cursor belongs to order {found[1]}, not {order}: send it with its order")
    pairs = (pair.split("-") for pair in found[2].split(".")[1:])
    return {int(partition): int(offset) for partition, offset in pairs}


class DeadLetterOrigin(msgspec.Struct, frozen=True, rename="camel"):
    """The record that a dead letter was."""

    topic: str
    partition: int
    offset: int
    timestamp: str


class ResultDetails(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """Fields of the backend's result other than the failure."""

    key: str = ""
    correlation_id: str = ""
    traceability_id: str = ""
    timestamp: str = ""


class DeadLetterRecord(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A dead letter, its origin and the failure."""

    partition: int
    offset: int
    timestamp: str
    completed: bool
    """Whether it is redriven, dropped, moved to quarantine or delivered again."""
    writer: str
    """The product that wrote it: `headrace`, or that of another reader."""
    origin: DeadLetterOrigin
    group: str
    attempts: int
    """0 if its writer does not say."""
    first_failure: str
    last_failure: str
    error: str
    status: str
    """HTTP status of the last response; empty if none blamed the record."""
    reason: str
    excerpt: str
    stack_trace: str
    result: ResultDetails
    redrives: int
    """How often its record was redriven before this failure."""
    headers: list[tuple[str, str | None]]
    """The record's own headers; bytes that are not UTF-8 are written as `\\\\xff`."""
    key_format: str
    """How the key was read: a format, `schema` with the id of one in the registry, `binary` for base64, `null`."""
    key: msgspec.Raw
    value_format: str
    value: msgspec.Raw


class DeadLetterReader:
    """Decodes keys and values in a format, or in one that fits."""

    def __init__(self, codecs: Codecs, key_format: str | None = None, value_format: str | None = None) -> None:
        """Prepare; a format that is not given is guessed: a schema of the registry, JSON, text, else base64."""
        self._keys, self._values = (
            StoredValues(codecs, name or AUTO, is_strict=False, finds_json=True) for name in (key_format, value_format)
        )

    async def read(self, found: FoundDeadLetter) -> DeadLetterRecord:
        """Return a dead letter with its key and value in JSON."""
        record, origin, completed = found
        headers = record.headers
        own = [(name, _text(data)) for name, data in origin.own_headers(headers)]
        trace = origin.headers.get(STACK_TRACE) or b""
        written = iso_ms(origin.timestamp_ms) if origin.timestamp_ms >= 0 else ""
        await self._keys.prepare([record.key])
        await self._values.prepare([record.value])
        key, value = self._keys.find(record.key), self._values.find(record.value)
        return DeadLetterRecord(
            partition=record.partition,
            offset=record.offset,
            timestamp=iso_ms(record.timestamp_ms),
            completed=completed,
            writer=origin.writer,
            origin=DeadLetterOrigin(*origin.partition, origin.offset, written),
            group=origin.group,
            attempts=origin.attempts,
            first_failure=origin.text("first_failure"),
            last_failure=origin.text("last_failure"),
            error=origin.error,
            status=origin.text("status"),
            reason=origin.text("reason"),
            excerpt=origin.text("excerpt"),
            stack_trace=trace.decode(errors="replace"),
            result=ResultDetails(*map(origin.text, ("key", "correlation_id", "traceability_id", "result_timestamp"))),
            redrives=redriven_count(headers),
            headers=own,
            key_format=key.format,
            key=msgspec.Raw(key.text or b"null"),
            value_format=value.format,
            value=msgspec.Raw(value.text or b"null"),
        )


class DeadLetterPage(msgspec.Struct, frozen=True, rename="camel"):
    """A page of dead letters, and how far the search went."""

    topic: str
    dead_letters: list[DeadLetterRecord]
    scanned: int
    """Records read for this page."""
    remaining: int
    """Offsets of the window that were not read: an upper bound for its remaining records."""
    foreign: int
    """Records read that are not dead letters."""
    cursor: str
    """Send it with the same order to get the next page; empty at the end of the window."""


class DeadLetterStatistics(msgspec.Struct, frozen=True, rename="camel"):
    """Dead letters of a window, counted. The most frequent names are first; beyond 100, the rest is `other`."""

    topic: str
    since: str | None
    """Start of the window; None for a topic without dead letters."""
    until: str | None
    """Its end; None for now."""
    dead_letters: int
    left: int
    """Those of them that are not completed."""
    errors: dict[str, int]
    """Error class to dead letters."""
    topics: dict[str, int]
    """Origin topic to dead letters."""
    writers: dict[str, int]
    """The product that wrote them to dead letters."""
    statuses: dict[str, int]
    """HTTP status to dead letters, of those that have one."""
    times: dict[str, int]
    """Start of each time bucket with dead letters, and how many there are, in the order of time."""
    scanned: int
    remaining: int
    """Offsets of the window that were not read."""
    partial: bool
    """Whether a limit was reached: only the newest dead letters of the window are counted."""


class DeadLetterPages:
    """Reads dead letter topics for people."""

    def __init__(self, admin: Admin, codecs: Codecs, clock: Clock, config: HeadraceConfig) -> None:
        """Prepare; the consumers of `config` are those whose dead letter topics and formats are known."""
        self._admin, self._codecs, self._clock = admin, codecs, clock
        self.topics = DeadLetterTopics(admin, config)
        self._scans = 0

    async def page(self, topic: str, selection: Selection, options: ScanOptions, most: int) -> DeadLetterPage:
        """Return up to `most` dead letters; fewer when a limit, or 8 MiB of keys and values, is reached.

        Raises:
            TopicNotFound, PartitionNotFound: The cluster does not have it.
            InvalidRequest: See `Scan.dead_letters`.
            TooManyRequests: Other requests are reading dead letters.
        """
        _, consumer = (await self.topics.names()).get(topic, (0, None))
        formats = (consumer.key_format, consumer.value_format) if consumer else (None, None)
        reader = DeadLetterReader(self._codecs, *formats)
        found: list[DeadLetterRecord] = []
        size = 0
        async with self._scanning(topic, selection, options) as (scan, dead_letters):
            async for one in dead_letters:
                found.append(await reader.read(one))
                size += one.record.size_bytes
                if len(found) >= most or size > _PAGE_BYTES:
                    break
        return DeadLetterPage(topic, found, scan.scanned, scan.remaining, scan.foreign, scan.cursor)

    async def statistics(self, topic: str, selection: Selection, options: ScanOptions) -> DeadLetterStatistics:
        """Return the number of dead letters by error class, origin, status and hour; by day if the window is long.

        Without a start, the window is the day before the newest dead letter, or before the requested end.

        Raises:
            As `page`.
        """
        since, until = selection.since, selection.until
        bucket_ms = _HOUR_MS
        if since is not None:
            end_ms = milliseconds(until) if until else int(self._clock.time() * 1000)
            bucket_ms = _DAY_MS if end_ms - milliseconds(since) > _LONG_MS else _HOUR_MS
        else:
            end = milliseconds(until) if until else await self._newest_ms(topic)
            since = None if end is None else moment(max(0, end - _DAY_MS))
            selection = msgspec.structs.replace(selection, since=since)
        errors, topics, writers, statuses = (Counter[str]() for _ in range(4))
        times = Counter[int]()
        left = 0
        async with self._scanning(topic, selection, options) as (scan, dead_letters):
            async for record, origin, completed in dead_letters:
                left += not completed
                errors[origin.error] += 1
                topics[origin.partition.topic] += 1
                writers[origin.writer] += 1
                if status := origin.text("status"):
                    statuses[status] += 1
                times[record.timestamp_ms // bucket_ms * bucket_ms] += 1
        return DeadLetterStatistics(
            topic,
            None if since is None else iso_ms(milliseconds(since)),
            None if until is None else iso_ms(milliseconds(until)),
            errors.total(),
            left,
            _most(errors),
            _most(topics),
            dict(writers),
            _most(statuses),
            {iso_ms(start): count for start, count in sorted(times.items())},
            scan.scanned,
            scan.remaining,
            bool(scan.remaining),
        )

    async def _newest_ms(self, topic: str) -> int | None:
        times = (await self._admin.time_bounds(await self._admin.topic_offsets(topic, "Read"))).values()
        # No later than now: a window must not begin in the future, whatever clock stamped a dead letter.
        return min(max(newest for _, newest in times), int(self._clock.time() * 1000)) if times else None

    @contextlib.asynccontextmanager
    async def _scanning(
        self, topic: str, selection: Selection, options: ScanOptions
    ) -> AsyncGenerator[tuple[Scan, AsyncGenerator[FoundDeadLetter, None]], None]:
        if self._scans >= _SCANS:
            raise TooManyRequests(f"limit reached: {_SCANS} requests are reading dead letters here; try again later")
        self._scans += 1
        try:
            completed = CompletedOffsets(self._admin, topic)
            await completed.load()
            scan = Scan(self._admin, topic, completed, self._clock, options)
            async with contextlib.aclosing(scan.dead_letters(selection)) as dead_letters:
                yield scan, dead_letters
        finally:
            self._scans -= 1


def _most(counts: Counter[str]) -> dict[str, int]:
    named = dict(counts.most_common(_NAMES))
    rest = counts.total() - sum(named.values())
    return {**named, "other": rest} if rest else named


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="backslashreplace")
