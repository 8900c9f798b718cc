"""`POST /consumers/active/audit`: clients report how they processed the records that they fetched."""

import re
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from headrace import errors
from headrace.errors import AuditNotTaken
from headrace.http.auth.principals import READ, WRITE
from headrace.http.endpoint import JSON, RECORDS_BODY, Call, Endpoint, Rule, require
from headrace.http.request_checks import check_count
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.audit_events import AuditEvent, key_hash
from headrace.runtime.telemetry.correlation import caller, new_correlation_id

Id = Annotated[str, Meta(max_length=1000)]
Offset = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_INDEX: Final = re.compile(r"\$\[(\d+)\]")
_CAUSE_CHARACTERS: Final = 200


class AuditedRecord(msgspec.Struct):
    """The record as it was fetched. Other fields are ignored."""

    topic: Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
    partition: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    offset: Offset
    headers: dict[str, str | None] | None = None


class AuditedResult(msgspec.Struct, rename="camel"):
    """How one record was processed. Other fields are ignored."""

    record: AuditedRecord | None = None
    consumer_record: AuditedRecord | None = None
    """The same, under its name in the light-4j sidecar's document."""
    processed: bool | None = None
    """Any value other than `true` is a failure."""
    key: Annotated[str, Meta(max_length=10_000)] | int | float | None = None
    correlation_id: Id | None = None
    traceability_id: Id | None = None
    timestamp: Offset | None = None
    """Milliseconds since the epoch; by default now."""


_decode: Final = msgspec.json.Decoder(list[AuditedResult]).decode


class AuditEndpoints:
    """Writes to the audit how clients processed the records that they fetched."""

    def __init__(self, audit: Audit | None, max_results: int) -> None:
        self._audit = audit
        self._max_results = max_results

    @Endpoint(
        "POST",
        "/consumers/active/audit",
        "ConsumerActiveAudit",
        "Report in the audit how fetched records were processed",
        Rule((READ, WRITE), "consume"),
        request={JSON: list[AuditedResult]},
        example=[{"record": {"topic": "orders", "partition": 0, "offset": 7}, "processed": True, "key": "alice"}],
        errors=(*RECORDS_BODY, errors.AuditNotTaken, errors.ProducerQueueFull),
        decoded=False,
    )
    async def report(self, call: Call[bytes, None]) -> list[AuditEvent]:
        results = _results(call.body)
        check_count(results, self._max_results)
        records = [_record_of(index, result) for index, result in enumerate(results)]
        for topic in {record.topic for record in records}:
            require(call.request, (READ, WRITE), "consume", topic)
        if self._audit is None:
            raise AuditNotTaken("audit.to is none; set it to file or topic")
        events = [_event_of(self._audit, record, result) for record, result in zip(records, results, strict=True)]
        if not self._audit.offer(events):
            raise errors.ProducerQueueFull("too many audit events are waiting to be written: send this again")
        return events


def _results(body: bytes) -> list[AuditedResult]:
    try:
        return _decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as cause:
        text = str(cause)[:_CAUSE_CHARACTERS]  # it may quote the body
        index = _INDEX.search(text)
        raise AuditNotTaken(
            f"the body is not an array of results, nothing was audited: {text}", index=int(index[1]) if index else None
        ) from cause


def _record_of(index: int, result: AuditedResult) -> AuditedRecord:
    record = result.record or result.consumer_record
    if record is None:
        raise AuditNotTaken(
            f"result {index} has no record, nothing was audited; send the record as it was fetched", index=index
        )
    return record


def _event_of(audit: Audit, record: AuditedRecord, result: AuditedResult) -> AuditEvent:
    headers, identity = record.headers or {}, new_correlation_id().decode()
    event = audit.event(
        "ACTIVE_CONSUMER",
        "SUCCESS" if result.processed is True else "FAILURE",
        id=identity,
        caller=caller.get(),
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=None if result.key is None else key_hash(str(result.key).encode()),
        correlation_id=headers.get("X-Correlation-Id") or result.correlation_id or identity,
        traceability_id=headers.get("X-Traceability-Id") or result.traceability_id or "",
    )
    return event if result.timestamp is None else replace(event, timestamp=result.timestamp)
