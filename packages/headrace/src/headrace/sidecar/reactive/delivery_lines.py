"""The header lines of deliveries. With one record per request they hold everything but its value.

Source: W3C Trace Context; light-4j (the names of the id headers).
"""

import base64
import json
import re
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import quote

from headrace.delivery.outcomes import REPLAY, Delivery
from headrace.records import CORRELATION_ID, TRACEABILITY_ID, Header, RecordBatch
from headrace.runtime.telemetry import tracing
from headrace.runtime.telemetry.tracing import current_span
from headrace.sidecar.record_json import delivery_id

Line = tuple[str, str]
"""Name and value of a header."""

_MOST_TEMPLATES: Final = 10_000
_MARKS: Final = {'"identity"': b"%b", '"offset"': b"%d", '"timestamp"': b"%d", '"key"': b"%b"}
"""What a template has in place of values, and how it is filled; no other value has quotes, see `safe`."""
_IDENTITY, _OFFSET, _TIMESTAMP, _KEY = _MARKS
_PLAIN: Final = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")
_IS_SAFE: Final = re.compile(r"[!#$&-~]*")
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_TRACE_STATE: Final = re.compile(rb"[ -~]{1,512}")


class DeliveryLines:
    """Makes the header lines of deliveries; what most records of a partition share is in a template."""

    def __init__(self, lines_of: Callable[[Sequence[Line]], bytes]) -> None:
        """Prepare; `lines_of` returns headers as the lines of a request."""
        self._lines_of = lines_of
        self._templates: dict[tuple[object, ...], bytes] = {}

    def of_array(self, delivery: Delivery) -> bytes:
        """Return the lines of a request whose body is a JSON array of records."""
        return self._lines_of(_traced([("Content-Type", "application/json"), *_replay(delivery)]))

    def of_record(
        self,
        delivery: Delivery,
        records: RecordBatch,
        key: str | None,
        content_type: str = "",
        more: Sequence[Line] = (),
    ) -> bytes:
        """Return the lines of a request with one record: identity, position, key, headers, trace, and `more`."""
        offset, timestamp_ms, _, value, own, _ = records.row
        # What most records share.
        group, partition, epoch, _, attempt, replay = delivery
        name = group, partition, epoch, attempt, replay, content_type, key is None, not own
        template = self._templates.get(name) or self._make(name, delivery, content_type)
        identity = safe(delivery_id(delivery, offset, own)) if own else ""
        values = (offset,) if key is None else (safe(key).encode(), offset)
        first = identity.encode() if own else offset
        lines = template % (first, offset, timestamp_ms, *(values[:-1] if own else values))
        # What only some have.
        others = list(more)
        if value is None:
            others.append(("X-Headrace-Tombstone", "true"))
        if own:
            others += _own_lines(own, identity)
        return lines + self._lines_of(_traced(others)) if others or tracing.tracer else lines

    def _make(self, name: tuple[object, ...], delivery: Delivery, content_type: str) -> bytes:
        *_, has_no_key, has_no_headers = name
        identity = safe(delivery_id(delivery, "", ())) + _OFFSET if has_no_headers else _IDENTITY
        text = self._lines_of(
            [
                *([("Content-Type", content_type)] if content_type else ()),
                ("Idempotency-Key", identity),
                ("X-Headrace-Attempt", str(delivery.attempt)),
                *([("X-Headrace-Epoch", str(delivery.epoch))] if delivery.epoch else ()),
                ("X-Headrace-Topic", delivery.partition.topic),
                ("X-Headrace-Partition", str(delivery.partition.partition)),
                ("X-Headrace-Offset", _OFFSET),
                ("X-Headrace-Timestamp", _TIMESTAMP),
                *_replay(delivery),
                *(() if has_no_key else [("X-Headrace-Key", _KEY)]),
                *([(CORRELATION_ID, identity)] if has_no_headers else ()),
            ]
        )
        text = text.replace(b"%", b"%%")
        for mark, slot in _MARKS.items():
            text = text.replace(mark.encode(), slot)
        if len(self._templates) >= _MOST_TEMPLATES:
            self._templates.clear()
        self._templates[name] = text
        return text


def _replay(delivery: Delivery) -> list[Line]:
    """Return the headers that distinguish a delivery of a replay from one of the group."""
    return [(REPLAY, delivery.replay)] if delivery.replay else []


def _own_lines(own: Sequence[Header], identity: str) -> list[Line]:
    """Return the headers of a request that hold the headers of its record."""
    values = {name.lower(): data for name, data in own if data}
    lines = [
        ("X-Headrace-Headers", headers_text(own)),
        (CORRELATION_ID, safe(values.get(CORRELATION_ID.lower(), b"")) or identity),
    ]
    if traceability := values.get(TRACEABILITY_ID.lower()):
        lines.append((TRACEABILITY_ID, safe(traceability)))
    return lines + list(trace_of(values).items())


def _traced(lines: Sequence[Line]) -> Sequence[Line]:
    """Return headers with the trace of the present span, if there is one."""
    span = current_span.get() if tracing.tracer else None
    return [*tracing.tracer.without(lines), *span.headers()] if tracing.tracer and span else lines


def safe(text: str | bytes) -> str:
    """Return text as a header's value: `"`, `%` and what is not visible ASCII are percent-encoded.

    Source: CloudEvents HTTP binding 1.0.2, 3.1.3.2.
    """
    return text if isinstance(text, str) and _IS_SAFE.fullmatch(text) else quote(text, _PLAIN)


def headers_text(headers: Sequence[Header]) -> str:
    """Return record headers as ASCII: a JSON array of [name, base64 or null] in their order."""
    pairs = [(name, None if data is None else base64.b64encode(data).decode()) for name, data in headers]
    return json.dumps(pairs, separators=(",", ":"))


def trace_of(found: dict[str, bytes]) -> dict[str, str]:
    """Return `traceparent` and `tracestate` of a record's headers (by lower-case name), if they are valid."""
    parent, state = found.get("traceparent", b""), found.get("tracestate", b"")
    if not _TRACE_PARENT.fullmatch(parent):
        return {}
    trace = {"traceparent": parent.decode()}
    return {**trace, "tracestate": state.decode()} if _TRACE_STATE.fullmatch(state) else trace
