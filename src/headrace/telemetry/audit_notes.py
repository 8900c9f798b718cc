"""What a note of the audit looks like, and making the notes of many records at once.

The notes of one batch differ in a few places only, so what they share is written once as JSON and the rest is put
behind it: noting a record must cost a part of what carrying it costs. Source: sidecar.md 9.1.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from headrace.errors import FatalKafkaError, HeadraceError, KafkaTimeout
from headrace.records import Header, OutgoingRecord, Produced, Record
from headrace.telemetry.correlation import new_correlation_ids

Line = tuple[bytes, bytes]
"""A note as it is written: its correlation id, and its JSON text."""

_CORRELATION: Final = "X-Correlation-Id"
_TRACEABILITY: Final = "X-Traceability-Id"
_REDRIVE_OF: Final = "headrace.redrive.of"
_UNKNOWN: Final = (KafkaTimeout, FatalKafkaError)
_encode_json = msgspec.json.Encoder().encode


class AuditNote(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True, gc=False):
    """One line of the audit, in the original's words; what says nothing is left out."""

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


class Said(Protocol):
    """What was said of a record that did not end well."""

    @property
    def error(self) -> str:
        """Class of the failure."""

    @property
    def details(self) -> tuple[tuple[str, str], ...]:
        """What else the destination said of the record, by name."""


class Consumption(NamedTuple):
    """Whose records ended."""

    audit_type: str
    """`REACTIVE_CONSUMER` or `STREAMING_CONSUMER`."""
    group: str
    replay: str = ""
    """Id of the job that delivered them once more."""


class Reported(NamedTuple):
    """What a client says of a record that it fetched."""

    topic: str
    partition: int
    offset: int
    processed: bool
    key: str | None
    correlation_id: str
    traceability_id: str
    timestamp: int | None


def shown_key(how: str) -> Callable[[bytes | None], str | None]:
    """Return what shows a record's key in the way that `audit.keys` says."""
    if how == "none":
        return lambda key: None
    if how == "text":
        return lambda key: None if key is None else _text(key)
    return lambda key: None if key is None else hashlib.sha256(key).hexdigest()[:32]


def production_lines(
    shared: AuditNote,
    key_of: Callable[[bytes | None], str | None],
    records: Sequence[OutgoingRecord],
    results: Sequence[Produced | HeadraceError],
    failed_only: bool,
) -> Iterator[Line]:
    """Yield the notes of records that were written, or not.

    Args:
        shared: What the notes of these records have in common, as of a success.
        key_of: What `shown_key` returns.
        records: What was to be written.
        results: One per record.
        failed_only: Whether what was written is left out.
    """
    heads: dict[str, bytes] = {}
    for identity, record, result in zip(new_correlation_ids(len(records)), records, results, strict=True):
        correlation, trace, _ = _ids_of(record.headers)
        if isinstance(result, HeadraceError):
            unknown = isinstance(result, _UNKNOWN)
            yield msgspec.structs.replace(
                shared,
                id=identity.decode(),
                audit_status="UNKNOWN" if unknown else "FAILURE",
                topic=record.topic,
                partition=record.partition or 0,
                offset=0,
                key=key_of(record.key),
                correlation_id=_text(correlation or identity),
                traceability_id=_text(trace),
                stacktrace=reason_of(result),
            ).line
        elif not failed_only:
            head = heads.get(record.topic) or heads.setdefault(record.topic, _head(shared, record.topic))
            correlation = correlation or identity
            tail = b"" if record.key is None and not trace else _tail(key_of(record.key), trace, b"")
            yield correlation, _LINE % (head, result.partition, result.offset, _json(correlation), identity, tail)


def consumption_lines(
    shared: AuditNote,
    key_of: Callable[[bytes | None], str | None],
    whose: Consumption,
    records: Sequence[Record],
    outcomes: Sequence[Said],
) -> Iterator[Line]:
    """Yield the notes of records that ended.

    Args:
        shared: What the notes of these records have in common.
        key_of: What `shown_key` returns.
        whose: Who consumed them.
        records: What ended.
        outcomes: What was said of each, if anything was.
    """
    topic, partition, head, start, delivery = "", -1, b"", b"", b""
    for index, (identity, record) in enumerate(zip(new_correlation_ids(len(records)), records, strict=True)):
        headers, offset = record.read_headers(), record.offset
        if shared.audit_status != "SUCCESS":
            yield _failure(shared, key_of, identity, record, outcomes[index] if outcomes else None)
            continue
        if record.partition != partition or record.topic != topic:
            topic, partition = record.topic, record.partition
            # As in a delivery: without an id of its own, the record's is that of its delivery.
            delivery = f"{whose.group}:{topic}:{partition}:".encode()
            head = _head(shared, topic)
            start = b'%b"partition":%d,"correlationId":%b' % (head, partition, _json(delivery)[:-1])
        if headers:
            correlation, trace, redrive_of = _ids_of(headers)
            correlation = correlation or _delivery_id(whose.group, record, redrive_of)
            tail = _tail(key_of(record.key), trace, redrive_of)
            yield correlation, _LINE % (head, partition, offset, _json(correlation), identity, tail)
        else:
            tail = b"" if record.key is None else _tail(key_of(record.key), b"", b"")
            yield b"%b%d" % (delivery, offset), _BARE % (start, offset, offset, identity, tail)


def _failure(
    shared: AuditNote,
    key_of: Callable[[bytes | None], str | None],
    identity: bytes,
    record: Record,
    outcome: Said | None,
) -> Line:
    correlation, trace, redrive_of = _ids_of(record.read_headers())
    said = dict(outcome.details if outcome else ())
    why = f": {outcome.error}" if outcome and outcome.error else ""
    given = correlation or said.get("correlation_id", "").encode()
    return msgspec.structs.replace(
        shared,
        id=identity.decode(),
        timestamp=int(said.get("result_timestamp", shared.timestamp)),
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=key_of(record.key),
        correlation_id=_text(given or _delivery_id(shared.group, record, redrive_of)),
        traceability_id=_text(trace) or said.get("traceability_id", ""),
        redrive_of=_text(redrive_of),
        reason=f"{shared.reason}{why}",
    ).line


def reason_of(error: HeadraceError) -> str:
    """Return an error as a note tells it."""
    return f"{error.code} {error.message}: {error.description}"


_BARE: Final = b'%b%d","offset":%d,"id":"%b"%b}'
_LINE: Final = b'%b"partition":%d,"offset":%d,"correlationId":%b,"id":"%b"%b}'


def _head(shared: AuditNote, topic: str) -> bytes:
    """Return the beginning of every note of a topic, up to the comma behind what they share."""
    return _encode_json(msgspec.structs.replace(shared, topic=topic))[:-1] + b","


def _tail(key: str | None, trace: bytes, redrive_of: bytes) -> bytes:
    text = b"" if key is None else b',"key":' + _encode_json(key)
    if trace:
        text += b',"traceabilityId":' + _json(trace)
    return text + b',"redriveOf":' + _json(redrive_of) if redrive_of else text


def _delivery_id(group: str, record: Record, redrive_of: bytes) -> bytes:
    if redrive_of:
        return group.encode() + b":" + redrive_of
    return f"{group}:{record.topic}:{record.partition}:{record.offset}".encode()


def _ids_of(headers: Sequence[Header] | None) -> tuple[bytes, bytes, bytes]:
    """Return correlation id, traceability id and first place, each empty where no header says it."""
    correlation = trace = place = b""
    for name, value in headers or ():
        if name == _CORRELATION:
            correlation = value or b""
        elif name == _TRACEABILITY:
            trace = value or b""
        elif name == _REDRIVE_OF:
            place = value or b""
    return correlation, trace, place


def _json(data: bytes) -> bytes:
    return _encode_json(_text(data))


def _text(data: bytes) -> str:
    return data.decode(errors="replace")
