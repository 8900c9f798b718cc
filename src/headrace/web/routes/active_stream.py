"""The records of an instance without an end: server-sent events, or a line of JSON each.

Source: WHATWG HTML, server-sent events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from headrace.errors import HeadraceError, InstanceState, InvalidRequest
from headrace.records import Record, TopicPartition
from headrace.sidecar.active.entries import EntryWriter
from headrace.sidecar.active.instance import ActiveInstance
from headrace.web.exchange import STREAMING, WRITTEN, Scope, Send

EVENTS: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"
LAST_EVENT_ID: Final = b"last-event-id"
_HEARTBEAT_SECONDS: Final = 15.0
_MOST_RECORDS: Final = 500
_Positions = dict[str, dict[int, int]]
_decode_positions = msgspec.json.Decoder(_Positions).decode
_encode = msgspec.json.Encoder().encode


def positions_of(event_id: str) -> dict[TopicPartition, int]:
    """Return the offsets that the id of an event carries: those to read next.

    Raises:
        InvalidRequest: It is not an id of a stream of records.
    """
    try:
        found = _decode_positions(event_id)
    except (msgspec.MsgspecError, UnicodeError) as cause:
        raise InvalidRequest(f"Last-Event-ID is no id of an event of this stream: {cause}") from cause
    return {TopicPartition(topic, n): offset for topic, offsets in found.items() for n, offset in offsets.items()}


async def stream_records(
    instance: ActiveInstance, entries: EntryWriter, scope: Scope, send: Send, *, events: bool, until: float
) -> None:
    """Send records as they arrive, until the client closes the connection.

    Args:
        instance: Where they are read. No other read is served meanwhile.
        entries: Writes them.
        scope: Of the request.
        send: Sends to the client. It waits while the client is slow, and partitions are paused then.
        events: Whether to send server-sent events instead of lines.
        until: When the caller's credentials expire, in seconds since the epoch.

    Raises:
        InstanceBusy: The instance is read already.
        InstanceState: It reads nothing.
    """
    with instance.stream() as token:
        if instance.reads is None:
            raise InstanceState(f"instance {instance.name} reads nothing: subscribe it to topics, or assign partitions")
        scope["state"][STREAMING] = True
        kind = EVENTS if events else NDJSON
        head = [(b"content-type", kind.encode()), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": b":\n\n" if events else b"", "more_body": True})
        written, last = scope["state"].get(WRITTEN), b""
        while (left := until - time.time()) > 0 and not instance.is_closed:
            try:
                read = await instance.read(
                    max_bytes=instance.spec.max_read_bytes,
                    max_records=_MOST_RECORDS,
                    wait_seconds=min(_HEARTBEAT_SECONDS, left),
                    stream=token,
                )
                try:
                    texts = await entries.write(read.records)
                    parts = _events(instance, read.records, texts) if events else (f"{text}\n" for text in texts)
                    body = "".join(parts).encode() or (b":\n\n" if events else b"\n")
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    if written is not None and not await written()():
                        return
                    read.end(len(texts))
                finally:
                    read.end(0)
            except HeadraceError as error:
                last = _error(error, events)
                break
            await asyncio.sleep(0)  # a stream whose records never end must not keep the loop
        await send({"type": "http.response.body", "body": last})


def _events(instance: ActiveInstance, records: Sequence[Record], texts: Sequence[str]) -> Iterator[str]:
    positions: _Positions = {}
    for partition, offset in instance.positions.items():
        positions.setdefault(partition.topic, {})[partition.partition] = offset
    for record, text in zip(records, texts, strict=True):
        positions.setdefault(record.topic, {})[record.partition] = record.offset + 1
        yield f"id: {_encode(positions).decode()}\ndata: {text}\n\n"


def _error(error: HeadraceError, events: bool) -> bytes:
    body = _encode(error.body())
    return b"event: error\ndata: " + body + b"\n\n" if events else body + b"\n"
