"""Events of the audit: their fields, and how the events of many records are made."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import asdict, astuple, replace

from headrace.errors import FatalKafkaError, HeadraceError, KafkaTimeout
from headrace.records import CORRELATION_ID, TRACEABILITY_ID, Header, OutgoingRecord, Produced, Record, RecordBatch
from headrace.runtime.telemetry.correlation import new_correlation_id, new_correlation_ids

Line = tuple[bytes, bytes]
"""An event as it is written: its correlation id, and its JSON text."""

_REDRIVE_OF: Final = "headrace.redrive.of"
_UNKNOWN: Final = (KafkaTimeout, FatalKafkaError)
_MOST_RANGES: Final = 100
"""Ranges of one event: more could exceed the size of a record."""
_NUL: Final = rb"\u0000"
_NO_DETAILS: Final[Mapping[str, str]] = {}
_encode_json = msgspec.json.Encoder().encode


class AuditEvent(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True, kw_only=True, gc=False):
    """One event, with the field names of the light-4j kafka-sidecar; empty fields are left out."""

    id: str = ""
    service_id: str
    audit_type: str
    audit_status: str
    timestamp: int
    caller: str = ""
    group: str = ""
    replay: str = ""
    topic: str | None = None
    partition: int | None = None
    offset: int | None = None
    key: str | None = None
    correlation_id: str = ""
    traceability_id: str = ""
    redrive_of: str = ""
    action: str = ""
    target: str = ""
    reason: str = ""
    address: str = ""
    count: int = 0
    stacktrace: str = ""

    @property
    def line(self) -> Line:
        """The event as it is written; databases reject texts with NUL, so it becomes U+FFFD."""
        text = _encode_json(self)
        if _NUL in text:
            fields = {name: value for name, value in asdict(self).items() if isinstance(value, str)}
            text = _encode_json(
                replace(self, **{name: value.replace("\0", "\ufffd") for name, value in fields.items()})
            )
        return self.correlation_id.encode(), text


class OffsetRange(msgspec.Struct, rename="camel", gc=False):
    """Records of one partition, between two offsets."""

    topic: str
    partition: int
    offset: int
    last_offset: int
    count: int


class RangeEvent(AuditEvent, frozen=True, rename="camel", omit_defaults=True, kw_only=True, gc=False):
    """An event for `count` records: of one partition, from `offset` to `last_offset`, or of `ranges`."""

    last_offset: int | None = None
    ranges: list[OffsetRange] | None = None


class RecordEnd(Protocol):
    """The report of a destination on a failed record."""

    @property
    def error(self) -> str:
        """Class of the failure."""

    @property
    def details(self) -> tuple[tuple[str, str], ...]:
        """Further details of the response, by name."""


class Consumption(NamedTuple):
    """The consumer of records."""

    audit_type: str
    """`REACTIVE_CONSUMER`, `STREAMING_CONSUMER` or `ACTIVE_CONSUMER`."""
    group: str
    replay: str = ""
    """Id of the job that delivered them once more."""
    caller: str = ""
    """Who requested them, of an active consumer."""
    action: str = ""
    """`read` of records that a client received."""


WrittenRecord = tuple[str, int, str, str, int, int, str | None, str, str]
"""A record that one request wrote: type of the audit, milliseconds, caller, topic, partition, offset, hash of the key,
correlation id, traceability id."""


def key_hash(key: bytes | None) -> str | None:
    """Return the first half of the SHA-256 of a record's key, which events show instead of it."""
    return None if key is None else hashlib.sha256(key).hexdigest()[:32]


def produced_events(
    common: RangeEvent,
    records: Sequence[OutgoingRecord],
    results: Sequence[Produced | HeadraceError],
    *,
    failed: bool = False,
) -> Iterator[RangeEvent]:
    """Yield an event for each record that was written; with `failed`, for each other record instead."""
    for record, result, identity in zip(records, results, new_correlation_ids(len(records)), strict=True):
        if isinstance(result, HeadraceError) is not failed:
            continue
        correlation, traceability, _ = ids_of(record.headers)
        if isinstance(result, HeadraceError):
            status = "UNKNOWN" if isinstance(result, _UNKNOWN) else "FAILURE"
            at, stacktrace = Produced(record.partition or 0, 0), reason_of(result)
        else:
            status = common.audit_status
            at, stacktrace = result, ""
        yield replace(
            common,
            id=identity.decode(),
            audit_status=status,
            topic=record.topic,
            partition=at.partition,
            offset=at.offset,
            key=key_hash(record.key),
            correlation_id=correlation or identity.decode(),
            traceability_id=traceability,
            stacktrace=stacktrace,
        )


def written_events(service_id: str, records: Sequence[WrittenRecord]) -> Iterator[RangeEvent]:
    """Yield an event for each of these records."""
    for record, identity in zip(records, new_correlation_ids(len(records)), strict=True):
        audit_type, timestamp, who, topic, partition, offset, key, correlation, traceability = record
        own_id = identity.decode()
        yield RangeEvent(
            id=own_id,
            service_id=service_id,
            audit_type=audit_type,
            audit_status="SUCCESS",
            timestamp=timestamp,
            caller=who,
            topic=topic,
            partition=partition,
            offset=offset,
            key=key,
            correlation_id=correlation or own_id,
            traceability_id=traceability,
        )


def written_ranges(
    common: RangeEvent, records: Sequence[OutgoingRecord], results: Sequence[Produced | HeadraceError]
) -> list[RangeEvent]:
    """Return the events for the records that one request wrote; arguments as in `produced_events`."""
    if len(records) == 1:
        return list(produced_events(common, records, results))
    offsets: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for record, result in zip(records, results, strict=True):
        if type(result) is Produced:
            offsets[record.topic, result.partition].append(result.offset)
    return _range_events(common, offsets, (record.headers for record in records))


def consumed_events(
    common: RangeEvent, records: Sequence[Record], ends: Sequence[RecordEnd] = ()
) -> Iterator[RangeEvent]:
    """Yield an event for each completed record; `ends` has a report on each failed one."""
    for index, (record, identity) in enumerate(zip(records, new_correlation_ids(len(records)), strict=True)):
        correlation, traceability, redrive_of = ids_of(record.read_headers())
        details = dict(ends[index].details) if ends else _NO_DETAILS
        # As in a delivery: a record without a correlation id has that of its delivery.
        correlation = correlation or details.get("correlation_id", "")
        position = redrive_of or f"{record.topic}:{record.partition}:{record.offset}"
        yield replace(
            common,
            id=identity.decode(),
            timestamp=int(details.get("result_timestamp", common.timestamp)),
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            key=key_hash(record.key),
            correlation_id=correlation or f"{common.group}:{position}",
            traceability_id=traceability or details.get("traceability_id", ""),
            redrive_of=redrive_of,
            reason=f"{common.reason}: {ends[index].error}" if ends and ends[index].error else common.reason,
        )


def consumed_ranges(common: RangeEvent, records: Sequence[Record]) -> list[RangeEvent]:
    """Return the events for delivered records; arguments as in `consumed_events`."""
    if len(records) == 1:
        return list(consumed_events(common, records))
    if isinstance(records, RecordBatch):
        return _range_events(common, {records.topic_partition: records.offsets}, records.headers or [None])
    offsets: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for record in records:
        offsets[record.topic, record.partition].append(record.offset)
    return _range_events(common, offsets, (record.read_headers() for record in records))


def reason_of(error: HeadraceError) -> str:
    """Return an error as an event shows it."""
    return f"{error.code} {error.message}: {error.description}"


def _range_events(
    common: RangeEvent, offsets: Mapping[tuple[str, int], list[int]], headers: Iterable[list[Header] | None]
) -> list[RangeEvent]:
    """Return the events of several records; they have a correlation id if all records have the same."""
    shared = _shared_correlation(headers)
    found = [OffsetRange(*at, min(numbers), max(numbers), len(numbers)) for at, numbers in offsets.items()]
    events = []
    for first in range(0, len(found), _MOST_RANGES):
        ranges = found[first : first + _MOST_RANGES]
        count = sum([one.count for one in ranges])
        event = replace(common, id=new_correlation_id().decode(), correlation_id=shared, count=count)
        if len(ranges) > 1:
            events.append(replace(event, ranges=ranges))
        else:
            topic, partition, offset, last_offset, _ = astuple(ranges[0])
            events.append(replace(event, topic=topic, partition=partition, offset=offset, last_offset=last_offset))
    return events


def _shared_correlation(all_headers: Iterable[list[Header] | None]) -> str:
    shared, before = b"", None
    for headers in all_headers:
        if headers and headers == before:
            continue
        own = next((value for name, value in headers or () if name == CORRELATION_ID), None)
        if not own or (shared and own != shared):
            return ""
        shared, before = own, headers
    return _text(shared)


def ids_of(headers: Sequence[Header] | None) -> tuple[str, str, str]:
    """Return correlation id, traceability id and first position of a record; each empty where no header has it."""
    correlation = traceability = redrive_of = ""
    for name, value in headers or ():
        if name == CORRELATION_ID:
            correlation = _text(value or b"")
        elif name == TRACEABILITY_ID:
            traceability = _text(value or b"")
        elif name == _REDRIVE_OF:
            redrive_of = _text(value or b"")
    return correlation, traceability, redrive_of


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
