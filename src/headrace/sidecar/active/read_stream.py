"""The records of an instance without an end: server-sent events, or a line of JSON each.

Source: WHATWG HTML, server-sent events.
"""

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec

from headrace.errors import HeadraceError, InstanceState, InvalidRequest
from headrace.http.asgi import MAX_HEAD_BYTES, STREAMING, UNREAD_SECONDS, WRITTEN, Scope, Send
from headrace.records import Committed, TopicPartition
from headrace.sidecar.active.buffer import Read, arrived
from headrace.sidecar.active.instance import ActiveInstance
from headrace.sidecar.active.partition_positions import Processed
from headrace.sidecar.active.read_entries import EntryWriter

EVENTS: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"
LAST_EVENT_ID: Final = b"last-event-id"
_HEAD: Final = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
_HEARTBEAT_SECONDS: Final = 15.0
_MOST_RECORDS: Final = 500
_MOST_ID_BYTES: Final = MAX_HEAD_BYTES * 3 // 4
"""Of an event's id, because clients send it back in the head of a request."""
_Partition = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 2)]
_Positions = dict[str, dict[int, tuple[int, str]]]
"""By topic and partition: the offset of the next record, and the assignment."""
_encode = msgspec.json.Encoder().encode


class _StreamPosition(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An offset and its assignment; a tuple in a union would crash msgspec 0.22."""

    offset: _Offset
    assignment: str = ""


_decode_positions = msgspec.json.Decoder(dict[str, dict[_Partition, _Offset | _StreamPosition]]).decode


def received_of(event_id: str) -> list[Processed]:
    """Return what a client has received that names the id of an event. An id may have offsets without assignments.

    Raises:
        InvalidRequest: It is not an id of a stream of records.
    """
    try:
        found = _decode_positions(event_id)
    except (msgspec.MsgspecError, UnicodeError) as cause:
        raise InvalidRequest(f"Last-Event-ID or ack is not the id of an event of this stream: {cause}") from cause
    return [
        Processed(TopicPartition(topic, number), Committed(position.offset), position.assignment)
        for topic, offsets in found.items()
        for number, at in offsets.items()
        for position in [at if isinstance(at, _StreamPosition) else _StreamPosition(at)]
    ]


async def stream_records(
    instance: ActiveInstance,
    entries: EntryWriter,
    scope: Scope,
    send: Send,
    *,
    events: bool,
    until: float,
    received: Sequence[Processed] = (),
    at_most_once: bool = False,
) -> None:
    """Send records as they arrive and the client takes them, until it closes the connection.

    Args:
        instance: No other read of it is served meanwhile.
        scope, send: Of the request.
        events: Whether to send server-sent events instead of lines.
        until: When the caller's credentials expire.
        received: What the client has received of the stream before.
        at_most_once: Whether what was sent counts as delivered, though it may not arrive.

    Raises:
        CommitRefused: What the client has received is of an earlier assignment.
        InstanceBusy, InstanceState: The instance is read already, reads nothing, commits by itself what may not arrive,
            or too many partitions for an id.
    """
    await instance.turn.wait_free()
    with instance.turn.stream() as token:
        await _begin(instance, received, at_most_once)
        first = f"id: {_event_id(_positions(instance))}\n\n" if events else ""  # it has no data, only an id
        scope["state"][STREAMING] = True
        head = [(b"content-type", (EVENTS if events else NDJSON).encode()), *_HEAD]
        await send({"type": "http.response.start", "status": 200, "headers": head})
        await send({"type": "http.response.body", "body": first.encode(), "more_body": True})
        while (left := until - time.time()) > 0 and not instance.membership.is_closed:
            try:
                read = await instance.read(
                    max_bytes=instance.spec.max_read_bytes,
                    max_records=_MOST_RECORDS,
                    wait_seconds=min(_HEARTBEAT_SECONDS, left),
                    stream=token,
                )
                if not await _send_read(instance, entries, read, scope, send, events, at_most_once):
                    return
            except HeadraceError as error:
                await send({"type": "http.response.body", "body": _error(error, events)})
                return
            await asyncio.sleep(0)  # a stream whose records never end must not keep the loop
        await send({"type": "http.response.body", "body": b""})


async def _begin(instance: ActiveInstance, received: Sequence[Processed], at_most_once: bool) -> None:
    if instance.membership.reads is None:
        raise InstanceState(f"instance {instance.name} reads nothing: subscribe it to topics, or assign partitions")
    if instance.spec.auto_commit_seconds and not at_most_once:
        raise InstanceState(
            f"instance {instance.name} commits by itself, also records of a stream that never arrive: send "
            "delivery=at_most_once to allow that, or create it without auto commit"
        )
    await instance.resume(received)


async def _send_read(
    instance: ActiveInstance,
    entries: EntryWriter,
    read: Read,
    scope: Scope,
    send: Send,
    events: bool,
    at_most_once: bool,
) -> bool:
    """Send the records of a read, or a heartbeat; False if the client has left before they were written."""
    try:
        # JSON may have line breaks between its tokens, and a line is an entry here.
        texts = [
            text.replace("\n", " ").replace("\r", " ") for text in await entries.write(read.records, read.assignments)
        ]
        parts = _events(instance, read, texts) if events else (f"{text}\n" for text in texts)
        body = "".join(parts).encode() or (b":\n\n" if events else b"\n")
        await send({"type": "http.response.body", "body": body, "more_body": True})
        written = scope["state"].get(WRITTEN)
        if written is not None and not await written()(UNREAD_SECONDS):
            return False
        read.end(len(texts), arrived if at_most_once else None)
        return True
    finally:
        read.end(0)


def _positions(instance: ActiveInstance) -> _Positions:
    positions: _Positions = {}
    for partition, position in instance.positions.items():
        positions.setdefault(partition.topic, {})[partition.partition] = position
    return positions


def _event_id(positions: _Positions) -> str:
    """Return the id of an event; InstanceState if it would be too long."""
    text = _encode(positions).decode()
    if len(text) > _MOST_ID_BYTES:
        raise InstanceState(
            f"the positions of {sum(map(len, positions.values()))} partitions are more than the {_MOST_ID_BYTES} bytes "
            f"of an event's id: let more instances share the partitions, or accept {NDJSON}"
        )
    return text


def _events(instance: ActiveInstance, read: Read, texts: Sequence[str]) -> Iterator[str]:
    positions = _positions(instance)
    for record, text in zip(read.records, texts, strict=True):
        position = record.offset + 1, read.assignments[record.topic_partition]
        positions.setdefault(record.topic, {})[record.partition] = position
        yield f"id: {_event_id(positions)}\ndata: {text}\n\n"


def _error(error: HeadraceError, events: bool) -> bytes:
    body = _encode(error.body())
    return b"event: error\ndata: " + body + b"\n\n" if events else body + b"\n"
