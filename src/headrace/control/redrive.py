"""Dead letters to where somebody wants them: back to where they came from, elsewhere, into quarantine, or nowhere.

Letters go in slices, one after the other: the records of a slice, then the marks that say so (`marks`). While one slice
is on its way the next is read. A run that is killed between the two sends that slice once more when it is started
again; with `exactly_once` records and marks are one transaction, and nothing is sent twice.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from headrace.config.internal_topics import InternalTopics
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.control.marks import MARKS_TOPIC, Marks
from headrace.control.origins import Origins
from headrace.control.redrive_target import QUARANTINE, Target
from headrace.control.selection import Matcher, Selection, Window, iso_ms
from headrace.control.topics import read_window
from headrace.delivery.dead_letter import MAX_REDRIVES, letter_of, origin_of, own_headers, redriven_count
from headrace.errors import (
    BatchRefused,
    HeadraceError,
    InvalidRequest,
    KafkaError,
    LeaseTaken,
    ProducerQueueFull,
    RecordTooLarge,
)
from headrace.kafka import Admin, Lease, TransactionSession
from headrace.lifecycle import Clock
from headrace.lifecycle.failpoints import reach
from headrace.records import OutgoingRecord, Record, TopicPartition

SLICE_LETTERS = 2000
"""How many letters a run that was killed sends again at most; with a rate, those of one second if they are fewer."""
_EXACT_SLICE_LETTERS = 10_000
_SLICE_BYTES = 8_388_608
_SESSIONS = 3
"""Sessions in a row that may fail without a letter gone."""
_HOUR_MS = 3_600_000
_MOST_REASONS = 20

Answer = asyncio.Future[list[Any]]
"""Where and whether records were written."""
Place = tuple[int, int]
"""Partition and offset of a letter."""
Sent = Callable[[Sequence[OutgoingRecord], Sequence[Any]], None]
"""Is told what became of records."""


class Sender(Protocol):
    """Writes records, as a `Producer` does."""

    def send(self, records: Sequence[OutgoingRecord], done: Callable[[list[Any]], None]) -> None:
        """Write records, then call `done` with a result for each."""


class RedriveOptions(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How letters go."""

    dry_run: bool = False
    """Count what would go where; write and mark nothing."""
    exactly_once: bool = False
    """Write records and marks in transactions: a run that is killed repeats nothing when it is started again."""
    rate_records: float | None = None
    """Records per second at most."""
    max_redrives: int = MAX_REDRIVES
    """Letters whose record was redriven so often already are kept back: they would go round for ever."""
    wait_seconds: float = 0.0
    """How long to wait for another run on the same topic to end."""
    by: str = ""
    """Who does it; stands in the marks."""


class Redriven(msgspec.Struct, frozen=True, rename="camel"):
    """What a run did, or would do."""

    records: int
    """Letters that ended: sent, moved or dropped."""
    targets: Mapping[str, int]
    """Topic to how many letters went there."""
    errors: Mapping[str, int]
    """Error class to how many letters."""
    hours: Mapping[str, int]
    """Hour in which letters were written to how many: ISO 8601, UTC."""
    kept_back: int
    """Letters left where they are because they were redriven too often."""
    too_large: Sequence[str]
    """Letters left where they are because the target does not take them, each with the reason."""
    unproved: Mapping[str, int] = {}
    """Why dead letters are left whose origin is not proved, with their number."""


Item = tuple[Record, OutgoingRecord | None, str]
"""A letter, what is written for it, and its error class."""


class _Slice:
    """Letters that go together."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.size_bytes = 0
        self.answer: Answer
        self.results: list[Any] | None = None
        self.marked: Answer | None = None

    @property
    def records(self) -> list[OutgoingRecord]:
        return [record for _, record, _ in self.items if record]


class _Tally:
    """Counts over all sessions of a run; of what stays where it is in the last one, because each reads it again."""

    def __init__(self) -> None:
        self.met = False
        self.records = 0
        self.targets: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.hours: Counter[int] = Counter()
        self.kept_back = 0
        self.too_large: dict[Place, str] = {}
        self.unproved: Counter[str] = Counter()

    def refuse(self, why: str) -> None:
        known = why in self.unproved or len(self.unproved) < _MOST_REASONS
        self.unproved[why if known else "others of this kind"] += 1

    def add(self, items: Sequence[Item]) -> None:
        self.records += len(items)
        self.targets.update([record.topic for _, record, _ in items if record])
        self.errors.update([error for _, _, error in items])
        self.hours.update([letter.timestamp_ms // _HOUR_MS for letter, _, _ in items])

    def result(self) -> Redriven:
        hours = {iso_ms(hour * _HOUR_MS): count for hour, count in sorted(self.hours.items())}
        targets, errors = dict(self.targets.most_common()), dict(self.errors.most_common())
        too_large = [*self.too_large.values()]
        left = dict(self.unproved.most_common())
        return Redriven(self.records, targets, errors, hours, self.kept_back, too_large, left)


class Redrive:
    """One run over the letters of one dead letter topic; one at a time has its lease."""

    def __init__(
        self,
        kafka: KafkaConfig,
        admin: Admin,
        topic: str,
        sender: Sender,
        clock: Clock,
        *,
        selection: Selection | None = None,
        target: Target | None = None,
        options: RedriveOptions | None = None,
    ) -> None:
        """Prepare; by default everything goes back to where it came from."""
        self._kafka = kafka
        self._admin = admin
        self._topic = topic
        self._sender = sender
        self._clock = clock
        self._selection = selection or Selection()
        self._matcher = Matcher(self._selection)
        self._target = target or Target()
        self._options = options or RedriveOptions()
        self._marks = Marks(kafka, admin, topic)
        self._lease = Lease(kafka, admin, f"redrive.{topic}", clock, source=topic)
        self.origins = Origins(InternalTopics(HeadraceConfig()))
        """Proves the origins of dead letters; knows no consumer by default. Set before `run`."""
        self.on_sent: Sent | None = None
        """Told of records that are written, or not, with their results. Set before `run`."""
        self.goes_on = False
        """Whether an earlier run was killed, so that nothing may be left. Set before `run`."""
        self._session: TransactionSession | None = None
        self._partitions: dict[str, int] = {}
        self._tally = _Tally()
        self._under_way: _Slice | None = None
        self._unsure: Sequence[Item] = ()
        self._passed = 0
        self._next_at = 0.0

    async def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> Redriven:
        """Send every letter that is meant and has not ended, and mark it.

        Key, value and the record's own headers are those the record had; `headrace.redrive.count` says how often it
        came back, `headrace.redrive.of` which record it was first. Its timestamp is now, because an old one could be
        beyond the topic's retention. No consumer group is touched.

        If cancelled, the slice under way ends first. If it fails, what went is marked; run it again to go on.

        Args:
            progress: Told offsets done and offsets in all after each slice.

        Raises:
            TopicNotFound: The dead letter topic, or one that letters go to, does not exist.
            InvalidRequest: The window is none, no letter is meant, letters would go in circles, or a record is no
                dead letter.
            LeaseTaken: Another run on this topic is under way.
            LeaseLost: Another run may have begun.
            KafkaError: A letter could not be written.
        """
        self._target.check(self._topic)
        await self._admin.describe_topic(self._topic)
        if self._target.topic:
            await self._learn(self._target.topic)
        if self._options.dry_run:
            await self._marks.load()
            return await self._pass(progress)
        if not await self._lease.acquire(self._options.wait_seconds):
            raise LeaseTaken(
                f"{self._topic} is worked on by {self._lease.holder}: let it end, or wait for it (--wait). One that "
                "was killed is counted out after 10 s",
                topic=self._topic,
            )
        try:
            await self._marks.prepare()
            if self._kafka.create_topics and self._target.kind == "quarantine":
                await self._admin.ensure_topic_like(self._topic + QUARANTINE, self._topic)
            if self._options.exactly_once:
                return await self._sessions(progress)
            await self._marks.load(settled=True)
            return await self._pass(progress)
        finally:
            await self._lease.release()

    async def _sessions(self, progress: Callable[[int, int], None]) -> Redriven:
        """Run in sessions: each shuts out those before it, and then the marks tell what they have committed."""
        failures = 0
        while True:
            self._session = TransactionSession(self._kafka, f"headrace-redrive-{self._topic}")
            await self._session.start()
            before = self._tally.records + len(self._tally.too_large)
            try:
                await self._written(self._session.submit([OutgoingRecord(MARKS_TOPIC, b"session", None, None, 0)]))
                await self._marks.load(settled=True)
                if self._unsure and self._marks.is_ended(*_place(self._unsure[0][0])):
                    self._tally.add(self._unsure)
                self._unsure = ()
                return await self._pass(progress)
            except KafkaError:
                moved = self._tally.records + len(self._tally.too_large) > before
                failures = 0 if moved else failures + 1
                if failures == _SESSIONS:
                    raise
            finally:
                await self._session.stop()
            await self._lease.check()

    async def _pass(self, progress: Callable[[int, int], None]) -> Redriven:
        now = self._clock.time()
        window = await Window.resolve(self._admin, self._topic, self._selection, now, cut_until=False)
        logs, ends = await self._admin.start_offsets(window.starts), window.ends
        starts = {p: self._marks.first_left(p.partition, max(s, logs[p]), ends[p]) for p, s in window.starts.items()}
        total, self._passed = sum(ends.values()) - sum(starts.values()), 0
        self._tally.kept_back = 0
        self._tally.unproved.clear()
        try:
            async with contextlib.aclosing(self._slices(starts, ends)) as slices:
                async for part in slices:
                    await self._land()
                    if self._options.dry_run:
                        self._tally.add(part.items)
                    elif part.items:
                        await self._pace(len(part.items))
                        await self._lease.check()
                        self._submit(part)
                    progress(self._passed, total)
        finally:
            await self._land()
        if self._selection.has_conditions and not self._tally.met and not self.goes_on:
            left = sum(e - starts[p] - self._marks.ended_count(p.partition, starts[p], e) for p, e in ends.items())
            raise InvalidRequest(f"nothing matches: {self._topic} has {left} letters left, and none is selected")
        if not self._options.dry_run:
            await self._written(self._send(self._marks.outlived(await self._admin.start_offsets(starts))))
        return self._tally.result()

    async def _slices(
        self, starts: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int]
    ) -> AsyncGenerator[_Slice, None]:
        """Yield letters that are meant; the last slice may be empty."""
        most = _EXACT_SLICE_LETTERS if self._options.exactly_once else SLICE_LETTERS
        most = max(1, min(most, int(self._options.rate_records or most)))
        part = _Slice()
        async with contextlib.aclosing(read_window(self._kafka, starts, ends)) as batches:
            async for batch in batches:
                for letter in batch:
                    item = await self._item(letter)
                    if item is None:
                        continue
                    part.items.append(item)
                    part.size_bytes += letter.size_bytes
                    if len(part.items) >= most or part.size_bytes >= _SLICE_BYTES:
                        yield part
                        part = _Slice()
                self._passed += len(batch)
        yield part

    async def _item(self, letter: Record) -> Item | None:
        """Return what is to be done with a record of the window, if it is a letter that is meant and left."""
        place = _place(letter)
        if place in self._tally.too_large or self._marks.is_ended(*place):
            return None
        headers = letter.headers
        origin = origin_of(headers) or letter_of(letter)  # which says why it is none
        if not self._matcher.matches(letter, origin, headers):
            return None
        self._tally.met = True
        target, own = self._target, own_headers(headers)
        if target.kind in ("origin", "tier") and (why := self.origins.refusal(self._topic, origin)):
            self._tally.refuse(why)
            return None
        if target.goes_round and redriven_count(own) >= self._options.max_redrives:
            self._tally.kept_back += 1
            return None
        topic = target.topic_of(self._topic, origin)
        if not topic:
            return letter, None, origin.error
        if topic not in self._partitions:
            await self._learn(topic)
        back, wanted = target.outgoing(letter, own, origin, self._clock)
        # A topic that was made again with fewer partitions: the key chooses.
        partition = wanted if wanted is not None and 0 <= wanted < self._partitions[topic] else None
        return letter, OutgoingRecord(topic, letter.key, letter.value, back, partition), origin.error

    async def _learn(self, topic: str) -> None:
        self._partitions[topic] = len((await self._admin.describe_topic(topic)).partitions)

    async def _pace(self, letters: int) -> None:
        if rate := self._options.rate_records:
            now = self._clock.monotonic()
            if self._next_at > now:
                await self._clock.sleep(self._next_at - now)
            self._next_at = max(self._next_at, now) + letters / rate

    def _submit(self, part: _Slice) -> None:
        marks = self._marks_of(part.items) if self._session else []
        part.answer = self._send([*part.records, *marks])
        self._under_way = part
        if not self._session:
            part.answer.add_done_callback(lambda answer: self._mark_at_once(part, answer.result()))
        reach("redrive.submitted")

    def _mark_at_once(self, part: _Slice, results: Sequence[Any]) -> None:
        """Mark a slice of which all is written while the next one is read; any other is looked at when it lands."""
        if part.marked is None and not any(isinstance(result, HeadraceError) for result in results):
            _sent()
            with contextlib.suppress(ProducerQueueFull):
                part.marked = self._send(self._marks_of(part.items))

    async def _land(self) -> None:
        """Wait until the slice under way is written and marked, also if cancelled meanwhile."""
        if part := self._under_way:
            try:
                await self._finish(part)
            except asyncio.CancelledError:
                await self._finish(part)
                raise
            finally:
                self._under_way = None

    async def _finish(self, part: _Slice) -> None:
        if part.results is None:
            part.results = await self._results(part)
        if part.marked is None:
            _sent()
        if self._session:
            self._unsure = part.items
            await self._written(part.answer)
            self._unsure = ()
        letters = [letter for letter, record, _ in part.items if record]
        failed = {_place(m): r for m, r in zip(letters, part.results, strict=True) if isinstance(r, HeadraceError)}
        ended = [item for item in part.items if _place(item[0]) not in failed] if failed else part.items
        if not self._session:
            part.marked = part.marked or self._send(self._marks_of(ended))
            await self._written(part.marked)
        reach("redrive.marked")
        self._tally.add(ended)
        for failure in failed.values():
            if not isinstance(failure, RecordTooLarge):
                raise failure

    async def _results(self, part: _Slice) -> list[Any]:
        """Return what became of the records of a slice; those that do not fit are named."""
        letters = [(letter, record) for letter, record, _ in part.items if record]
        results = (await asyncio.shield(part.answer))[: len(letters)]
        for number, (letter, record) in enumerate(letters):
            # One that is too large fails its batch, so now each goes by itself. A limit that is learned only from
            # refusals is halved by each, until it is below the record.
            alone: tuple[type[HeadraceError], ...] = RecordTooLarge, BatchRefused
            while not self._session and isinstance(results[number], alone):
                (results[number],) = await asyncio.shield(self._send([record]))
                alone = (BatchRefused,)
            if isinstance(refused := results[number], RecordTooLarge):
                where = f"{letter.topic_partition} offset {letter.offset}"
                self._tally.too_large[_place(letter)] = f"{where}: {refused.description}"
        if letters and self.on_sent:
            self.on_sent(part.records, results)
        return results

    def _send(self, records: Sequence[OutgoingRecord]) -> Answer:
        if self._session and records:
            return self._session.submit(records)
        answer: Answer = asyncio.get_running_loop().create_future()
        self._sender.send(records, lambda results: None if answer.done() else answer.set_result(results))
        return answer

    async def _written(self, answer: Answer) -> None:
        for result in await asyncio.shield(answer):
            if isinstance(result, HeadraceError):
                raise result

    def _marks_of(self, items: Sequence[Item]) -> list[OutgoingRecord]:
        places: defaultdict[int, list[int]] = defaultdict(list)
        for letter, _, _ in items:
            places[letter.partition].append(letter.offset)
        why = f"{self._target.kind}: {self._target.reason}".removesuffix(": ")
        headers = [("headrace.by", self._options.by.encode()), ("headrace.why", why.encode())]
        return [
            record
            for partition, offsets in places.items()
            for record in self._marks.records_for(partition, offsets, headers)
        ]


def _place(record: Record) -> Place:
    return record.partition, record.offset


def _sent() -> None:
    """Letters are written, and nothing says so yet."""
    reach("redrive.sent")
