"""Dead letters that are sent back, moved to quarantine or dropped: one run over their topic.

The records of a delivery are written, and then saved as completed. A run that is killed between the two sends at most
`REPEATS_AT_MOST` dead letters again. With `exactly_once` both are one transaction, and nothing is sent twice.
"""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence

import msgspec

from headrace import errors
from headrace.config.consumers import BatchConfig, DeliveryConfig, FlowControl
from headrace.delivery.dead_letter import redriven_count
from headrace.delivery.outcomes import ACK, HANDED_OFF, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.kafka import Admin, read_window, window
from headrace.records import Committed, Offsets, Produce, Record, TopicPartition
from headrace.runs.dead_letters.completed_offsets import CompletedOffsets, dead_letter_lease
from headrace.runs.dead_letters.dead_letter_readers import ReadDeadLetter, foreign_readers, read_origin
from headrace.runs.dead_letters.origins import QUARANTINE, Origins
from headrace.runs.redrive_spec import Redriven, RedriveSpec
from headrace.runs.redrive_writers import (
    AcknowledgedWriter,
    DryRunWriter,
    Item,
    RedriveWriter,
    Sent,
    Tally,
    TransactionWriter,
    WriteContext,
)
from headrace.runs.selection import Matcher, Window
from headrace.runs.window_run import Limits, Progress, Run, WindowSource
from headrace.runtime import Clock

REPEATS_AT_MOST = 2000
"""Dead letters that a killed run sends again; with a rate, those of one second if they are fewer."""
_TRANSACTION_RECORDS = 10_000
_DELIVERY_BYTES = 8_388_608
_SESSIONS = 3
"""Sessions in a row that may fail without progress."""

OnProgress = Callable[[int, int], Awaitable[None]]
"""Called with the number of offsets done, and of all."""


class _Planner:
    """Decides for each record of a dead letter topic whether it is sent, and as what."""

    def __init__(
        self, spec: RedriveSpec, admin: Admin, origins: Origins, completed: CompletedOffsets, tally: Tally, clock: Clock
    ) -> None:
        self._spec, self._admin, self._origins, self._clock = spec, admin, origins, clock
        self._completed, self._tally = completed, tally
        self._matcher = Matcher(spec.select)
        self._partitions: dict[str, int] = {}

    async def learn(self, topic: str) -> None:
        """Look up how many partitions a topic has.

        Raises:
            TopicNotFound: It does not exist.
        """
        self._partitions[topic] = len((await self._admin.describe_topic(topic, "Write")).partitions)

    async def items(self, records: Sequence[Record]) -> list[Item]:
        """Return the items for records of one partition.

        Raises:
            TopicNotFound: A target does not exist.
        """
        spec, tally, target, partitions = self._spec, self._tally, self._spec.target, self._partitions
        dead_letters = self._selected(records)
        originals = await self._originals(dead_letters)
        items: list[Item] = []
        for record, origin, headers in dead_letters:
            original = originals.get(record.offset)
            own = original.headers if original else origin.own_headers(headers)
            why = self._origins.refusal(spec.topic, origin) or ("" if original else origin.refusal)
            if target.returns and why:
                tally.refuse(why)
                continue
            if target.returns and redriven_count(own) >= spec.options.max_redrives:
                tally.kept_back += 1
                continue
            outgoing = None
            if topic := target.topic_for(spec.topic, origin):
                if topic not in partitions:
                    await self.learn(topic)
                outgoing = target.outgoing(original or record, topic, own, origin)
                if not 0 <= (outgoing.partition or 0) < partitions[topic]:
                    # The topic was created again with fewer partitions: the key chooses.
                    outgoing = msgspec.structs.replace(outgoing, partition=None)
            items.append(Item(record, outgoing, origin.error))
        return items

    def _selected(self, records: Sequence[Record]) -> list[ReadDeadLetter]:
        """Return the selected dead letters of one partition, with what they hold."""
        has_conditions = self._spec.select.has_conditions
        dead_letters: list[ReadDeadLetter] = []
        for record in self._left(records):
            headers = record.headers
            origin = read_origin(record, headers)
            if origin is None:
                self._tally.refuse("no reader reads them as dead letters")
            elif not has_conditions or self._matcher.matches(record, origin, headers):
                dead_letters.append((record, origin, headers))
        self._tally.any_selected |= bool(dead_letters)
        return dead_letters

    async def _originals(self, dead_letters: Sequence[ReadDeadLetter]) -> Mapping[int, Record]:
        """Read the records of those dead letters that hold no full copy, if the run may."""
        found: dict[int, Record] = {}
        if self._spec.options.from_origin:
            topic, origins = self._spec.topic, self._origins
            proved = [one for one in dead_letters if one[1].refusal and not origins.refusal(topic, one[1])]
            for reader in foreign_readers() if proved else ():
                found |= await reader.originals(self._admin, proved)
        return found

    def _left(self, records: Sequence[Record]) -> Sequence[Record]:
        """Return the records of one partition that are not completed, and were not refused in this run."""
        too_large, completed, first = self._tally.too_large, self._completed, records[0]
        if not too_large and not completed.completed_count(first.partition, first.offset, records[-1].offset + 1):
            return records
        return [
            record
            for record in records
            if (record.partition, record.offset) not in too_large
            and not completed.is_completed(record.partition, record.offset)
        ]


class _SendBack:
    """The destination of a run: writes what the planner selects. The first failure ends the run."""

    def __init__(
        self,
        planner: _Planner,
        write: Callable[[Sequence[Item]], Awaitable[Sequence[Item]]],
        fail: Callable[[errors.HeadraceError], None],
    ) -> None:
        """Prepare; `write` writes items and returns those that are completed."""
        self._planner, self._write, self._fail = planner, write, fail
        self._failed = False

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        if self._failed:
            raise errors.DestinationUnavailable("the run has failed")
        try:
            items = await self._planner.items(delivery.records)
            completed = await self._write(items) if items else ()
        except errors.HeadraceError as error:
            self._failed = True
            self._fail(error)
            raise errors.DestinationUnavailable("the run has failed") from error
        if len(completed) == len(delivery.records):
            return [ACK] * len(completed)
        offsets = {item.record.offset for item in completed}
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
        """Prepare; `on_sent` gets the records that were written, or not.

        `resumes`: an earlier run was stopped, so it is not an error if nothing is left.
        """
        self._admin, self._produce, self._clock, self._spec = admin, produce, clock, spec
        self._resumes, self._on_sent = resumes, on_sent
        self._completed = CompletedOffsets(admin, spec.topic)
        self._tally = Tally()
        self._planner = _Planner(spec, admin, origins, self._completed, self._tally, clock)
        self._ends = spec.ends

    async def run(self, stop: asyncio.Event, on_progress: OnProgress | None = None) -> Redriven:
        """Run it, and return the result; `stop` ends it early, with the completed offsets saved.

        Raises:
            InvalidRequest: Records are not dead letters, the window is not valid, or nothing matches.
            TopicNotFound: A topic does not exist.
            LeaseTaken, LeaseLost: Another run is working on the topic.
            KafkaError: Kafka refuses or does not acknowledge a record; what was acknowledged is saved as completed.
        """
        spec = self._spec
        spec.check()
        if spec.options.dry_run:
            await self._completed.load()
            return await self._pass(DryRunWriter(self._tally), stop, on_progress)
        async with dead_letter_lease(self._admin, spec.topic, self._clock) as lease:
            context = WriteContext(spec, self._completed, self._tally, lease, self._on_sent)
            await self._completed.prepare(None if spec.options.exactly_once else self._produce)
            if self._admin.config.create_topics and spec.target.kind == "quarantine":
                await self._admin.ensure_topic_like(spec.topic + QUARANTINE, spec.topic)
            if spec.options.exactly_once:
                return await self._sessions(context, stop, on_progress)
            await self._completed.load(settled=True)
            return await self._pass(AcknowledgedWriter(context, self._produce), stop, on_progress)

    async def _sessions(self, context: WriteContext, stop: asyncio.Event, on_progress: OnProgress | None) -> Redriven:
        """Run in sessions; each continues where the one that failed before it stopped."""
        writer = TransactionWriter(context, self._admin)
        failures = 0
        while True:
            before = self._tally.settled
            await writer.start()
            try:
                await writer.load()
                return await self._pass(writer, stop, on_progress)
            except errors.KafkaError:
                failures = 0 if self._tally.settled > before else failures + 1
                if failures == _SESSIONS:
                    raise
            finally:
                await writer.stop()
            await context.lease.check()

    async def _pass(self, writer: RedriveWriter, stop: asyncio.Event, on_progress: OnProgress | None) -> Redriven:
        """Read what is left and deliver it."""
        spec, completed, tally = self._spec, self._completed, self._tally
        starts, ends = await self._bounds()
        total = sum(ends.values()) - sum(starts.values())
        tally.kept_back = 0
        tally.unproved.clear()
        returning = (await window(self._admin, spec.topic))[1] if spec.options.stop_at_percent else {}

        async def save(progress: Progress) -> bool:
            await writer.save()
            run.halted = await self._fails_too_often(returning)
            if on_progress:
                left = sum(ends[p] - at.offset for p, at in progress.positions.items())
                await on_progress(total - left, total)
            return True

        run = Run(self._clock)
        pump = self._pump(_SendBack(self._planner, writer.write, run.fail))
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
        if spec.select.has_conditions and not tally.any_selected and not self._resumes:
            left = sum(e - starts[p] - completed.completed_count(p.partition, starts[p], e) for p, e in ends.items())
            raise errors.InvalidRequest(
                f"nothing matches: none of the {left} dead letters left in {spec.topic} is selected"
            )
        if spec.options.dry_run:
            return tally.result()
        if expired := completed.tombstones_for_expired(await self._admin.start_offsets(starts)):
            await writer.write_others(expired)
        return tally.result()

    async def _fails_too_often(self, seen: dict[TopicPartition, int]) -> bool:
        """Count what returned since the offsets in `seen`, and return whether too much of all, or of 100, failed."""
        tally, limit = self._tally, self._spec.options.stop_at_percent
        if limit is None or not seen:
            return False
        ends = await self._admin.end_offsets(seen)
        if starts := {p: at for p, at in seen.items() if at < ends[p]}:
            reading = read_window(self._admin.config, starts, {p: ends[p] for p in starts})
            async with contextlib.aclosing(reading) as batches:
                async for batch in batches:
                    tally.returned += sum(redriven_count(record.headers) > 0 for record in batch)
        seen.update(ends)
        failed = tally.returned + len(tally.too_large)
        if failed > max(tally.settled, 100) * limit / 100:
            tally.stopped = f"{failed} of {tally.settled} dead letters failed, more than {limit:g} %"
        return bool(tally.stopped)

    async def _bounds(self) -> tuple[Offsets, Offsets]:
        """Return where reading starts and ends in each partition of the window."""
        spec = self._spec
        window = await Window.resolve(self._admin, spec.topic, spec.select, cut_until=False)
        if spec.topic_id not in ("", window.topic_id):
            raise errors.InvalidRequest(f"topic {spec.topic} was deleted or created again: the window no longer exists")
        if self._ends is None:
            self._ends = {p.partition: end for p, end in window.ends.items()}
        logs = await self._admin.start_offsets(window.starts)
        # Dead letters that arrive after the start of the run wait for the next run, also when this one is resumed.
        ends = {p: min(end, self._ends.get(p.partition, 0)) for p, end in window.ends.items()}
        starts = {
            p: self._completed.first_left(p.partition, max(at, logs[p]), ends[p]) for p, at in window.starts.items()
        }
        return starts, ends

    async def _read(self, run: Run, starts: Offsets, ends: Offsets) -> AsyncGenerator[list[Record], None]:
        """Read partitions; an outage ends the run, which may be started again at any time."""
        try:
            async with contextlib.aclosing(read_window(self._admin.config, starts, ends)) as batches:
                async for batch in batches:
                    yield batch
        except errors.HeadraceError as error:
            if error.retriable:  # the source handles others: records have expired, or the run fails
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
