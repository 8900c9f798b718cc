"""The audit: who wrote, consumed and steered what, and who was refused, noted without holding up what is noted.

Callers hand over whole batches and go on; a task of its own has notes made of them and written, on a thread. What
comes while the budget is used up is dropped; what is dropped, or lost on the way, is counted, alarmed, and noted as
soon as there is room again, so the trail itself says that it has a hole. Source: sidecar.md 9; reliability.md 4.7.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from headrace.config.audit import AuditConfig
from headrace.errors import HeadraceError, InternalError, ProducerQueueFull
from headrace.lifecycle import Clock, Deadline, Readiness, Service, run_blocking
from headrace.lifecycle.gauge_registry import register_gauge
from headrace.records import OutgoingRecord, Produced, Record
from headrace.telemetry.audit_notes import (
    AuditNote,
    Consumption,
    Line,
    Reported,
    Said,
    consumption_lines,
    production_lines,
    reason_of,
    shown_key,
)
from headrace.telemetry.correlation import caller, correlation_id, new_correlation_id, new_correlation_ids
from headrace.telemetry.metrics import Metrics

log = logging.getLogger(__name__)

_REFUSALS_PER_SECOND: Final = 100
_NOTE_BYTES: Final = 1000
_RECORD_BYTES: Final = 300
_ALARM_SECONDS: Final = 60.0
_HOLE_SECONDS: Final = 1.0

Produce = Callable[[Sequence[OutgoingRecord]], Awaitable[Sequence[Produced | HeadraceError]]]
"""Writes records and returns one result per record, in their order."""


class AuditTarget(Protocol):
    """Where notes go."""

    @property
    def waiting(self) -> int:
        """Notes that were taken and are neither written nor lost yet."""

    def write(self, notes: Iterable[Line]) -> int:
        """Take notes, on a thread; return how many are lost since the last call, after saying why in the log."""


class _Batch(NamedTuple):
    make: Callable[[], Iterable[Line]]
    notes: int
    size_bytes: int


class Audit(Service):
    """Takes notes on the loop and never waits."""

    def __init__(self, settings: AuditConfig, target: AuditTarget, metrics: Metrics, clock: Clock) -> None:
        super().__init__("audit")
        self._settings = settings
        self.service_id = settings.service_id
        self._target = target
        self._metrics = metrics
        self._clock = clock
        self._key_of = shown_key(settings.keys)
        self._batches: list[_Batch] = []
        self._open = 0
        """Notes that are neither written nor lost yet."""
        self._waiting = 0
        """Those of them that the target has."""
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusals = (0, 0)
        self._missing = 0
        """Notes that are dropped or lost since the process began."""
        self._told = 0
        """Those of them that the trail tells of."""
        self._told_at = float("-inf")
        self._alarmed_at = float("-inf")

    async def start(self) -> None:
        register_gauge("headrace_audit_pending_notes", lambda: self._open)
        await run_blocking(self._target.write, ())  # makes the file, or says in the log why it cannot
        self.spawn(self._run(), "write")

    async def drain(self, deadline: Deadline) -> None:
        await asyncio.wait_for(self._idle.wait(), deadline.remaining_seconds)

    async def stop(self) -> None:
        await super().stop()
        if self._open:
            log.warning("audit: %d notes were not written when the process had to end", self._open)

    def readiness(self) -> Readiness:
        """Ready in any case; the reason says whether the trail has holes."""
        return Readiness(True, f"{self._missing} notes are missing in the audit" if self._missing else "")

    def put(self, make: Callable[[], Iterable[Line]], count: int, size_bytes: int) -> None:
        """Note `count` things later: `make` gives the notes, on a thread, and keeps `size_bytes` until then."""
        if not self._has_room(size_bytes):
            self._miss("dropped", count)
            return
        self._batches.append(_Batch(make, count, size_bytes))
        self._open += count
        self._pending_bytes += size_bytes
        if not self._wake.is_set():
            self._idle.clear()
            self._wake.set()

    def _has_room(self, size_bytes: int) -> bool:
        return not self._pending_bytes or self._pending_bytes + size_bytes <= self._settings.max_pending_bytes

    def produced(
        self,
        records: Sequence[OutgoingRecord],
        results: Sequence[Produced | HeadraceError],
        written: int,
        size_bytes: int | None = None,
        audit_type: str = "PRODUCER",
    ) -> None:
        """Note the records of one request.

        Args:
            records: What was to be written.
            results: One per record.
            written: How many are certainly in Kafka.
            size_bytes: What the records count for; by default counted here.
            audit_type: `PRODUCER`, or `STREAMING_PRODUCER` for what a function or a job writes.
        """
        wanted = self._settings.records
        if wanted == "none" or (wanted == "failed" and written == len(results)):
            return
        shared, failed_only = self._note(audit_type, "SUCCESS", caller=caller.get()), wanted == "failed"
        if size_bytes is None:
            size_bytes = sum([record.size_bytes for record in records])
        self.put(
            lambda: production_lines(shared, self._key_of, records, results, failed_only),
            len(results) - written if failed_only else len(results),
            size_bytes + _RECORD_BYTES * len(records),
        )

    def sent(
        self,
        records: Sequence[OutgoingRecord],
        results: Sequence[Produced | HeadraceError],
        audit_type: str = "PRODUCER",
    ) -> None:
        """Note records as `produced` does, for those who have not counted what is written."""
        written = sum(isinstance(result, Produced) for result in results)
        self.produced(records, results, written, audit_type=audit_type)

    def not_sent(self, topic: str, error: HeadraceError, count: int = 0) -> None:
        """Note a produce request that was refused before anything was sent, or `count` lines of a stream."""
        if self._settings.records != "none":
            status = "UNKNOWN" if isinstance(error, InternalError) else "FAILURE"
            self._put_one("PRODUCER", status, topic=topic[:249], count=count, stacktrace=reason_of(error))

    def noting(self, produce: Produce, audit_type: str = "PRODUCER") -> Produce:
        """Return something that writes records and notes them."""

        async def produce_noted(records: Sequence[OutgoingRecord]) -> Sequence[Produced | HeadraceError]:
            results = await produce(records)
            self.sent(records, results, audit_type)
            return results

        return produce_noted

    def consumed(
        self, whose: Consumption, records: Sequence[Record], size_bytes: int, how: str, outcomes: Sequence[Said]
    ) -> None:
        """Note records that ended.

        Args:
            whose: Who consumed them.
            records: What ended.
            size_bytes: Bytes of these records.
            how: `delivered`, or how they ended otherwise.
            outcomes: What was said of each, if they did not end well and anything was said; else empty.
        """
        wanted, well = self._settings.records, how == "delivered"
        if wanted == "none" or (wanted == "failed" and well):
            return
        shared = self._note(
            whose.audit_type,
            "SUCCESS" if well else "FAILURE",
            group=whose.group,
            replay=whose.replay,
            reason="" if well else how,
        )
        self.put(
            lambda: consumption_lines(shared, self._key_of, whose, records, outcomes),
            len(records),
            size_bytes + _RECORD_BYTES * len(records),
        )

    def reported(self, reports: Sequence[Reported]) -> list[AuditNote]:
        """Note what a client says of records that it fetched, whatever `audit.records` says, and return the notes.

        Raises:
            ProducerQueueFull: There is no room; nothing is noted.
        """
        size_bytes = _NOTE_BYTES * len(reports)
        if not self._has_room(size_bytes):
            raise ProducerQueueFull("too many notes wait to be written (audit.max_pending_bytes): send this again")
        shared = self._note("ACTIVE_CONSUMER", "SUCCESS", caller=caller.get())
        notes = []
        for identity, report in zip(new_correlation_ids(len(reports)), reports, strict=True):
            topic, partition, offset, processed, key, correlation, trace, timestamp = report
            about = {"topic": topic, "partition": partition, "offset": offset, "traceability_id": trace}
            note = msgspec.structs.replace(shared, **about)
            note.id, note.correlation_id = identity.decode(), correlation or identity.decode()
            note.key = None if key is None else self._key_of(key.encode())
            note.audit_status = "SUCCESS" if processed else "FAILURE"
            note.timestamp = shared.timestamp if timestamp is None else timestamp
            notes.append(note)
        if notes:
            self.put(lambda: [note.line for note in notes], len(notes), size_bytes)
        return notes

    def refused(self, action: str, address: str, error: HeadraceError) -> None:
        """Note what a caller may not do; of more than 100 in a second the rest is dropped."""
        second = int(self._clock.monotonic())
        count = self._refusals[1] + 1 if self._refusals[0] == second else 1
        self._refusals = second, count
        if count > _REFUSALS_PER_SECOND:
            self._miss("dropped", 1)
            return
        self._put_one("ACCESS", "DENIED", action=action[:300], address=address, stacktrace=reason_of(error))

    def control(self, action: str, target: str, *, reason: str = "", outcome: str = "SUCCESS") -> None:
        """Note what the caller of this request did to something of ours, whatever `audit.records` says.

        Args:
            action: What was done: `pause`, `redrive`, `register`.
            target: What it was done to, as people name it: `reactive orders`, `orders.dlq`, `job 7`.
            reason: What the caller gave as its reason.
            outcome: `SUCCESS`, or `FAILURE` where it was taken and did not come to its end.
        """
        self._put_one("CONTROL", outcome, action=action[:300], target=target[:300], reason=reason[:1000])

    def _put_one(self, audit_type: str, audit_status: str, **said: str | int) -> None:
        note = self._note(audit_type, audit_status, caller=caller.get(), correlation_id=correlation_id.get(), **said)
        note.id = new_correlation_id().decode()
        self.put(lambda: (note.line,), 1, _NOTE_BYTES)

    def _note(self, audit_type: str, audit_status: str, **said: str | int) -> AuditNote:
        now = int(self._clock.time() * 1000)
        about: dict[str, str | int] = {"service_id": self.service_id, "timestamp": now, **said}
        return AuditNote(audit_type=audit_type, audit_status=audit_status, **about)  # type: ignore[arg-type]

    def _miss(self, outcome: str, count: int) -> None:
        """Count notes that are not written, and say so at once, and then once a minute."""
        self._metrics.audit_notes(outcome, count)
        self._missing += count
        if count and self._clock.monotonic() - self._alarmed_at >= _ALARM_SECONDS:
            self._alarmed_at = self._clock.monotonic()
            log.warning("audit: %d notes are missing so far, the last because they were %s", self._missing, outcome)

    async def _run(self) -> None:
        while True:
            if not self._waiting:
                await self._wake.wait()
            self._wake.clear()
            batches, self._batches = self._batches, []
            lost = await self._write(batches)
            self._pending_bytes -= sum([batch.size_bytes for batch in batches])
            if self._missing > self._told and not lost:
                await self._tell_of_hole()
            if not self._open:
                self._idle.set()

    async def _tell_of_hole(self) -> None:
        """Write how many notes are missing, by itself: if that is lost too, the next one tells of all of them."""
        now = self._clock.monotonic()
        if self._waiting and now - self._told_at < _HOLE_SECONDS:
            return
        self._told_at = now
        while self._waiting:
            if await self._write([]):
                return  # what is in doubt now would be told twice
        missing = self._missing
        note = self._note("DROPPED", "FAILURE", reason="notes that are missing before this one")
        note.id, note.count = new_correlation_id().decode(), missing - self._told
        lost = await run_blocking(self._make_and_write, [_Batch(lambda: (note.line,), 1, 0)], 1)
        while self._target.waiting:
            lost += await run_blocking(self._make_and_write, [], 0)
        if not lost:
            self._told = missing

    async def _write(self, batches: Sequence[_Batch]) -> int:
        """Have notes written, on a thread, and count; return how many are lost."""
        count = sum([batch.notes for batch in batches])
        lost = await run_blocking(self._make_and_write, batches, count)
        due = self._waiting + count
        self._waiting = min(self._target.waiting, due - lost)  # a client may count more than notes
        ended = due - self._waiting
        self._metrics.audit_notes("written", ended - lost)
        self._miss("lost", lost)
        self._open -= ended
        return lost

    def _make_and_write(self, batches: Sequence[_Batch], count: int) -> int:
        lost: list[int] = []
        try:
            return self._target.write(self._lines(batches, lost)) + sum(lost)
        except Exception:  # boundary: the user sees lost notes counted and alarmed, and work goes on
            log.exception("audit: a defect, for which %d notes are lost", count)
            return count

    def _lines(self, batches: Iterable[_Batch], lost: list[int]) -> Iterator[Line]:
        for batch in batches:
            try:
                lines = list(batch.make())
            except Exception:  # boundary: the user sees lost notes counted and alarmed, and work goes on
                log.exception("audit: a defect, for which %d notes are lost", batch.notes)
                lost.append(batch.notes)
                continue
            yield from lines
