"""Notes of the audit: their fields, and how the notes of many records are made."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from headrace.errors import FatalKafkaError, HeadraceError, KafkaTimeout
from headrace.records import Header, OutgoingRecord, Produced, Record
from headrace.telemetry.correlation import new_correlation_id

Line = tuple[bytes, bytes]
"""A note as it is written: its correlation id, and its JSON text."""
KeyText = Callable[[bytes | None], str | None]
"""Returns a record's key as the notes show it."""

_CORRELATION: Final = "X-Correlation-Id"
_TRACEABILITY: Final = "X-Traceability-Id"
_REDRIVE_OF: Final = "headrace.redrive.of"
_UNKNOWN: Final = (KafkaTimeout, FatalKafkaError)
_encode_json = msgspec.json.Encoder().encode


class AuditNote(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True, gc=False):
    """One note, with the field names of the light-4j kafka-sidecar; empty fields are left out."""

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
        """The note as it is written."""
        return self.correlation_id.encode(), _encode_json(self)


class RangeNote(AuditNote, rename="camel", omit_defaults=True, kw_only=True, gc=False):
    """A note that may stand for `count` records of one partition, from `offset` to `last_offset`."""

    last_offset: int | None = None


class RecordEnd(Protocol):
    """What a destination reported of a record that did not end well."""

    @property
    def error(self) -> str:
        """Class of the failure."""

    @property
    def details(self) -> tuple[tuple[str, str], ...]:
        """Further details of the answer, by name."""


class Consumption(NamedTuple):
    """Who consumed records."""

    audit_type: str
    """`REACTIVE_CONSUMER` or `STREAMING_CONSUMER`."""
    group: str
    replay: str = ""
    """Id of the job that delivered them once more."""


class ClientReport(NamedTuple):
    """What a client reports of a record that it fetched."""

    topic: str
    partition: int
    offset: int
    processed: bool
    key: str | None
    correlation_id: str
    traceability_id: str
    timestamp: int | None


class _Ids(NamedTuple):
    correlation: str = ""
    traceability: str = ""
    redrive_of: str = ""


def key_text(how: str) -> KeyText:
    """Return what shows a record's key in the way that `audit.keys` says."""
    if how == "none":
        return lambda key: None
    if how == "text":
        return lambda key: None if key is None else _text(key)
    return lambda key: None if key is None else hashlib.sha256(key).hexdigest()[:32]


def written_notes(
    common: RangeNote, key_of: KeyText, records: Sequence[OutgoingRecord], results: Sequence[Produced | HeadraceError]
) -> Iterator[RangeNote]:
    """Yield a note for each record that was written.

    Args:
        common: The fields that all notes share.
        key_of: Shows keys.
        records: The records that were sent.
        results: One per record.
    """
    for record, result in zip(records, results, strict=True):
        if isinstance(result, Produced):
            ids = _ids_of(record.headers)._replace(redrive_of="")
            yield _note_of(common, ids, record.topic, result.partition, result.offset, key_of(record.key))


def unwritten_notes(
    common: RangeNote, key_of: KeyText, records: Sequence[OutgoingRecord], results: Sequence[Produced | HeadraceError]
) -> Iterator[RangeNote]:
    """Yield a note for each record that was not written, or may not be; arguments as of `written_notes`."""
    for record, result in zip(records, results, strict=True):
        if isinstance(result, HeadraceError):
            ids = _ids_of(record.headers)._replace(redrive_of="")
            note = _note_of(common, ids, record.topic, record.partition or 0, 0, key_of(record.key))
            note.audit_status = "UNKNOWN" if isinstance(result, _UNKNOWN) else "FAILURE"
            note.stacktrace = reason_of(result)
            yield note


def written_ranges(
    common: RangeNote, key_of: KeyText, records: Sequence[OutgoingRecord], results: Sequence[Produced | HeadraceError]
) -> list[RangeNote]:
    """Return one note for the records that one request wrote to one partition; arguments as of `written_notes`."""
    if len(records) == 1:
        return list(written_notes(common, key_of, records, results))
    offsets: dict[tuple[str, int], list[int]] = {}
    for record, result in zip(records, results, strict=True):
        if isinstance(result, Produced):
            offsets.setdefault((record.topic, result.partition), []).append(result.offset)
    return _ranges(common, offsets, (record.headers for record in records))


def consumed_notes(
    common: RangeNote, key_of: KeyText, records: Sequence[Record], ends: Sequence[RecordEnd] = ()
) -> Iterator[RangeNote]:
    """Yield a note for each record that ended.

    Args:
        common: The fields that all notes share.
        key_of: Shows keys.
        records: The records that ended.
        ends: What was reported of each, if they did not end well and anything was reported.
    """
    for index, record in enumerate(records):
        ids = _ids_of(record.read_headers())
        details = dict(ends[index].details) if ends else {}
        place = ids.redrive_of or f"{record.topic}:{record.partition}:{record.offset}"
        # As in a delivery: a record without an id of its own has that of its delivery.
        correlation = ids.correlation or details.get("correlation_id", "") or f"{common.group}:{place}"
        ids = _Ids(correlation, ids.traceability or details.get("traceability_id", ""), ids.redrive_of)
        note = _note_of(common, ids, record.topic, record.partition, record.offset, key_of(record.key))
        note.timestamp = int(details.get("result_timestamp", common.timestamp))
        if ends and ends[index].error:
            note.reason = f"{common.reason}: {ends[index].error}"
        yield note


def consumed_ranges(common: RangeNote, key_of: KeyText, records: Sequence[Record]) -> list[RangeNote]:
    """Return one note for the delivered records of each partition; arguments as of `consumed_notes`."""
    if len(records) == 1:
        return list(consumed_notes(common, key_of, records))
    offsets: dict[tuple[str, int], list[int]] = {}
    for record in records:
        offsets.setdefault((record.topic, record.partition), []).append(record.offset)
    return _ranges(common, offsets, (record.read_headers() for record in records))


def reason_of(error: HeadraceError) -> str:
    """Return an error as a note shows it."""
    return f"{error.code} {error.message}: {error.description}"


def _ranges(
    common: RangeNote, offsets: dict[tuple[str, int], list[int]], headers: Iterable[list[Header] | None]
) -> list[RangeNote]:
    """Return a note for each partition; it has a correlation id if all records of the request have the same."""
    shared = _shared_correlation(headers)
    return [
        replace(
            common,
            id=new_correlation_id().decode(),
            topic=topic,
            partition=partition,
            offset=min(found),
            last_offset=max(found),
            count=len(found),
            correlation_id=shared,
        )
        for (topic, partition), found in offsets.items()
    ]


def _shared_correlation(all_headers: Iterable[list[Header] | None]) -> str:
    shared = b""
    for headers in all_headers:
        own = next((value for name, value in headers or () if name == _CORRELATION), None)
        if not own or (shared and own != shared):
            return ""
        shared = own
    return _text(shared)


def _note_of(common: RangeNote, ids: _Ids, topic: str, partition: int, offset: int, key: str | None) -> RangeNote:
    identity = new_correlation_id().decode()
    return replace(
        common,
        id=identity,
        topic=topic,
        partition=partition,
        offset=offset,
        key=key,
        correlation_id=ids.correlation or identity,
        traceability_id=ids.traceability,
        redrive_of=ids.redrive_of,
    )


def _ids_of(headers: Sequence[Header] | None) -> _Ids:
    """Return correlation id, traceability id and first position of a record; each empty where no header has it."""
    if not headers:
        return _NO_IDS
    found = {name: value for name, value in headers if name in _ID_HEADERS}
    return _Ids(*(_text(found.get(name) or b"") for name in _ID_HEADERS))


_ID_HEADERS: Final = (_CORRELATION, _TRACEABILITY, _REDRIVE_OF)
_NO_IDS: Final = _Ids()


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
