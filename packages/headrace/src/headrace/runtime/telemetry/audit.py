"""The audit: who wrote, consumed or controlled what, and whose requests were refused.

Callers hand over events and never wait; a task writes them in batches. Events above the byte limit are dropped. Events
that the target does not store are lost. Both are counted, logged, and reported by an event.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from msgspec.structs import replace

from headrace.config.audit_config import AuditConfig
from headrace.errors import HeadraceError, InternalError
from headrace.records import OutgoingRecord, Produce, Produced, Record, WrittenRecords
from headrace.runtime import Clock, Deadline, Readiness, Service, TokenBucket, next_slice
from headrace.runtime.telemetry.audit_events import (
    AuditEvent,
    Consumption,
    Line,
    RangeEvent,
    RecordEnd,
    WrittenRecord,
    consumed_events,
    consumed_ranges,
    ids_of,
    key_hash,
    produced_events,
    reason_of,
    written_events,
    written_ranges,
)
from headrace.runtime.telemetry.audit_targets import AuditTarget, ReportedTarget
from headrace.runtime.telemetry.correlation import caller, correlation_id, new_correlation_id
from headrace.runtime.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_REFUSALS_PER_SECOND: Final = 100
_EVENT_BYTES: Final = 1000
_RECORD_BYTES: Final = 300
_RANGE_BYTES: Final = 400
_ALARMS_PER_SECOND: Final = 1 / 60
_GATHER_SECONDS: Final = 0.1
"""Events of this period are written together, because a write costs more than an event."""
_PORTION_EVENTS: Final = 1000
_SLICE_EVENTS: Final = 250
"""Events that are made before the event loop does other work."""


class _EventBatch:
    """Events that were handed over together, or written records of one loop turn after the other."""

    __slots__ = ("events", "number", "size_bytes")

    def __init__(self, events: Iterable[AuditEvent], number: int, size_bytes: int) -> None:
        self.events = events
        self.number = number
        self.size_bytes = size_bytes


class _DeliveryRange:
    """The event of deliveries to one group from one partition, while the next one may extend it."""

    def __init__(self, event: RangeEvent) -> None:
        self._event = event
        self._last_offset = event.last_offset
        self._count = event.count

    def __iter__(self) -> Iterator[RangeEvent]:
        yield replace(self._event, last_offset=self._last_offset, count=self._count)

    def extend(self, event: RangeEvent) -> bool:
        """Include another delivery; return False if it does not follow this one."""
        if self._last_offset is None or not event.last_offset or event.offset != self._last_offset + 1:
            return False
        self._last_offset = event.last_offset
        self._count += event.count
        return True


class _EventQueue:
    """Batches of events that are not written yet, up to a number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.events = 0
        self.filled = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._batches: deque[_EventBatch] = deque()
        self._open: _EventBatch | None = None
        """The last batch, if it may get more written records."""
        self._written: list[WrittenRecord] = []
        """The records of that batch."""

    def has_capacity(self, size_bytes: int) -> bool:
        """Return whether this many more bytes fit; into an empty queue everything fits."""
        return not self._size_bytes or self._size_bytes + size_bytes <= self._max_bytes

    def put(self, batch: _EventBatch) -> None:
        self._batches.append(batch)
        self._open = None
        self.events += batch.number
        self._size_bytes += batch.size_bytes
        self.empty.clear()
        self.filled.set()

    def put_written(self, record: WrittenRecord, service_id: str) -> None:
        """Append a written record; its event is made when it is written, so that its cost is shared."""
        batch = self._open
        if batch is None:
            self._written = []
            batch = _EventBatch(written_events(service_id, self._written), 0, 0)
            self.put(batch)
            self._open = batch
        self._written.append(record)
        batch.number += 1
        batch.size_bytes += _EVENT_BYTES
        self.events += 1
        self._size_bytes += _EVENT_BYTES
        if batch.number == _PORTION_EVENTS:
            self._open = None

    def next_portion(self) -> list[_EventBatch]:
        """Return the batches to write next; they count until `release`."""
        portion: list[_EventBatch] = []
        self._open = None
        events = 0
        while self._batches and events < _PORTION_EVENTS:
            portion.append(self._batches.popleft())
            events += portion[-1].number
        return portion

    def release(self, portion: Sequence[_EventBatch]) -> None:
        """Stop counting batches."""
        self.events -= sum([batch.number for batch in portion])
        self._size_bytes -= sum([batch.size_bytes for batch in portion])


class Audit(Service):
    """Takes events on the event loop and never waits."""

    def __init__(self, settings: AuditConfig, target: AuditTarget, metrics: Metrics, clock: Clock) -> None:
        super().__init__("audit")
        self.service_id = settings.service_id
        self._which = settings.records
        self._target = ReportedTarget(target, clock)
        self._metrics = metrics
        self._clock = clock
        self._queue = _EventQueue(settings.max_pending_bytes)
        self._ranges: dict[tuple[Any, ...], _DeliveryRange] = {}
        """The last unwritten delivery to each group from each partition."""
        self._draining = asyncio.Event()
        self._refusals = TokenBucket(clock, _REFUSALS_PER_SECOND, _REFUSALS_PER_SECOND)
        self._alarms = TokenBucket(clock, _ALARMS_PER_SECOND, 1)
        self._missing = 0
        """Events that were dropped or lost since the start of the process."""
        self._reported_missing = 0
        """Missing events that an event has reported."""

    async def start(self) -> None:
        self.publish("headrace_audit_pending_events", lambda: self._queue.events)
        await self._store(())  # creates the file, or logs why it cannot
        self.keep(self._run, "write")

    async def drain(self, deadline: Deadline) -> None:
        self._draining.set()
        if self._missing > self._reported_missing:
            self._queue.empty.clear()  # the number of missing events is still to be written
        self._queue.filled.set()
        await asyncio.wait_for(self._queue.empty.wait(), deadline.remaining_seconds)

    async def stop(self) -> None:
        await super().stop()
        if self._queue.events:
            log.warning("audit: %d events were not written before the process stopped", self._queue.events)

    def readiness(self) -> Readiness:
        """Always ready; the reason has the number of missing events, and why more are lost."""
        problem = self._target.problem
        text = f"{self._missing} events are missing in the audit{f': {problem}' if problem else ''}"
        return Readiness(True, text if self._missing or problem else "")

    def put(self, events: Iterable[AuditEvent], count: int, size_bytes: int) -> bool:
        """Queue `count` events; return whether they fit.

        An iterator may make them later; it keeps `size_bytes` until they are written.
        """
        if self._queue.has_capacity(size_bytes):
            self._queue.put(_EventBatch(events, count, size_bytes))
            return True
        self._miss("dropped", count)
        return False

    def produced(
        self,
        records: Sequence[OutgoingRecord],
        results: Sequence[Produced | HeadraceError],
        *,
        size_bytes: int | None = None,
        audit_type: str = "PRODUCER",
    ) -> None:
        """Audit the records of one request.

        Args:
            audit_type: `STREAMING_PRODUCER` for records of a function or a job.
        """
        which = self._which
        if which == "none" or (which == "failed" and type(results) is WrittenRecords):
            return
        if len(results) == 1 and type(results[0]) is Produced:
            if which != "failed":
                self._written_one(records[0], results[0], audit_type, caller.get())
            return
        written = list(map(type, results)).count(Produced)
        if which == "failed" and written == len(results):
            return
        common = self.event(audit_type, "SUCCESS", caller=caller.get())
        if written and which == "summary":
            self._put_list(written_ranges(common, records, results))
        elif written and which == "all":
            if size_bytes is None:
                size_bytes = sum([record.size_bytes for record in records])
            events = produced_events(common, records, results)
            self.put(events, written, size_bytes + _RECORD_BYTES * len(records))
        if written < len(results):
            self._put_list(list(produced_events(common, records, results, failed=True)))

    def _written_one(self, record: OutgoingRecord, result: Produced, audit_type: str, who: str) -> None:
        """Audit the only record of a request, at a small part of the request's cost."""
        queue = self._queue
        if not queue.has_capacity(_EVENT_BYTES):
            self._miss("dropped", 1)
            return
        correlation, traceability, _ = ids_of(record.headers)
        now, key = int(self._clock.time() * 1000), None if record.key is None else key_hash(record.key)
        queue.put_written(
            (audit_type, now, who, record.topic, result.partition, result.offset, key, correlation, traceability),
            self.service_id,
        )

    def not_sent(self, topic: str, error: HeadraceError, count: int = 0) -> None:
        """Audit a produce request, or `count` lines of a stream, that were rejected before anything was sent."""
        if self._which != "none":
            status = "UNKNOWN" if isinstance(error, InternalError) else "FAILURE"
            self._put_one("PRODUCER", status, topic=topic[:249], count=count, stacktrace=reason_of(error))

    def audited(self, produce: Produce, audit_type: str = "PRODUCER") -> Produce:
        """Return a function that writes records and audits them."""

        async def produce_audited(records: Sequence[OutgoingRecord]) -> Sequence[Produced | HeadraceError]:
            results = await produce(records)
            self.produced(records, results, audit_type=audit_type)
            return results

        return produce_audited

    @property
    def takes_delivered(self) -> bool:
        """Whether `consumed` does anything with records that were delivered."""
        return self._which not in ("none", "failed")

    def consumed(
        self, who: Consumption, records: Sequence[Record], size_bytes: int, how: str, ends: Sequence[RecordEnd]
    ) -> None:
        """Audit completed records; `ends` is empty if they succeeded, or if there is no report on them."""
        which, well = self._which, how == "delivered"
        if which == "none" or (well and not self.takes_delivered):
            return
        common = self.event(
            who.audit_type,
            "SUCCESS" if well else "FAILURE",
            group=who.group,
            replay=who.replay,
            caller=who.caller,
            action=who.action,
            reason="" if well else how,
        )
        if well and which == "summary":
            for event in consumed_ranges(common, records):
                self._put_range(event)
            return
        events = consumed_events(common, records, ends)
        self.put(events, len(records), size_bytes + _RECORD_BYTES * len(records))

    def offer(self, events: Sequence[AuditEvent]) -> bool:
        """Queue events if they fit, whatever `audit.records` is; others are not counted, because their sender knows."""
        if fit := self._queue.has_capacity(_EVENT_BYTES * len(events)):
            self._put_list(events)
        return fit

    def refused(self, action: str, address: str, error: HeadraceError) -> None:
        """Audit a request that its caller may not make; above 100 in a second, the rest is dropped."""
        if not self._refusals.try_take():
            self._miss("dropped", 1)
            return
        self._put_one("ACCESS", "DENIED", action=action[:300], address=address, stacktrace=reason_of(error))

    def control(self, action: str, target: str, *, reason: str = "", outcome: str = "SUCCESS") -> None:
        """Audit a control operation of this request's caller, whatever `audit.records` is.

        Args:
            action: The operation: `pause`, `redrive`, `register`.
            target: Its target, as people name it: `reactive orders`, `orders.dlq`, `job 7`.
            outcome: `SUCCESS`, or `FAILURE` if it was accepted and did not finish.
        """
        self._put_one("CONTROL", outcome, action=action[:300], target=target[:300], reason=reason[:1000])

    def _put_one(self, audit_type: str, audit_status: str, **fields: Any) -> None:
        fields.update(id=new_correlation_id().decode(), caller=caller.get(), correlation_id=correlation_id.get())
        self._put_list([self.event(audit_type, audit_status, **fields)])

    def _put_list(self, events: Sequence[AuditEvent]) -> None:
        if events:
            ranges = sum([len(event.ranges) for event in events if isinstance(event, RangeEvent) and event.ranges])
            self.put(events, len(events), _EVENT_BYTES * len(events) + _RANGE_BYTES * ranges)

    def _put_range(self, event: RangeEvent) -> None:
        """Queue the event of a delivery, or extend the event of the previous delivery from the same partition."""
        key = (
            event.audit_type,
            event.group,
            event.replay,
            event.caller,
            event.topic,
            event.partition,
            event.correlation_id,
        )
        last = self._ranges.get(key)
        if last and last.extend(event):
            return
        opened = _DeliveryRange(event)
        if self.put(opened, 1, _EVENT_BYTES + _RANGE_BYTES * len(event.ranges or ())):
            self._ranges[key] = opened

    def event(self, audit_type: str, audit_status: str, **fields: Any) -> RangeEvent:
        """Return an event of now; `offer` queues it."""
        now = int(self._clock.time() * 1000)
        return RangeEvent(
            service_id=self.service_id, audit_type=audit_type, audit_status=audit_status, timestamp=now, **fields
        )

    def _miss(self, outcome: str, count: int) -> None:
        """Count missing events; log dropped ones at once, and then once a minute. The target reports its losses."""
        self._metrics.audit_events(outcome, count)
        self._missing += count
        if count and outcome == "dropped" and self._alarms.try_take():
            log.warning("audit: dropped events; %d are missing so far", self._missing)

    async def _run(self) -> None:
        queue = self._queue
        while True:
            await queue.filled.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GATHER_SECONDS):
                    await self._draining.wait()
            queue.filled.clear()
            while portion := queue.next_portion():
                self._ranges.clear()
                await self._write(portion)
                queue.release(portion)
            if self._missing > self._reported_missing:
                await self._report_missing()
            if not queue.filled.is_set():
                queue.empty.set()

    async def _write(self, portion: Sequence[_EventBatch]) -> None:
        lines: list[Line] = []
        for batch in portion:
            made = len(lines)
            try:
                events = iter(batch.events)
                while slice_of := [event.line for event in islice(events, _SLICE_EVENTS)]:
                    lines += slice_of
                    if len(slice_of) == _SLICE_EVENTS:
                        await next_slice()
            except Exception:  # boundary: the user sees lost events counted and logged, and work continues
                log.exception("audit: lost %d events because of a defect", batch.number)
                del lines[made:]
                self._miss("lost", batch.number)
        lost = await self._store(lines)
        self._metrics.audit_events("written", len(lines) - lost)
        self._miss("lost", lost)

    async def _report_missing(self) -> None:
        """Write the number of missing events. If that event is lost too, the next one reports all of them."""
        missing = self._missing
        event = self.event(
            "DROPPED",
            "FAILURE",
            id=new_correlation_id().decode(),
            reason="events that are missing before this one",
            count=missing - self._reported_missing,
        )
        if not await self._store([event.line], is_report=True):
            self._reported_missing = missing

    async def _store(self, lines: Sequence[Line], *, is_report: bool = False) -> int:
        """Write lines, and return how many are lost."""
        try:
            return await self._target.write(lines, is_report=is_report)
        except Exception:  # boundary: the user sees lost events counted and logged, and work continues
            log.exception("audit: lost %d events because of a defect", len(lines))
            return len(lines)
