"""The audit: who wrote what, and who was refused, noted without holding up the work that is noted.

Callers hand over whole batches and go on; a task of its own makes notes of them and writes those. What comes while the
budget is used up is dropped and counted. Source: sidecar.md 9; reliability.md 4.7.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from headrace.config.audit import AuditConfig
from headrace.errors import FatalKafkaError, HeadraceError, KafkaTimeout
from headrace.lifecycle import Clock, Deadline, Service, run_blocking
from headrace.lifecycle.queues import register_gauge
from headrace.records import OutgoingRecord, Produced
from headrace.telemetry.correlation import caller, correlation_id, new_correlation_id, new_correlation_ids
from headrace.telemetry.metrics import Metrics

_REFUSALS_PER_SECOND: Final = 100
_NOTE_BYTES: Final = 1000
_UNKNOWN: Final = (KafkaTimeout, FatalKafkaError)
_encode_json = msgspec.json.Encoder().encode


class AuditNote(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True, gc=False):
    """One line of the audit, in the original's words; what says nothing is left out."""

    id: str
    service_id: str
    audit_type: str
    audit_status: str
    timestamp: int
    caller: str = ""
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    key: str | None = None
    correlation_id: str = ""
    traceability_id: str = ""
    action: str = ""
    target: str = ""
    reason: str = ""
    address: str = ""
    stacktrace: str = ""


class AuditTarget(Protocol):
    """Where notes go."""

    async def write(self, notes: Sequence[tuple[str, bytes]]) -> int:
        """Write notes (correlation id, JSON text); return how many are lost, after saying why in the log."""


class _Batch(NamedTuple):
    make: Callable[[], Iterable[AuditNote]]
    size_bytes: int


class Audit(Service):
    """Takes notes on the loop and never waits."""

    def __init__(self, settings: AuditConfig, target: AuditTarget, metrics: Metrics, clock: Clock) -> None:
        super().__init__("audit")
        self._settings = settings
        self._target = target
        self._metrics = metrics
        self._clock = clock
        self._batches: list[_Batch] = []
        self._pending_bytes = 0
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._refusals = (0, 0)

    async def start(self) -> None:
        register_gauge("audit_pending_bytes", lambda: self._pending_bytes)
        self.spawn(self._run(), "write")

    async def drain(self, deadline: Deadline) -> None:
        await self._idle.wait()

    def put(self, make: Callable[[], Iterable[AuditNote]], count: int, size_bytes: int) -> None:
        """Note `count` things later: `make` gives the notes, on a thread, and keeps `size_bytes` until then."""
        if self._pending_bytes and self._pending_bytes + size_bytes > self._settings.max_pending_bytes:
            self._metrics.audit_notes("dropped", count)
            return
        self._batches.append(_Batch(make, size_bytes))
        self._pending_bytes += size_bytes
        self._idle.clear()
        self._wake.set()

    def produced(
        self, records: Sequence[OutgoingRecord], results: Sequence[Produced | HeadraceError], written: int
    ) -> None:
        """Note the records of one request, of which `written` are certainly in Kafka."""
        wanted = self._settings.records
        if wanted == "none" or (wanted == "failed" and written == len(results)):
            return
        who, now = caller.get(), self._now()

        def make() -> Iterable[AuditNote]:
            for identity, record, result in zip(new_correlation_ids(len(records)), records, results, strict=True):
                if wanted == "all" or isinstance(result, HeadraceError):
                    yield self._production(identity.decode(), record, result, who, now)

        count = len(results) if wanted == "all" else len(results) - written
        self.put(make, count, sum([record.size_bytes for record in records]))

    def refused(self, action: str, address: str, error: HeadraceError) -> None:
        """Note what a caller may not do; of more than 100 in a second the rest is dropped."""
        second = int(self._clock.monotonic())
        count = self._refusals[1] + 1 if self._refusals[0] == second else 1
        self._refusals = second, count
        if count > _REFUSALS_PER_SECOND:
            self._metrics.audit_notes("dropped", 1)
            return
        self._put_one("ACCESS", "DENIED", action=action[:300], address=address, stacktrace=_reason(error))

    def control(self, action: str, target: str, *, reason: str = "", outcome: str = "SUCCESS") -> None:
        """Note what the caller of this request did to something of ours, whatever `audit.records` says.

        Args:
            action: What was done: `pause`, `redrive`, `register`.
            target: What it was done to, as people name it: `reactive orders`, `orders.dlq`, `job 7`.
            reason: What the caller gave as its reason.
            outcome: `SUCCESS`, or `FAILURE` where it was taken and did not come to its end.
        """
        self._put_one("CONTROL", outcome, action=action[:300], target=target[:300], reason=reason[:1000])

    def _put_one(self, audit_type: str, audit_status: str, **said: str) -> None:
        note = AuditNote(
            id=new_correlation_id().decode(),
            service_id=self._settings.service_id,
            audit_type=audit_type,
            audit_status=audit_status,
            timestamp=self._now(),
            caller=caller.get(),
            correlation_id=correlation_id.get(),
            **said,
        )
        self.put(lambda: (note,), 1, _NOTE_BYTES)

    def _production(
        self, identity: str, record: OutgoingRecord, result: Produced | HeadraceError, who: str, now: int
    ) -> AuditNote:
        headers = dict(record.headers or ())
        status, reason, partition, offset = "SUCCESS", "", record.partition or 0, 0
        if isinstance(result, HeadraceError):
            status, reason = "UNKNOWN" if isinstance(result, _UNKNOWN) else "FAILURE", _reason(result)
        else:
            partition, offset = result.partition, result.offset
        return AuditNote(
            id=identity,
            service_id=self._settings.service_id,
            audit_type="PRODUCER",
            audit_status=status,
            timestamp=now,
            caller=who,
            topic=record.topic,
            partition=partition,
            offset=offset,
            key=self._key(record.key),
            correlation_id=_text(headers.get("X-Correlation-Id")),
            traceability_id=_text(headers.get("X-Traceability-Id")),
            stacktrace=reason,
        )

    def _key(self, key: bytes | None) -> str | None:
        if key is None or self._settings.keys == "none":
            return None
        return _text(key) if self._settings.keys == "text" else hashlib.sha256(key).hexdigest()[:32]

    def _now(self) -> int:
        return int(self._clock.time() * 1000)

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batches, self._batches = self._batches, []
            notes = await run_blocking(_encoded, batches)
            lost = await self._target.write(notes)
            self._metrics.audit_notes("written", len(notes) - lost)
            self._metrics.audit_notes("lost", lost)
            self._pending_bytes -= sum(batch.size_bytes for batch in batches)
            if not self._batches:
                self._idle.set()


def _encoded(batches: Iterable[_Batch]) -> list[tuple[str, bytes]]:
    return [(note.correlation_id, _encode_json(note)) for batch in batches for note in batch.make()]


def _reason(error: HeadraceError) -> str:
    return f"{error.code} {error.message}: {error.description}"


def _text(data: bytes | None) -> str:
    return (data or b"").decode(errors="replace")
