"""Dead letters that are sent back, moved to quarantine or dropped: one run over their topic.

The records of a delivery are written, and saved as ended after that. A run that is killed between the two sends at most
`REPEATS_AT_MOST` dead letters again. With `exactly_once` both are one transaction, and nothing is sent twice.
"""

import asyncio
import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from headrace import errors
from headrace.config.consumers import BatchConfig, DeliveryConfig, FlowControl
from headrace.control.dead_letters.ended_offsets import NOTHING_ENDED, EndedOffsets, dead_letter_lease
from headrace.control.dead_letters.origins import QUARANTINE, Origins
from headrace.control.runs.redrive_spec import Redriven, RedriveSpec
from headrace.control.runs.selection import Matcher, Window
from headrace.control.runs.window_run import Limits, Progress, Run, WindowSource
from headrace.delivery.dead_letter import REFUSALS, origin_of, redriven_count, require_origin
from headrace.delivery.outcomes import ACK, HANDED_OFF, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.kafka import Admin, Lease, TransactionSession, read_window
from headrace.kafka.timestamps import iso_ms
from headrace.records import Committed, Header, Offsets, OutgoingRecord, Produce, Record
from headrace.runtime import Clock
from headrace.runtime.failpoints import reach

REPEATS_AT_MOST = 2000
"""Dead letters that a killed run sends again; with a rate, those of one second if they are fewer."""
_TRANSACTION_RECORDS = 10_000
_DELIVERY_BYTES = 8_388_608
_SESSIONS = 3
"""Sessions in a row that may fail without progress."""
_HOUR_MS = 3_600_000
_MOST_REASONS = 20

OnProgress = Callable[[int, int], Awaitable[None]]
"""Called with how many offsets are passed, and how many there are."""
Sent = Callable[[Sequence[OutgoingRecord], Sequence[Any]], None]
"""Called with records and what became of each."""


class Item(msgspec.Struct, frozen=True, gc=False):
    """A dead letter that is selected, and what is written for it."""

    record: Record
    outgoing: OutgoingRecord | None
    """None for one that is dropped."""
    error: str

    @property
    def position(self) -> tuple[int, int]:
        """Partition and offset of the dead letter."""
        return self.record.partition, self.record.offset


class _Tally:
    """Counts over all sessions of a run; what is left is counted anew in each, because each reads it again."""

    def __init__(self) -> None:
        self.met = False
        """Whether any dead letter was selected."""
        self.records = 0
        self.targets: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.hours: Counter[int] = Counter()
        self.kept_back = 0
        self.too_large: dict[tuple[int, int], str] = {}
        self.unproved: Counter[str] = Counter()

    def refuse(self, why: str) -> None:
        known = why in self.unproved or len(self.unproved) < _MOST_REASONS
        self.unproved[why if known else "others of this kind"] += 1

    def add(self, items: Sequence[Item]) -> None:
        self.records += len(items)
        self.targets.update([item.outgoing.topic for item in items if item.outgoing])
        self.errors.update([item.error for item in items])
        self.hours.update([item.record.timestamp_ms // _HOUR_MS for item in items])

    def result(self) -> Redriven:
        hours = {iso_ms(hour * _HOUR_MS): count for hour, count in sorted(self.hours.items())}
        targets, errors = dict(self.targets.most_common()), dict(self.errors.most_common())
        too_large, unproved = [*self.too_large.values()], dict(self.unproved.most_common())
        return Redriven(self.records, targets, errors, hours, self.kept_back, too_large, unproved)


class _Planner:
    """Decides of each record of a dead letter topic whether it goes, and as what."""

    def __init__(
        self, spec: RedriveSpec, admin: Admin, origins: Origins, ended: EndedOffsets, tally: _Tally, clock: Clock
    ) -> None:
        self._spec, self._admin, self._origins, self._clock = spec, admin, origins, clock
        self._ended, self._tally = ended, tally
        self._matcher = Matcher(spec.select)
        self._partitions: dict[str, int] = {}

    async def learn(self, topic: str) -> None:
        """Find out how many partitions a topic has.

        Raises:
            TopicNotFound: It does not exist.
        """
        self._partitions[topic] = len((await self._admin.describe_topic(topic, "Write")).partitions)

    async def items(self, records: Sequence[Record]) -> list[Item]:
        """Return what goes of records of one partition.

        Raises:
            InvalidRequest: A record is no dead letter.
            TopicNotFound: A target does not exist.
        """
        spec, tally, partitions, now = self._spec, self._tally, self._partitions, self._clock.time()
        target, items, has_conditions = spec.target, list[Item](), spec.select.has_conditions
        for record in self._left(records):
            headers = record.headers
            origin = origin_of(headers) or require_origin(record)  # which says why it is none
            if has_conditions and not self._matcher.matches(record, origin, headers):
                continue
            tally.met = True
            own = origin.own_headers(headers)
            if target.returns and (why := self._origins.refusal(spec.topic, origin)):
                tally.refuse(why)
                continue
            if target.returns and redriven_count(own) >= spec.options.max_redrives:
                tally.kept_back += 1
                continue
            outgoing = None
            if topic := target.topic_for(spec.topic, origin):
                if topic not in partitions:
                    await self.learn(topic)
                outgoing = target.outgoing(record, topic, own, origin, now)
                if not 0 <= (outgoing.partition or 0) < partitions[topic]:
                    # The topic was created again with fewer partitions: the key chooses.
                    outgoing = msgspec.structs.replace(outgoing, partition=None)
            items.append(Item(record, outgoing, origin.error))
        return items

    def _left(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return which records of one partition have not ended."""
        too_large, ended, first = self._tally.too_large, self._ended, records[0]
        if not too_large and not ended.ended_count(first.partition, first.offset, records[-1].offset + 1):
            return records
        return [
            record
            for record in records
            if (record.partition, record.offset) not in too_large
            and not ended.is_ended(record.partition, record.offset)
        ]


class _SendBack:
    """Takes what a run delivers: writes it, or only counts it. The first failure ends the run."""

    def __init__(
        self,
        planner: _Planner,
        write: Callable[[Sequence[Item]], Awaitable[Sequence[Item]]],
        fail: Callable[[errors.HeadraceError], None],
    ) -> None:
        """Prepare; `write` writes items and returns those that have ended."""
        self._planner, self._write, self._fail = planner, write, fail
        self._failed = False

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        if self._failed:
            raise errors.DestinationUnavailable("the run has failed")
        try:
            items = await self._planner.items(delivery.records)
            ended = await self._write(items) if items else ()
        except errors.HeadraceError as error:
            self._failed = True
            self._fail(error)
            raise errors.DestinationUnavailable("the run has failed") from error
        if len(ended) == len(delivery.records):
            return [ACK] * len(ended)
        offsets = {item.record.offset for item in ended}
        return [ACK if record.offset in offsets else HANDED_OFF for record in delivery.records]


class Redrive:
    """One run over the dead letters of one topic; one at a time has its lease."""

    def __init__(
        self,
        admin: Admin,
        produce: Produce,
        clock: Clock,
        spec: RedriveSpec,
        origins: Origins,
        *,
        resumes: bool = False,
        on_sent: Sent | None = None,
    ) -> None:
        """Prepare; `on_sent` gets records that were written, or not.

        `resumes` says that an earlier run was stopped, so that nothing may be left.
        """
        self._admin, self._produce, self._clock, self._spec = admin, produce, clock, spec
        self._resumes, self._on_sent = resumes, on_sent
        self._ended = EndedOffsets(admin, spec.topic)
        self._tally = _Tally()
        self._planner = _Planner(spec, admin, origins, self._ended, self._tally, clock)
        self._lease: Lease | None = None
        self._session: TransactionSession | None = None
        self._alone = False
        """Whether a session sends each record alone, because a batch was refused as too large in the one before."""
        self._unsure: Sequence[Item] = ()
        self._unsaved: list[Mapping[int, Sequence[int]]] = []
        self._ends = spec.ends

    async def run(self, stop: asyncio.Event, on_progress: OnProgress | None = None) -> Redriven:
        """Do it, and return what was done; `stop` ends it early, with what has ended saved.

        Raises:
            InvalidRequest: Records are no dead letters, the window is none, or nothing matches.
            TopicNotFound: A topic does not exist.
            LeaseTaken, LeaseLost: Another run works on the topic.
            KafkaError: Kafka does not take or acknowledge something; what was acknowledged is saved as ended.
        """
        spec, target, options = self._spec, self._spec.target, self._spec.options
        spec.check()
        if target.topic:
            await self._planner.learn(target.topic)
        if options.dry_run:
            await self._ended.load()
            return await self._pass(stop, on_progress)
        async with dead_letter_lease(self._admin, spec.topic, self._clock) as self._lease:
            await self._ended.prepare(None if options.exactly_once else self._produce)
            if self._admin.config.create_topics and target.kind == "quarantine":
                await self._admin.ensure_topic_like(spec.topic + QUARANTINE, spec.topic)
            if options.exactly_once:
                return await self._sessions(stop, on_progress)
            await self._ended.load(settled=True)
            return await self._pass(stop, on_progress)

    async def _sessions(self, stop: asyncio.Event, on_progress: OnProgress | None) -> Redriven:
        """Run in sessions: each fences those before it, and then loads what they have committed."""
        failures = 0
        while True:
            name = f"headrace-redrive-{self._spec.topic}"
            session = self._session = TransactionSession(self._admin, name, alone=self._alone)
            await session.start()
            before = self._tally.records + len(self._tally.too_large)
            try:
                _check(await session.submit([NOTHING_ENDED]))
                await self._ended.load(settled=True)
                if self._unsure and self._ended.is_ended(*self._unsure[0].position):
                    self._tally.add(self._unsure)
                self._unsure = ()
                return await self._pass(stop, on_progress)
            except errors.KafkaError:
                moved = self._tally.records + len(self._tally.too_large) > before
                failures = 0 if moved else failures + 1
                if failures == _SESSIONS:
                    raise
            finally:
                await session.stop()
            assert self._lease
            await self._lease.check()

    async def _pass(self, stop: asyncio.Event, on_progress: OnProgress | None) -> Redriven:
        """Read what is left and deliver it."""
        spec, ended, tally = self._spec, self._ended, self._tally
        now = self._clock.time()
        window = await Window.resolve(self._admin, spec.topic, spec.select, now, cut_until=False)
        if spec.topic_id not in ("", window.topic_id):
            raise errors.InvalidRequest(f"topic {spec.topic} was deleted or created again: the window is gone")
        if self._ends is None:
            self._ends = {p.partition: end for p, end in window.ends.items()}
        logs = await self._admin.start_offsets(window.starts)
        # What a session or a process that continues finds behind these ends waits for the next run.
        ends = {p: min(end, self._ends.get(p.partition, 0)) for p, end in window.ends.items()}
        starts = {p: ended.first_left(p.partition, max(at, logs[p]), ends[p]) for p, at in window.starts.items()}
        total = sum(ends.values()) - sum(starts.values())
        tally.kept_back = 0
        tally.unproved.clear()

        async def save(progress: Progress) -> bool:
            await self._save()
            if on_progress:
                left = sum(ends[p] - at.offset for p, at in progress.positions.items())
                await on_progress(total - left, total)
            return True

        run = Run(self._clock)
        write = self._count if spec.options.dry_run else self._transact if self._session else self._send
        pump = self._pump(_SendBack(self._planner, write, run.fail))
        source = WindowSource(
            pump,
            {p: Committed(start) for p, start in starts.items()},
            ends,
            read=functools.partial(self._read, run),
            start_offsets=self._admin.start_offsets,
            limits=self._limits,
            clock=self._clock,
        )
        if not await run.deliver(pump, source, save, stop):
            return tally.result()
        if spec.select.has_conditions and not tally.met and not self._resumes:
            left = sum(e - starts[p] - ended.ended_count(p.partition, starts[p], e) for p, e in ends.items())
            raise errors.InvalidRequest(
                f"nothing matches: {spec.topic} has {left} dead letters left, and none is selected"
            )
        if not spec.options.dry_run and (
            expired := ended.tombstones_for_expired(await self._admin.start_offsets(starts))
        ):
            _check(await (self._session.submit(expired) if self._session else self._produce(expired)))
        return tally.result()

    async def _read(self, run: Run, starts: Offsets, ends: Offsets) -> AsyncGenerator[list[Record], None]:
        """Read partitions; an outage ends the run, which may be repeated at any time."""
        try:
            async with contextlib.aclosing(read_window(self._admin.config, starts, ends)) as batches:
                async for batch in batches:
                    yield batch
        except errors.HeadraceError as error:
            if error.retriable:  # any other is that of records that have expired, or ends the source
                run.fail(error)
            raise

    @property
    def _limits(self) -> Limits:
        rate = self._spec.options.rate_records
        most = 2 * _TRANSACTION_RECORDS if self._spec.options.exactly_once else REPEATS_AT_MOST
        most = max(1, min(most, int(rate or most)))
        return Limits(FlowControl(max_records=most, max_bytes=_DELIVERY_BYTES), most, rate)

    def _pump(self, sink: _SendBack) -> Pump:
        exact = self._spec.options.exactly_once
        delivery = DeliveryConfig(
            batch=BatchConfig(
                max_records=_TRANSACTION_RECORDS if exact else REPEATS_AT_MOST, max_bytes=_DELIVERY_BYTES
            ),
            max_in_flight=1 if exact else 64,
        )
        name = f"redrive {self._spec.topic}"
        return Pump(name, name, sink, None, delivery=delivery, clock=self._clock)

    async def _count(self, items: Sequence[Item]) -> Sequence[Item]:
        """Count what would be written."""
        self._tally.add(items)
        return items

    async def _send(self, items: Sequence[Item]) -> Sequence[Item]:
        """Write items and return those that have ended; raises the error of one that is not acknowledged."""
        assert self._lease
        await self._lease.check()
        reach("redrive.submitted")
        records = [item.outgoing for item in items if item.outgoing]
        failed = self._failed(items, records, await self._produce(records)) if records else {}
        ended = [item for index, item in enumerate(items) if index not in failed] if failed else items
        self._unsaved.append(_offsets(ended))  # not the items: their records may be large
        self._tally.add(ended)
        for error in failed.values():
            if not isinstance(error, REFUSALS):
                raise error
        return ended

    async def _transact(self, items: Sequence[Item]) -> Sequence[Item]:
        """Write items and that they have ended in one transaction; raises if it is not known to be committed."""
        assert self._session and self._lease
        await self._lease.check()
        records = [item.outgoing for item in items if item.outgoing]
        response = self._session.submit([*records, *self._ended.records_for(_offsets(items), self._headers)])
        reach("redrive.transaction.submitted")
        results = await asyncio.shield(response)
        reach("redrive.transaction.sent")
        self._failed(items, records, results[: len(records)], errors.RecordTooLarge if self._alone else ())
        if any(isinstance(result, errors.RecordTooLarge) for result in results):  # which ends this session
            self._alone = not self._alone
        self._unsure = items
        _check(results)
        self._unsure = ()
        reach("redrive.transaction.marked")
        self._tally.add(items)
        return items

    def _failed(
        self,
        items: Sequence[Item],
        records: Sequence[OutgoingRecord],
        results: Sequence[Any],
        blamed: type[errors.HeadraceError] | tuple[type[errors.HeadraceError], ...] = REFUSALS,
    ) -> dict[int, errors.HeadraceError]:
        """Report what was written, and return what was not, by index; those with an error of these kinds are listed."""
        if records and self._on_sent:
            self._on_sent(records, results)
        failed = {index: result for index, result in enumerate(results) if isinstance(result, errors.HeadraceError)}
        for index, error in failed.items():
            if isinstance(error, blamed):
                record = items[index].record
                what = f"{record.topic_partition} offset {record.offset}"
                self._tally.too_large[items[index].position] = f"{what}: {error.description}"
        return failed

    async def _save(self) -> None:
        """Save what has ended since the last call."""
        unsaved = list(self._unsaved)
        if not unsaved:
            return
        reach("redrive.sent")
        ended: defaultdict[int, list[int]] = defaultdict(list)
        for by_partition in unsaved:
            for partition, offsets in by_partition.items():
                ended[partition] += offsets
        await self._ended.save(self._produce, ended, self._headers)
        reach("redrive.marked")
        del self._unsaved[: len(unsaved)]  # only now: what is not saved is saved by the next call

    @property
    def _headers(self) -> list[Header]:
        target = self._spec.target
        why = f"{target.kind}: {target.reason}".removesuffix(": ")
        return [("headrace.by", self._spec.options.by.encode()), ("headrace.why", why.encode())]


def _offsets(items: Sequence[Item]) -> Mapping[int, Sequence[int]]:
    """Return the offsets of items of one partition, by that partition."""
    return {items[0].record.partition: [item.record.offset for item in items]} if items else {}


def _check(results: Sequence[Any]) -> None:
    """Raise the first error of some results."""
    for result in results:
        if isinstance(result, errors.HeadraceError):
            raise result
