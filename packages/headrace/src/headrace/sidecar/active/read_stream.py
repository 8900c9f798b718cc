"""The records of an instance as an endless stream: server-sent events, or one line of JSON per record.

Source: WHATWG HTML, server-sent events.
"""

import asyncio
import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Final

import msgspec

from headrace.errors import HeadraceError, InstanceState, InvalidRequest
from headrace.http.request import MAX_HEAD_BYTES, UNREAD_SECONDS, HttpRequest
from headrace.records import Committed, TopicPartition
from headrace.sidecar.active.instance import ActiveInstance, Read, arrived
from headrace.sidecar.active.partition_positions import Processed
from headrace.sidecar.active.read_entries import EntryWriter

EVENTS: Final = "text/event-stream"
NDJSON: Final = "application/x-ndjson"
LAST_EVENT_ID: Final = b"last-event-id"
_HEAD: Final = [(b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]
_HEARTBEAT_SECONDS: Final = 15.0
_MOST_RECORDS: Final = 500
_MOST_ID_BYTES: Final = MAX_HEAD_BYTES * 3 // 4
"""Limit of an event id, because clients send it back in the head of a request."""
_Partition = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 2)]
_Positions = dict[str, dict[int, tuple[int, str]]]
"""By topic and partition: the offset of the next record, and the assignment."""
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")
_encode = msgspec.json.Encoder().encode


class _StreamPosition(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """An offset and its assignment; a tuple in a union would crash msgspec 0.22."""

    offset: _Offset
    assignment: str = ""


_decode_positions = msgspec.json.Decoder(dict[str, dict[_Partition, _Offset | _StreamPosition]]).decode


def received_of(event_id: str) -> list[Processed]:
    """Return what the client of an event id has received. An id may have offsets without assignments.

    Raises:
        InvalidRequest: It is not the id of an event with records.
    """
    try:
        found = _decode_positions(event_id)
    except (msgspec.MsgspecError, UnicodeError) as cause:
        raise InvalidRequest(f"Last-Event-ID or ack is not a valid event id: {cause}") from cause
    return [
        Processed(TopicPartition(topic, number), Committed(position.offset), position.assignment)
        for topic, offsets in found.items()
        for number, at in offsets.items()
        for position in [at if isinstance(at, _StreamPosition) else _StreamPosition(at)]
    ]


async def stream_records(
    instance: ActiveInstance,
    entries: EntryWriter,
    request: HttpRequest,
    *,
    events: bool,
    received: Sequence[Processed] = (),
    at_most_once: bool = False,
) -> None:
    """Send records as they arrive, as fast as the client reads, until it closes the connection.

    Args:
        instance: No other read of it is served meanwhile.
        request: It is responded to.
        events: Whether to send server-sent events instead of lines.
        received: What the client has received of the previous stream.
        at_most_once: Whether records count as delivered once they are sent.

    Raises:
        CommitRefused: What the client has received is of an earlier assignment.
        InstanceBusy: Another read or stream is in progress.
        InstanceState: The instance reads nothing, has auto commit, or reads too many partitions for an event id.
    """
    await instance.turn.wait_free()
    with instance.turn.stream() as token:
        await _begin(instance, received, at_most_once)
        first = b"id: %b\n\n" % _event_id(_positions(instance)) if events else b""  # an id without data
        request.is_streaming = True
        request.response.last_bytes = functools.partial(_error, events)
        head = [(b"content-type", (EVENTS if events else NDJSON).encode()), *_HEAD]
        await request.response.start(200, head)
        await request.response.write(first)
        while not instance.membership.is_closed:
            read = await instance.read(
                max_bytes=instance.spec.max_read_bytes,
                max_records=_MOST_RECORDS,
                wait_seconds=_HEARTBEAT_SECONDS,
                stream=token,
            )
            if not await _send_read(instance, entries, read, request, events, at_most_once):
                return
            await asyncio.sleep(0)  # a busy stream must not block the loop
        await request.response.end()


async def _begin(instance: ActiveInstance, received: Sequence[Processed], at_most_once: bool) -> None:
    if instance.membership.reads is None:
        raise InstanceState(f"instance {instance.name} reads nothing; subscribe it to topics, or assign partitions")
    if instance.spec.auto_commit_seconds and not at_most_once:
        raise InstanceState(
            f"instance {instance.name} has auto commit, which also commits records of a stream that never arrive; "
            "send delivery=at_most_once to allow that, or create it without auto commit"
        )
    await instance.resume(received)


async def _send_read(
    instance: ActiveInstance, entries: EntryWriter, read: Read, request: HttpRequest, events: bool, at_most_once: bool
) -> bool:
    """Send the records of a read, or a heartbeat; return False if the client left before they were written."""
    try:
        if entries.needs_schemas:
            await entries.load(read.batches)
        written = entries.write(read.batches, read.assignments)
        # JSON may have line breaks between tokens, but here a line is an entry.
        texts = [text.translate(_ONE_LINE) for each in written for text in each.texts()]
        lines = _events(instance, read, texts) if events else (text + b"\n" for text in texts)
        body = b"".join(lines) or (b":\n\n" if events else b"\n")
        if not await request.response.write_through(body, UNREAD_SECONDS):
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


def _event_id(positions: _Positions) -> bytes:
    """Return the id of an event, or raise InstanceState if it would be too long."""
    text = _encode(positions)
    if len(text) > _MOST_ID_BYTES:
        raise InstanceState(
            f"the positions of {sum(map(len, positions.values()))} partitions exceed the {_MOST_ID_BYTES} bytes of an "
            f"event id; let more instances share the partitions, or accept {NDJSON}"
        )
    return text


def _events(instance: ActiveInstance, read: Read, texts: Sequence[bytes]) -> Iterator[bytes]:
    positions = _positions(instance)
    following = iter(texts)
    for batch in read.batches:
        topic, number = batch.topic_partition
        assignment = read.assignments[batch.topic_partition]
        for offset, text in zip(batch.offsets, following, strict=False):
            positions.setdefault(topic, {})[number] = offset + 1, assignment
            yield b"id: %b\ndata: %b\n\n" % (_event_id(positions), text)


def _error(events: bool, error: HeadraceError) -> bytes:
    body = _encode(error.body())
    return b"event: error\ndata: " + body + b"\n\n" if events else body + b"\n"
