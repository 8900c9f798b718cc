"""Dead letters in pages and in numbers, within limits that no reader can lift."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from typing import Final

import msgspec

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.kafka import KafkaConfig
from headrace.control.dead_letters import DeadLetterTopics
from headrace.control.letter_scan import Letter, Scan, ScanOptions
from headrace.control.letter_text import LetterText, ShownLetter
from headrace.control.marks import Marks
from headrace.control.selection import Selection, iso_ms, milliseconds, moment
from headrace.errors import TooManyRequests
from headrace.formats.codecs import Codecs
from headrace.kafka import Admin
from headrace.lifecycle import Clock

_SCANS: Final = 2
_PAGE_BYTES: Final = 8_388_608
_NAMES: Final = 100
_DAY_MS: Final = 86_400_000


class LetterPage(msgspec.Struct, frozen=True, rename="camel"):
    """Some letters, and how far the search for them went."""

    topic: str
    letters: list[ShownLetter]
    scanned: int
    """Records read for this page."""
    remaining: int
    """Offsets of the window that are still ahead, which is at most how many records are."""
    foreign: int
    """Records read that are no dead letters."""
    cursor: str
    """Goes on behind this page, with the same order; empty at the end of the window."""


class LetterStatistics(msgspec.Struct, frozen=True, rename="camel"):
    """Letters of a window, counted. What comes most often first; beyond 100 names, the rest is `other`."""

    topic: str
    since: str | None
    """Start of the window; None for a topic without letters."""
    until: str | None
    """Its end; None for now."""
    letters: int
    left: int
    """Those of them that have not ended."""
    errors: dict[str, int]
    """Error class to letters."""
    topics: dict[str, int]
    """Topic that they came from to letters."""
    statuses: dict[str, int]
    """HTTP status to letters, of those that have one."""
    times: dict[str, int]
    """Start of each span of time with letters to how many there are, in the order of time."""
    scanned: int
    remaining: int
    """Offsets of the window that were not read."""
    partial: bool
    """Whether a limit ended the count: it is of the newest letters of the window."""


class DeadLetters:
    """Reads dead letter topics for people."""

    def __init__(
        self,
        kafka: KafkaConfig,
        admin: Admin,
        codecs: Codecs,
        clock: Clock,
        consumers: Iterable[ReactiveConsumerConfig] = (),
    ) -> None:
        """Prepare; `consumers` are those whose dead letter topics and formats are known."""
        self._kafka, self._admin, self._codecs, self._clock = kafka, admin, codecs, clock
        self.topics = DeadLetterTopics(kafka, admin, consumers)
        self._scans = 0

    async def page(self, topic: str, selection: Selection, options: ScanOptions, most: int) -> LetterPage:
        """Return up to so many letters; fewer when a limit, or 8 MiB of keys and values, end the page before.

        Args:
            topic: The dead letter topic.
            selection: Which letters.
            options: From where and how far.
            most: Letters at most.

        Raises:
            TopicNotFound, PartitionNotFound: The cluster does not have it.
            InvalidRequest: See `Scan.letters`.
            TooManyRequests: Others are reading dead letters.
        """
        _, consumer = (await self.topics.names()).get(topic, (0, None))
        formats = (consumer.key_format, consumer.value_format) if consumer else (None, None)
        text = LetterText(self._codecs, *formats)
        found, size = [], 0
        async with self._scanning(topic, selection, options) as (scan, letters):
            async for letter in letters:
                found.append(await text.shown(letter))
                size += letter.record.size_bytes
                if len(found) >= most or size > _PAGE_BYTES:
                    break
        return LetterPage(topic, found, scan.scanned, scan.remaining, scan.foreign, scan.cursor)

    async def statistics(
        self, topic: str, selection: Selection, options: ScanOptions, bucket_seconds: int = 3600
    ) -> LetterStatistics:
        """Return how many letters there are by error class, origin, status and time.

        Without a start it is the day that ends with the newest letter, or with the end that is asked for.

        Raises:
            As `page`.
        """
        since, until = ((None if t is None else milliseconds(t)) for t in (selection.since, selection.until))
        if since is None:
            end = until or await self._newest_ms(topic)
            since = None if end is None else max(0, end - _DAY_MS)
            selection = msgspec.structs.replace(selection, since=None if since is None else moment(since))
        errors, topics, statuses, times = Counter[str](), Counter[str](), Counter[str](), Counter[int]()
        left = 0
        async with self._scanning(topic, selection, options) as (scan, letters):
            async for record, origin, ended in letters:
                left += not ended
                errors[origin.error] += 1
                topics[origin.partition.topic] += 1
                if origin.status:
                    statuses[origin.status] += 1
                times[record.timestamp_ms // 1000 // bucket_seconds * bucket_seconds] += 1
        return LetterStatistics(
            topic,
            None if since is None else iso_ms(since),
            None if until is None else iso_ms(until),
            errors.total(),
            left,
            _most(errors),
            _most(topics),
            _most(statuses),
            {iso_ms(start * 1000): count for start, count in sorted(times.items())},
            scan.scanned,
            scan.remaining,
            bool(scan.remaining),
        )

    async def _newest_ms(self, topic: str) -> int | None:
        times = (await self._admin.time_bounds(await self._admin.topic_offsets(topic))).values()
        # No later than now: a window must not begin in the future, whatever clock a letter was stamped by.
        return min(max(newest for _, newest in times), int(self._clock.time() * 1000)) if times else None

    @contextlib.asynccontextmanager
    async def _scanning(
        self, topic: str, selection: Selection, options: ScanOptions
    ) -> AsyncGenerator[tuple[Scan, AsyncGenerator[Letter, None]], None]:
        if self._scans >= _SCANS:
            raise TooManyRequests(f"{_SCANS} others are reading dead letters here: wait until they are done")
        self._scans += 1
        try:
            marks = Marks(self._kafka, self._admin, topic)
            await marks.load()
            scan = Scan(self._kafka, self._admin, topic, marks, self._clock, options)
            async with contextlib.aclosing(scan.letters(selection)) as letters:
                yield scan, letters
        finally:
            self._scans -= 1


def _most(counts: Counter[str]) -> dict[str, int]:
    named = dict(counts.most_common(_NAMES))
    rest = counts.total() - sum(named.values())
    return {**named, "other": rest} if rest else named
