"""The audit: who wrote, consumed, controlled and was refused what.

Callers hand over notes and never wait. A task writes the notes in portions. What does not fit into the byte budget is
dropped; what the target does not take is lost. Both are counted, logged, and reported by a note of their own.
"""

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from headrace.config.audit import AuditConfig
from headrace.errors import HeadraceError, InternalError, ProducerQueueFull
from headrace.records import OutgoingRecord, Produce, Produced, Record
from headrace.runtime import Clock, Deadline, Readiness, Service, TokenBucket, next_slice
from headrace.runtime.telemetry.audit_notes import (
    AuditNote,
    ClientReport,
    Consumption,
    Line,
    RangeNote,
    RecordEnd,
    consumed_notes,
    consumed_ranges,
    key_hash,
    produced_notes,
    reason_of,
    written_ranges,
)
from headrace.runtime.telemetry.audit_targets import AuditTarget
from headrace.runtime.telemetry.correlation import caller, correlation_id, new_correlation_id
from headrace.runtime.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_REFUSALS_PER_SECOND: Final = 100
_NOTE_BYTES: Final = 1000
_RECORD_BYTES: Final = 300
_RANGE_BYTES: Final = 400
_ALARMS_PER_SECOND: Final = 1 / 60
_GATHER_SECONDS: Final = 0.1
"""Notes of so long are written together: a write costs more than a note."""
_PORTION_NOTES: Final = 1000
_SLICE_NOTES: Final = 250
"""Notes that are made before the event loop serves others."""


class _NoteBatch(NamedTuple):
    notes: Iterable[AuditNote]
    number: int
    size_bytes: int


class _NoteQueue:
    """Batches of notes that are not written yet, at most so many bytes."""

    def __init__(self, max_bytes: int) -> None:
        self.notes = 0
        self.filled = asyncio.Event()
        self.empty = asyncio.Event()
        self.empty.set()
        self._max_bytes = max_bytes
        self._size_bytes = 0
        self._batches: deque[_NoteBatch] = deque()

    def has_capacity(self, size_bytes: int) -> bool:
        """Return whether so many bytes more fit; into an empty queue everything fits."""
        return not self._size_bytes or self._size_bytes + size_bytes <= self._max_bytes

    def put(self, batch: _NoteBatch) -> None:
        self._batches.append(batch)
        self.notes += batch.number
        self._size_bytes += batch.size_bytes
        self.empty.clear()
        self.filled.set()

    def next_portion(self) -> list[_NoteBatch]:
        """Return the batches to write next; they count until `release`."""
        portion: list[_NoteBatch] = []
        notes = 0
        while self._batches and notes < _PORTION_NOTES:
            portion.append(self._batches.popleft())
            notes += portion[-1].number
        return portion

    def release(self, portion: Sequence[_NoteBatch]) -> None:
        """Count batches no longer."""
        self.notes -= sum([batch.number for batch in portion])
        self._size_bytes -= sum([batch.size_bytes for batch in portion])


class Audit(Service):
    """Takes notes on the event loop and never waits."""

    def __init__(self, settings: AuditConfig, target: AuditTarget, metrics: Metrics, clock: Clock) -> None:
        super().__init__("audit")
        self.service_id = settings.service_id
        self._settings = settings
        self._target = target
        self._metrics = metrics
        self._clock = clock
        self._queue = _NoteQueue(settings.max_pending_bytes)
        self._ranges: dict[tuple[Any, ...], RangeNote] = {}
        """The last delivery to each group from each partition, of those that wait to be written."""
        self._draining = asyncio.Event()
        self._refusals = TokenBucket(clock, _REFUSALS_PER_SECOND, _REFUSALS_PER_SECOND)
        self._alarms = TokenBucket(clock, _ALARMS_PER_SECOND, 1)
        self._missing = 0
        """Notes that were dropped or lost since the process began."""
        self._reported_missing = 0
        """Those of them that a note has reported."""

    async def start(self) -> None:
        self.publish("headrace_audit_pending_notes", lambda: self._queue.notes)
        await self._target.write(())  # creates the file, or the log says why it cannot
        self.keep(self._run, "write")

    async def drain(self, deadline: Deadline) -> None:
        self._draining.set()
        if self._missing > self._reported_missing:
            self._queue.empty.clear()  # the number of missing notes is still to be written
        self._queue.filled.set()
        await asyncio.wait_for(self._queue.empty.wait(), deadline.remaining_seconds)

    async def stop(self) -> None:
        await super().stop()
        if self._queue.notes:
            log.warning("audit: %d notes were not written when the process had to end", self._queue.notes)

    def readiness(self) -> Readiness:
        """Always ready; the reason says how many notes are missing."""
        return Readiness(True, f"{self._missing} notes are missing in the audit" if self._missing else "")

    def put(self, notes: Iterable[AuditNote], count: int, size_bytes: int) -> bool:
        """Write `count` notes later; return whether they fit.

        An iterator may make them then, and keeps `size_bytes` until they are written.
        """
        if self._queue.has_capacity(size_bytes):
            self._queue.put(_NoteBatch(notes, count, size_bytes))
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
        """Audit the records of one request; `audit_type` is `STREAMING_PRODUCER` for those of a function or a job."""
        which, written = self._settings.records, list(map(type, results)).count(Produced)
        if which == "none" or (which == "failed" and written == len(results)):
            return
        common = self._note(audit_type, "SUCCESS", caller=caller.get())
        if written and which == "summary":
            self._put_list(written_ranges(common, records, results))
        elif written and which == "all":
            if size_bytes is None:
                size_bytes = sum([record.size_bytes for record in records])
            notes = produced_notes(common, records, results)
            self.put(notes, written, size_bytes + _RECORD_BYTES * len(records))
        if written < len(results):
            self._put_list(list(produced_notes(common, records, results, failed=True)))

    def not_sent(self, topic: str, error: HeadraceError, count: int = 0) -> None:
        """Audit a produce request that was refused before anything was sent, or `count` lines of a stream."""
        if self._settings.records != "none":
            status = "UNKNOWN" if isinstance(error, InternalError) else "FAILURE"
            self._put_one("PRODUCER", status, topic=topic[:249], count=count, stacktrace=reason_of(error))

    def audited(self, produce: Produce, audit_type: str = "PRODUCER") -> Produce:
        """Return a function that writes records and audits them."""

        async def produce_audited(records: Sequence[OutgoingRecord]) -> Sequence[Produced | HeadraceError]:
            results = await produce(records)
            self.produced(records, results, audit_type=audit_type)
            return results

        return produce_audited

    def consumed(
        self, who: Consumption, records: Sequence[Record], size_bytes: int, how: str, ends: Sequence[RecordEnd]
    ) -> None:
        """Audit records that ended; `ends` is empty if they ended well, or nothing was reported of them."""
        which, well = self._settings.records, how == "delivered"
        if which == "none" or (which == "failed" and well):
            return
        common = self._note(
            who.audit_type, "SUCCESS", group=who.group, replay=who.replay, caller=who.caller, action=who.action
        )
        if well and which == "summary":
            for note in consumed_ranges(common, records):
                self._put_range(note)
            return
        if not well:
            common.audit_status, common.reason = "FAILURE", how
        notes = consumed_notes(common, records, ends)
        self.put(notes, len(records), size_bytes + _RECORD_BYTES * len(records))

    def reported(self, reports: Sequence[ClientReport]) -> list[AuditNote]:
        """Audit what a client reports of records that it fetched, whatever `audit.records` says; return the notes.

        Raises:
            ProducerQueueFull: The queue is full; nothing is audited.
        """
        if not self._queue.has_capacity(_NOTE_BYTES * len(reports)):
            raise ProducerQueueFull("too many notes wait to be written (audit.max_pending_bytes): send this again")
        notes: list[AuditNote] = []
        for topic, partition, offset, processed, key, correlation, traceability, timestamp in reports:
            note = self._note("ACTIVE_CONSUMER", "SUCCESS" if processed else "FAILURE", caller=caller.get())
            note.topic, note.partition, note.offset = topic, partition, offset
            note.id = new_correlation_id().decode()
            note.correlation_id, note.traceability_id = correlation or note.id, traceability
            note.key = None if key is None else key_hash(key.encode())
            note.timestamp = note.timestamp if timestamp is None else timestamp
            notes.append(note)
        self._put_list(notes)
        return notes

    def refused(self, action: str, address: str, error: HeadraceError) -> None:
        """Audit what a caller may not do; of more than 100 in a second the rest is dropped."""
        if not self._refusals.try_take():
            self._miss("dropped", 1)
            return
        self._put_one("ACCESS", "DENIED", action=action[:300], address=address, stacktrace=reason_of(error))

    def control(self, action: str, target: str, *, reason: str = "", outcome: str = "SUCCESS") -> None:
        """Audit a control operation of this request's caller, whatever `audit.records` says.

        Args:
            action: What was done: `pause`, `redrive`, `register`.
            target: What it was done to, as people name it: `reactive orders`, `orders.dlq`, `job 7`.
            outcome: `SUCCESS`, or `FAILURE` where it was accepted and did not finish.
        """
        self._put_one("CONTROL", outcome, action=action[:300], target=target[:300], reason=reason[:1000])

    def _put_one(self, audit_type: str, audit_status: str, **fields: Any) -> None:
        fields.update(id=new_correlation_id().decode(), caller=caller.get(), correlation_id=correlation_id.get())
        self._put_list([self._note(audit_type, audit_status, **fields)])

    def _put_list(self, notes: Sequence[AuditNote]) -> None:
        if notes:
            ranges = sum([len(note.ranges) for note in notes if isinstance(note, RangeNote) and note.ranges])
            self.put(notes, len(notes), _NOTE_BYTES * len(notes) + _RANGE_BYTES * ranges)

    def _put_range(self, note: RangeNote) -> None:
        """Put the note of a delivery, or let the one before it, of the same partition, stand for both."""
        key = note.audit_type, note.group, note.replay, note.caller, note.topic, note.partition, note.correlation_id
        last = self._ranges.get(key)
        if last and last.last_offset is not None and note.last_offset and note.offset == last.last_offset + 1:
            last.last_offset, last.count = note.last_offset, last.count + note.count
        elif self.put([note], 1, _NOTE_BYTES + _RANGE_BYTES * len(note.ranges or ())):
            self._ranges[key] = note

    def _note(self, audit_type: str, audit_status: str, **fields: Any) -> RangeNote:
        now = int(self._clock.time() * 1000)
        return RangeNote(
            service_id=self.service_id, audit_type=audit_type, audit_status=audit_status, timestamp=now, **fields
        )

    def _miss(self, outcome: str, count: int) -> None:
        """Count notes that are not written; log that at once, and then once a minute."""
        self._metrics.audit_notes(outcome, count)
        self._missing += count
        if count and self._alarms.try_take():
            log.warning("audit: %d notes are missing so far, the last because they were %s", self._missing, outcome)

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

    async def _write(self, portion: Sequence[_NoteBatch]) -> None:
        lines: list[Line] = []
        for batch in portion:
            made = len(lines)
            try:
                for note in batch.notes:
                    lines.append(note.line)
                    if len(lines) % _SLICE_NOTES == 0:
                        await next_slice()
            except Exception:  # boundary: the user sees lost notes counted and logged, and work continues
                log.exception("audit: a defect, for which %d notes are lost", batch.number)
                del lines[made:]
                self._miss("lost", batch.number)
        lost = await self._store(lines)
        self._metrics.audit_notes("written", len(lines) - lost)
        self._miss("lost", lost)

    async def _report_missing(self) -> None:
        """Write how many notes are missing, by itself: if that is lost too, the next one reports all of them."""
        missing = self._missing
        note = self._note("DROPPED", "FAILURE", reason="notes that are missing before this one")
        note.id, note.count = new_correlation_id().decode(), missing - self._reported_missing
        if not await self._store([note.line]):
            self._reported_missing = missing

    async def _store(self, lines: Sequence[Line]) -> int:
        """Have lines written, and return how many are lost."""
        try:
            return await self._target.write(lines)
        except Exception:  # boundary: the user sees lost notes counted and logged, and work continues
            log.exception("audit: a defect, for which %d notes are lost", len(lines))
            return len(lines)
