"""How a redrive writes: with acknowledgements, in transactions, or not at all; and what it counts."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace import errors
from headrace.delivery.dead_letter import REFUSALS
from headrace.kafka import Admin, Lease, TransactionSession
from headrace.kafka.timestamps import iso_ms
from headrace.records import Header, OutgoingRecord, Produce, Record
from headrace.runs.dead_letters.completed_offsets import NOTHING_COMPLETED, CompletedOffsets
from headrace.runs.redrive_spec import Redriven, RedriveSpec
from headrace.runtime.failpoints import reach

_HOUR_MS = 3_600_000
_MOST_REASONS = 20

Sent = Callable[[Sequence[OutgoingRecord], Sequence[Any]], None]
"""Called with records and the result of each."""


class Item(msgspec.Struct, frozen=True, gc=False):
    """A selected dead letter, and the record to write for it."""

    record: Record
    outgoing: OutgoingRecord | None
    """None for one that is dropped."""
    error: str

    @property
    def position(self) -> tuple[int, int]:
        """Partition and offset of the dead letter."""
        return self.record.partition, self.record.offset


class Tally:
    """Counts over all sessions of a run; each session reads what is left again, and so counts that again."""

    def __init__(self) -> None:
        self.any_selected = False
        """Whether any dead letter was selected."""
        self.records = 0
        self.targets: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self.hours: Counter[int] = Counter()
        self.kept_back = 0
        self.too_large: dict[tuple[int, int], str] = {}
        self.unproved: Counter[str] = Counter()
        self.returned = 0
        self.stopped = ""

    @property
    def settled(self) -> int:
        """Dead letters that the run does not touch again."""
        return self.records + len(self.too_large)

    def refuse(self, why: str) -> None:
        known = why in self.unproved or len(self.unproved) < _MOST_REASONS
        self.unproved[why if known else "others of this kind"] += 1

    def add(self, items: Sequence[Item]) -> None:
        self.records += len(items)
        self.targets.update([item.outgoing.topic for item in items if item.outgoing])
        self.errors.update([item.error for item in items])
        self.hours.update([item.record.timestamp_ms // _HOUR_MS for item in items])

    def result(self) -> Redriven:
        return Redriven(
            self.records,
            targets=dict(self.targets.most_common()),
            errors=dict(self.errors.most_common()),
            hours={iso_ms(hour * _HOUR_MS): count for hour, count in sorted(self.hours.items())},
            kept_back=self.kept_back,
            too_large=[*self.too_large.values()],
            unproved=dict(self.unproved.most_common()),
            failed_again=self.returned,
            stopped=self.stopped,
        )


class WriteContext(NamedTuple):
    """What the writers of a run have in common."""

    spec: RedriveSpec
    completed: CompletedOffsets
    tally: Tally
    lease: Lease
    on_sent: Sent | None = None
    """Gets the records that were written, or not."""

    @property
    def headers(self) -> list[Header]:
        """Headers of the records that hold completed offsets: who requested it, and why."""
        target = self.spec.target
        why = f"{target.kind}: {target.reason}".removesuffix(": ")
        return [("headrace.by", self.spec.options.by.encode()), ("headrace.why", why.encode())]

    def report(
        self,
        items: Sequence[Item],
        records: Sequence[OutgoingRecord],
        results: Sequence[Any],
        refusals: tuple[type[errors.HeadraceError], ...] = REFUSALS,
    ) -> None:
        """Report what was written, and list each dead letter that its target refused with one of these errors."""
        if records and self.on_sent:
            self.on_sent(records, results)
        for item, result in zip(items, results, strict=False):
            if isinstance(result, refusals):
                what = f"{item.record.topic_partition} offset {item.record.offset}"
                self.tally.too_large[item.position] = f"{what}: {result.description}"


class DryRunWriter:
    """Counts what would be written."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally

    async def write(self, items: Sequence[Item]) -> Sequence[Item]:
        """Write items of one partition and return those that are completed; raises if one failed."""
        self._tally.add(items)
        return items

    async def save(self) -> None:
        """Save what was completed since the last call."""

    async def write_others(self, records: Sequence[OutgoingRecord]) -> None:
        """Write records that are not dead letters."""


class AcknowledgedWriter:
    """Writes items, and saves them as completed after their acknowledgement."""

    def __init__(self, context: WriteContext, produce: Produce) -> None:
        self._context, self._produce = context, produce
        self._unsaved: list[Mapping[int, Sequence[int]]] = []

    async def write(self, items: Sequence[Item]) -> Sequence[Item]:
        context = self._context
        await context.lease.check()
        reach("redrive.submitted")
        records = [item.outgoing for item in items if item.outgoing]
        results = await self._produce(records) if records else ()
        context.report(items, records, results)
        failed = {index: result for index, result in enumerate(results) if isinstance(result, errors.HeadraceError)}
        completed = [item for index, item in enumerate(items) if index not in failed] if failed else items
        self._unsaved.append(_offsets(completed))  # not the items: their records may be large
        context.tally.add(completed)
        for error in failed.values():
            if not isinstance(error, REFUSALS):
                raise error
        return completed

    async def save(self) -> None:
        unsaved = list(self._unsaved)
        if not unsaved:
            return
        reach("redrive.sent")
        offsets: defaultdict[int, list[int]] = defaultdict(list)
        for by_partition in unsaved:
            for partition, of_partition in by_partition.items():
                offsets[partition] += of_partition
        await self._context.completed.save(self._produce, offsets, self._context.headers)
        reach("redrive.marked")
        del self._unsaved[: len(unsaved)]  # only now: if saving fails, the next call saves them

    async def write_others(self, records: Sequence[OutgoingRecord]) -> None:
        _check(await self._produce(records))


class TransactionWriter:
    """Writes items and their completed offsets in one transaction."""

    def __init__(self, context: WriteContext, admin: Admin) -> None:
        self._context, self._admin = context, admin
        self._session: TransactionSession | None = None
        self._alone = False
        """Whether a session sends each record alone, because a batch of the previous one was refused as too large."""
        self._unsure: Sequence[Item] = ()
        """Items whose transaction may or may not be committed."""

    async def start(self) -> None:
        """Start a session; call `load` before the first write, and `stop` at the end."""
        name = f"headrace-redrive-{self._context.spec.topic}"
        self._session = TransactionSession(self._admin, name, alone=self._alone)
        await self._session.start()

    async def load(self) -> None:
        """Fence earlier sessions, and load what they have committed."""
        context = self._context
        await self.write_others([NOTHING_COMPLETED])
        await context.completed.load(settled=True)
        if self._unsure and context.completed.is_completed(*self._unsure[0].position):
            context.tally.add(self._unsure)
        self._unsure = ()

    async def stop(self) -> None:
        assert self._session
        await self._session.stop()

    async def write(self, items: Sequence[Item]) -> Sequence[Item]:
        assert self._session
        context = self._context
        await context.lease.check()
        records = [item.outgoing for item in items if item.outgoing]
        marks = context.completed.records_for(_offsets(items), context.headers)
        response = self._session.submit([*records, *marks])
        reach("redrive.transaction.submitted")
        results = await asyncio.shield(response)
        reach("redrive.transaction.sent")
        context.report(items, records, results[: len(records)], (errors.RecordTooLarge,) if self._alone else ())
        if any(isinstance(result, errors.RecordTooLarge) for result in results):  # which ends this session
            self._alone = not self._alone
        self._unsure = items
        _check(results)
        self._unsure = ()
        reach("redrive.transaction.marked")
        context.tally.add(items)
        return items

    async def save(self) -> None:
        pass  # each transaction holds its completed offsets

    async def write_others(self, records: Sequence[OutgoingRecord]) -> None:
        assert self._session
        _check(await self._session.submit(records))


RedriveWriter = DryRunWriter | AcknowledgedWriter | TransactionWriter


def _offsets(items: Sequence[Item]) -> Mapping[int, Sequence[int]]:
    """Return the offsets of items of one partition, by that partition."""
    return {items[0].record.partition: [item.record.offset for item in items]} if items else {}


def _check(results: Sequence[Any]) -> None:
    """Raise the first error of some results."""
    for result in results:
        if isinstance(result, errors.HeadraceError):
            raise result
