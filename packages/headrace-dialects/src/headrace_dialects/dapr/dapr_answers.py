"""What a Dapr application answers means for each record: success, another attempt, or a dead letter.

Source: Dapr's pub/sub API 1.0 (`status`, `statuses`). A word that is not known never counts as a success.
"""

from collections.abc import Sequence
from typing import Any, Final

import msgspec

from headrace.config.consumers import RetryConfig
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.records import RecordBatch
from headrace.sidecar.reactive.cloud_events import structured
from headrace.sidecar.reactive.delivery_lines import DeliveryLines
from headrace.sidecar.reactive.envelope import PayloadDecoder

_EVENT: Final = "application/cloudevents+json"
_SHOWN_CHARACTERS: Final = 60
_BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_TWO: Final = "two different statuses"
_NONE: Final = "no status"


class _Entry(msgspec.Struct, rename="camel"):
    entry_id: str
    status: Any = None


class _Statuses(msgspec.Struct):
    statuses: list[_Entry]


_FAILED: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_decode_bulk = msgspec.json.Decoder(_Statuses).decode
_encode = msgspec.json.Encoder().encode


def bulk(
    payloads: PayloadDecoder, lines: DeliveryLines, delivery: Delivery, records: RecordBatch
) -> tuple[bytes, bytes]:
    """Return body and header lines of a request of Dapr's bulk subscription."""
    events = [structured(payloads, lines, delivery, RecordBatch.of([record]))[0] for record in records]
    entries = [
        {"entryId": entry_id, "event": msgspec.Raw(event), "contentType": _EVENT, "metadata": {}}
        for entry_id, event in zip(_ids_of(records), events, strict=True)
    ]
    topic, partition = records.topic_partition
    body = {
        "id": f"{delivery.group}:{topic}:{partition}:{records.offsets[0]}",
        "entries": entries,
        "topic": topic,
        "type": "com.dapr.event.sent.bulk",
        "metadata": {},
    }
    return _encode(body), lines.of_array(delivery)


class DaprAnswers:
    """Reads the answers of one application."""

    def __init__(self, retry: RetryConfig, one_record: bool) -> None:
        self._retry = retry
        self._one_record = one_record
        self.write = None if one_record else bulk
        """Writes the request; None for that of the mode."""

    def replies(self, status: int, body: bytes, sent: RecordBatch) -> list[Reply] | None:
        """Return a reply per record; None for a response that means the same as in every other mode."""
        if status == 404 and "404" not in self._retry.statuses:
            reason = "the application answered 404, so Dapr would drop the record"
            return [Reply("HTTP 404", reason, shared=len(sent) > 1, permanent=True)] * len(sent)
        if status >= 300:
            return None
        words = [_status(body)] if self._one_record else _bulk_statuses(body, _ids_of(sent))
        return [_reply(word) for word in words]


def _ids_of(records: RecordBatch) -> Sequence[str]:
    return ["{}-{}-{}".format(*records.topic_partition, offset) for offset in records.offsets]


def _status(body: bytes) -> Any:
    """Return the status in the answer to one record."""
    text = body.strip().removeprefix(_BYTE_ORDER_MARK).lstrip()
    try:
        members = _decode(text)
    except _FAILED:  # applications also answer with any text
        return "a damaged object" if text.startswith(b"{") else "SUCCESS"
    found = [value for name, value in members.items() if name.lower() in ("status", "statuses")]
    if len({str(value) for value in found}) > 1:
        return _TWO
    return found[0] if found and found[0] not in (None, "") else "SUCCESS"


def _bulk_statuses(body: bytes, ids: Sequence[str]) -> list[Any]:
    """Return the status of each entry."""
    try:
        entries = _decode_bulk(body).statuses
    except _FAILED:
        return ["a body without statuses"] * len(ids)
    found: dict[str, Any] = {}
    for entry in entries:
        same = entry.entry_id not in found or found[entry.entry_id] == entry.status
        found[entry.entry_id] = entry.status if same else _TWO
    return [found.get(entry_id) or _NONE for entry_id in ids]


def _reply(word: Any) -> Reply:
    if word == "SUCCESS":
        return ACK
    if word == "DROP":
        return Reply("DROP", "the application answered DROP", permanent=True)
    return Reply("RETRY", f"the application answered {str(word)[:_SHOWN_CHARACTERS]}")
