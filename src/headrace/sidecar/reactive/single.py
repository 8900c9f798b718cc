"""One record per request: its value is the body, and headers hold the rest, whatever its bytes are.

Source: W3C Trace Context; light-4j (the names of the id headers).
"""

import base64
import json
import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote

from headrace.delivery.outcomes import REPLAY, Delivery
from headrace.records import CORRELATION_ID, TRACEABILITY_ID, Header, Record
from headrace.sidecar.reactive.envelope import PayloadDecoder
from headrace.sidecar.record_json import delivery_id

Request = tuple[bytes, list[tuple[str, str]]]
"""Body and headers of one POST."""

_PLAIN: Final = "".join(map(chr, range(0x21, 0x7F))).replace('"', "").replace("%", "")
_IS_SAFE: Final = re.compile(r"[!#$&-~]*")
_TRACE_PARENT: Final = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]*)?")
_TRACE_STATE: Final = re.compile(rb"[ -~]{1,512}")


def single(payloads: PayloadDecoder, delivery: Delivery, records: Sequence[Record]) -> Request:
    """Return the request of mode `single`; see `delivery_headers`."""
    record = records[0]
    return payloads.body(record), [
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
    lines = [
        ("Idempotency-Key", identity),
        ("X-Headrace-Attempt", str(delivery.attempt)),
        *([("X-Headrace-Epoch", str(delivery.epoch))] if delivery.epoch else ()),
        ("X-Headrace-Topic", record.topic),
        ("X-Headrace-Partition", str(record.partition)),
        ("X-Headrace-Offset", str(record.offset)),
        ("X-Headrace-Timestamp", str(record.timestamp_ms)),
    ]
    lines += replay_header(delivery)
    if record.value is None:
        lines.append(("X-Headrace-Tombstone", "true"))
    if (key := payloads.key_text(record)) is not None:
        lines.append(("X-Headrace-Key", safe(key)))
    if not own:
        return [*lines, (CORRELATION_ID, identity)]
    found = {name.lower(): data for name, data in own if data}
    lines.append(("X-Headrace-Headers", headers_text(own)))
    lines.append((CORRELATION_ID, safe(found.get(CORRELATION_ID.lower(), b"")) or identity))
    if traceability := found.get(TRACEABILITY_ID.lower()):
        lines.append((TRACEABILITY_ID, safe(traceability)))
    return lines + list(trace_of(found).items())


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
