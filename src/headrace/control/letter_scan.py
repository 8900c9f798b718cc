"""Reading dead letters in portions: newest or oldest first, from where the last portion ended, within a limit.

Nobody joins a group and nothing is committed. Where a portion ended is a text that its reader brings back, so no
process remembers a reader.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Final, Literal, NamedTuple

from headrace.config.kafka import KafkaConfig
from headrace.control.dead_letters import not_one
from headrace.control.marks import Marks
from headrace.control.selection import Matcher, Selection, Window
from headrace.control.topics import read_window
from headrace.delivery.dead_letter import Origin, origin_of
from headrace.errors import InvalidRequest
from headrace.kafka import Admin
from headrace.lifecycle import Clock
from headrace.records import Record, TopicPartition

Order = Literal["newest", "oldest"]
State = Literal["all", "left", "ended"]

_CURSOR: Final = re.compile(r"(newest|oldest)((?:\.\d{1,9}-\d{1,18})*)")
_FIRST_ROUND: Final = 50
_ROUND_RECORDS: Final = 2_000
_ROUND_BYTES: Final = 16_777_216
_TURN: Final = 200


class Letter(NamedTuple):
    """A dead letter as it lies in its topic, and its history."""

    record: Record
    origin: Origin
    ended: bool


class ScanOptions(NamedTuple):
    """Where a scan goes and how far."""

    order: Order = "newest"
    """Of each partition; partitions are merged by the time of their letters."""
    cursor: str = ""
    """Where the portion before ended; empty begins."""
    state: State = "all"
    """`left` passes over letters that have ended, `ended` over those that have not."""
    text: str = ""
    """What reason, excerpt or error class contain, in any case."""
    limit_records: int = 10_000
    """Records that are read at most."""
    limit_seconds: float = 5.0
    """How long it goes on reading; what is on its way then is still looked at."""


class Scan:
    """One portion."""

    def __init__(
        self, kafka: KafkaConfig, admin: Admin, topic: str, marks: Marks, clock: Clock, options: ScanOptions
    ) -> None:
        """Prepare; nothing is read yet."""
        self._kafka, self._admin, self._topic, self._marks, self._clock = kafka, admin, topic, marks, clock
        self._options = options
        self._newest = options.order == "newest"
        self._open: dict[TopicPartition, list[int]] = {}
        """What is ahead: partition to its first offset and the one behind its last."""
        self._step = _FIRST_ROUND
        self.scanned = 0
        """Records read and looked at."""
        self.foreign = 0
        """Those of them that are no dead letters."""

    @property
    def remaining(self) -> int:
        """Offsets that are still ahead."""
        return sum(max(0, end - first) for first, end in self._open.values())

    @property
    def cursor(self) -> str:
        """Where to go on; empty when nothing is ahead."""
        if not self.remaining:
            return ""
        edge = 1 if self._newest else 0
        places = (f".{p.partition}-{bounds[edge]}" for p, bounds in sorted(self._open.items()))
        return self._options.order + "".join(places)

    async def letters(self, selection: Selection) -> AsyncGenerator[Letter, None]:
        """Yield the letters that are meant until a limit or the end; leave it at any time and take the cursor.

        Raises:
            TopicNotFound, PartitionNotFound: The cluster does not have it.
            InvalidRequest: The window or the cursor is not usable, or records are there and none is a letter.
        """
        await self._begin(selection)
        text, began, matcher = self._options.text.casefold(), self._clock.monotonic(), Matcher(selection)
        while windows := self._next_windows(self._clock.monotonic() - began):
            for record in self._merged(await self._read(windows)):
                if self.scanned % _TURN == _TURN - 1:
                    await asyncio.sleep(0)  # deliveries have their turn
                self._pass(record)
                headers = record.headers
                origin = origin_of(headers)
                if origin is None:
                    self.foreign += 1
                    continue
                ended = self._marks.is_ended(record.partition, record.offset)
                if self._wants(ended, origin, text) and matcher.matches(record, origin, headers):
                    yield Letter(record, origin, ended)
            for place, (first, end) in windows.items():  # offsets without records are passed too
                self._pass_to(place, first if self._newest else end)
        if self.scanned and self.scanned == self.foreign:
            raise not_one(self._topic, f"{self.foreign} of its records are read, and none has headrace.dlq headers")

    async def _begin(self, selection: Selection) -> None:
        options = self._options
        window = await Window.resolve(self._admin, self._topic, selection, self._clock.time())
        ends = window.ends
        places = parsed(options.cursor, options.order)
        for p, first in window.starts.items():
            at = places.get(p.partition)
            self._open[p] = [first, ends[p]]
            if at is not None:
                self._open[p] = [first, min(at, ends[p])] if self._newest else [max(at, first), ends[p]]

    def _next_windows(self, passed_seconds: float) -> dict[TopicPartition, tuple[int, int]]:
        room = self._options.limit_records - self.scanned
        going = {p: bounds for p, bounds in self._open.items() if bounds[0] < bounds[1]}
        if not going or room <= 0 or passed_seconds >= self._options.limit_seconds:
            return {}
        step = max(1, min(self._step, room // len(going)))
        if self._newest:
            return {p: (max(first, end - step), end) for p, (first, end) in going.items()}
        return {p: (first, min(end, first + step)) for p, (first, end) in going.items()}

    async def _read(self, windows: dict[TopicPartition, tuple[int, int]]) -> Mapping[TopicPartition, list[Record]]:
        """Read a round; one that is too large for memory is made smaller, and `windows` and the next ones with it."""
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
        starts, ends = {p: first for p, (first, _) in windows.items()}, {p: end for p, (_, end) in windows.items()}
        found: dict[TopicPartition, list[Record]] = {place: [] for place in windows}
        size = 0
        async with contextlib.aclosing(read_window(self._kafka, starts, ends)) as batches:
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

    def _pass(self, record: Record) -> None:
        self.scanned += 1
        self._pass_to(record.topic_partition, record.offset + (not self._newest))

    def _pass_to(self, place: TopicPartition, offset: int) -> None:
        self._open[place][1 if self._newest else 0] = offset

    def _wants(self, ended: bool, origin: Origin, text: str) -> bool:
        if self._options.state != "all" and ended != (self._options.state == "ended"):
            return False
        return not text or any(text in said.casefold() for said in (origin.error, origin.reason, origin.excerpt))


def parsed(cursor: str, order: Order) -> dict[int, int]:
    """Return a cursor's offset by partition; none for an empty cursor.

    Raises:
        InvalidRequest: It is no cursor, or one of the other order.
    """
    if not cursor:
        return {}
    found = _CURSOR.fullmatch(cursor)
    if not found or found[1] != order:
        why = f"is one of the order {found[1]}, and {order} is asked for" if found else "is none of ours"
        raise InvalidRequest(f"the cursor {why}: bring back the one that came with the page before, with its order")
    places = (place.split("-") for place in found[2].split(".")[1:])
    return {int(partition): int(offset) for partition, offset in places}
