"""One record per request: its value is the body, and headers hold the rest, whatever its bytes are.

Source: W3C Trace Context; light-4j (the names of the id headers).
"""

import base64
import json
import re
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import quote

from headrace.delivery.outcomes import REPLAY, Delivery
from headrace.records import CORRELATION_ID, TRACEABILITY_ID, Header, Record, RecordBatch, TopicPartition
from headrace.sidecar.reactive.envelope import PayloadDecoder
from headrace.sidecar.record_json import delivery_id

Request = tuple[bytes, list[tuple[str, str]]]
"""Body and headers of one POST."""

_MOST_TEMPLATES: Final = 10_000
_MARKS: Final = ('"offset"', '"timestamp"', '"key"')
"""What a template has in place of values; no other value has quotes, see `safe`."""
_PLAIN: Final = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")
_IS_SAFE: Final = re.compile(r"[!#$&-~]*")
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_TRACE_STATE: Final = re.compile(rb"[ -~]{1,512}")


def single(payloads: PayloadDecoder, delivery: Delivery, records: Sequence[Record]) -> Request:
    """Return the request of mode `single`; see `delivery_headers`."""
    record = records[0]
    return payloads.body(record.value), [
        ("Content-Type", payloads.content_type),
        *delivery_headers(payloads, delivery, record),
    ]


def delivery_headers(payloads: PayloadDecoder, delivery: Delivery, record: Record) -> list[tuple[str, str]]:
    """Return the headers of a request with one record: identity, topic, partition, offset, key, headers, trace.

    Raises:
        DecodeError: The key does not fit its format.
    """
    own = record.headers
    identity = safe(delivery_id(delivery, record.offset, own))
    lines = _position_headers(identity, delivery, record.topic_partition, str(record.offset), str(record.timestamp_ms))
    lines += replay_header(delivery)
    if record.value is None:
        lines.append(("X-Headrace-Tombstone", "true"))
    if (key := payloads.key_text(record.key)) is not None:
        lines.append(("X-Headrace-Key", safe(key)))
    if not own:
        return [*lines, (CORRELATION_ID, identity)]
    found = {name.lower(): data for name, data in own if data}
    lines.append(("X-Headrace-Headers", headers_text(own)))
    lines.append((CORRELATION_ID, safe(found.get(CORRELATION_ID.lower(), b"")) or identity))
    if traceability := found.get(TRACEABILITY_ID.lower()):
        lines.append((TRACEABILITY_ID, safe(traceability)))
    return lines + list(trace_of(found).items())


def _position_headers(
    identity: str, delivery: Delivery, partition: TopicPartition, offset: str, timestamp: str
) -> list[tuple[str, str]]:
    return [
        ("Idempotency-Key", identity),
        ("X-Headrace-Attempt", str(delivery.attempt)),
        *([("X-Headrace-Epoch", str(delivery.epoch))] if delivery.epoch else ()),
        ("X-Headrace-Topic", partition.topic),
        ("X-Headrace-Partition", str(partition.partition)),
        ("X-Headrace-Offset", offset),
        ("X-Headrace-Timestamp", timestamp),
    ]


class SingleHeads:
    """The heads of first deliveries of records without headers, from one template per partition and epoch."""

    def __init__(self, payloads: PayloadDecoder, start: str, lines_of: Callable[[list[tuple[str, str]]], str]) -> None:
        """Prepare; every head begins with `start`, and `lines_of` returns headers as lines."""
        self._payloads = payloads
        self._start = start
        self._lines_of = lines_of
        self._templates: dict[tuple[object, ...], str] = {}

    def request(self, delivery: Delivery, records: RecordBatch) -> tuple[bytes, bytes] | None:
        """Return head and body of the request that `single` makes; None if the record is an unusual one.

        Raises:
            DecodeError: Key or value does not fit its format.
        """
        key, value = records.keys[0], records.values[0]
        if value is None or records.headers or delivery.attempt > 1 or delivery.replay:
            return None
        payloads = self._payloads
        body = payloads.body(value)
        name = delivery.group, delivery.partition, delivery.epoch, key is None
        template = self._templates.get(name) or self._make(name, delivery)
        text = "" if key is None else safe(payloads.key_text(key) or "")
        return template.format(records.offsets[0], records.timestamps_ms[0], text, len(body)).encode(), body

    def _make(self, name: tuple[object, ...], delivery: Delivery) -> str:
        identity = safe(delivery_id(delivery, "", ())) + _MARKS[0]
        lines = [
            ("Content-Type", self._payloads.content_type),
            *_position_headers(identity, delivery, delivery.partition, _MARKS[0], _MARKS[1]),
            *([] if name[-1] else [("X-Headrace-Key", _MARKS[2])]),
            (CORRELATION_ID, identity),
        ]
        start, text = (part.replace("{", "{{").replace("}", "}}") for part in (self._start, self._lines_of(lines)))
        for number, mark in enumerate(_MARKS):
            text = text.replace(mark, f"{{{number}}}")
        if len(self._templates) >= _MOST_TEMPLATES:
            self._templates.clear()
        template = self._templates[name] = f"{start}{text}Content-Length: {{3}}\r\n\r\n"
        return template


def replay_header(delivery: Delivery) -> list[tuple[str, str]]:
    """Return the headers that distinguish a delivery of a replay from one of the group."""
    return [(REPLAY, delivery.replay)] if delivery.replay else []


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
