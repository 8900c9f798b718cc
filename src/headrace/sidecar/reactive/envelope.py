"""A delivery as the body of a request, and the answer as outcomes.

Source: sidecar.md 6.5 (record), 7.3 (request), 7.4 (answer); decisions.md 8 (identity of a delivery).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.delivery.dead_letter import REDRIVE_OF
from headrace.delivery.protocols import ACK, Delivery, Outcome, Verdict
from headrace.errors import DestinationRefused
from headrace.records import Record

_REASON_CHARACTERS = 8000


class _Result(msgspec.Struct):
    """One entry of a backend's answer; unknown fields are ignored."""

    record: dict[str, Any] | None = None
    consumer_record: dict[str, Any] | None = msgspec.field(default=None, name="consumerRecord")
    processed: bool | None = None
    key: Any = None
    stacktrace: str | None = None


_decode_results = msgspec.json.Decoder(list[_Result]).decode
_quote = json.dumps


class Envelope:
    """Writes the entries of one delivery; what is the same in all of them is made once."""

    def __init__(self, delivery: Delivery) -> None:
        partition, topic = delivery.partition.partition, _quote(delivery.partition.topic)
        self._place = f'{{"topic":{topic},"partition":{partition},"offset":'.encode()
        self._group = delivery.group
        self._id = _quote(f"{delivery.group}:{delivery.partition.topic}:{partition}:")[:-1].encode()
        self._end = f',"attempt":{delivery.attempt},"epoch":{delivery.epoch}}}'.encode()

    def entry(self, record: Record, key: bytes | None, value: bytes | None) -> bytes:
        """Return one record as an entry of the request body; `key` and `value` are JSON text."""
        headers = record.headers
        delivery_id = b'%b%d"' % (self._id, record.offset)
        head = b"{}"
        if headers:
            head = msgspec.json.encode({name: (data or b"").decode(errors="replace") for name, data in headers})
            # A redriven record is the same delivery as the first time (decisions.md 8).
            if first := dict(headers).get(REDRIVE_OF):
                delivery_id = _quote(f"{self._group}:{first.decode(errors='replace')}").encode()
        return b'%b%d,"timestamp":%d,"headers":%b%b%b,"deliveryId":%b%b' % (
            self._place,
            record.offset,
            record.timestamp_ms,
            head,
            b"" if key is None else b',"key":%b' % key,
            b"" if value is None else b',"value":%b' % value,
            delivery_id,
            self._end,
        )


def outcomes_of(answer: bytes, sent: Sequence[Record]) -> list[Outcome]:
    """Return one outcome per sent record from a backend's answer, matched by coordinates where it echoes them.

    Raises:
        DestinationRefused: The answer is not one result per record.
    """
    try:
        results = _decode_results(answer)
    except msgspec.MsgspecError as cause:
        raise DestinationRefused(
            f"the backend's answer is not a JSON array of results ({cause}): answer one object with "
            '"processed" per record, or set backend.mode: status'
        ) from cause
    if len(results) != len(sent):
        raise DestinationRefused(
            f"the backend answered {len(results)} results for {len(sent)} records: answer one per record"
        )
    in_order = _match(results, sent)
    return [_outcome(result) for result in in_order]


def _match(results: list[_Result], sent: Sequence[Record]) -> list[_Result]:
    echoed = [result.record or result.consumer_record for result in results]
    if not all(echo and "offset" in echo for echo in echoed):
        return results
    by_place = {
        (echo.get("topic"), echo.get("partition"), echo["offset"]): result
        for echo, result in zip(echoed, results, strict=True)
        if echo
    }
    try:
        return [by_place[record.topic, record.partition, record.offset] for record in sent]
    except KeyError as cause:
        raise DestinationRefused(f"the backend's answer does not echo the record at {cause.args[0]}") from cause


def _outcome(result: _Result) -> Outcome:
    if result.processed:
        return ACK
    trace = (result.stacktrace or "the backend answered processed: false")[:_REASON_CHARACTERS]
    return Outcome(Verdict.RETRY, "not processed", trace)
