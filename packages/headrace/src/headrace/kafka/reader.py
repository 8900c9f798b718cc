"""Reads partitions without a group: no membership, no commits."""

import asyncio
import contextlib
import functools
import json
from bisect import bisect_left
from collections.abc import AsyncGenerator, Mapping
from typing import Any, NamedTuple

from headrace.config.kafka import KafkaConfig
from headrace.errors import InvalidRequest, KafkaTimeout, KafkaUnavailable, PartitionNotFound
from headrace.kafka.admin import Admin
from headrace.kafka.client import library
from headrace.kafka.client.access import Right
from headrace.kafka.client.credentials import ClientSecurity
from headrace.kafka.client.error_map import to_error
from headrace.kafka.client.properties import client_properties
from headrace.kafka.fetch_queue import FetchEvent, FetchQueue
from headrace.records import Offsets, Record, RecordBatch, TopicPartition
from headrace.runtime import run_blocking

_BATCH = 500
_WAIT_SECONDS = 0.2
_SILENT_SECONDS = 30.0
_LOOK_MS = 10_000
"""How often the client tells how far it has fetched: records of aborted transactions arrive, and are not returned."""
_END = library.KafkaError._PARTITION_EOF
_OF_THE_GROUP = library.KafkaError.GROUP_AUTHORIZATION_FAILED
"""The client looks up the coordinator of its group, which is not used here."""
_NO_PROPERTIES: Mapping[str, Any] = {}
_SLICE_PROPERTIES = {"queued.max.messages.kbytes": 2048, "fetch.wait.max.ms": 100}


class ReadPart(NamedTuple):
    """What one poll of a reader has received."""

    batches: list[RecordBatch]
    """In offset order inside each partition."""
    reached: dict[TopicPartition, int]
    """Partitions that were read to their end, with the offset of the next record there."""
    append_times: frozenset[TopicPartition] = frozenset()
    """Partitions whose records have the time of the broker (LogAppendTime), by the first record of each batch."""
    has_fetched: bool = False
    """Whether the client has fetched more since an earlier part, be it of aborted transactions only."""


async def read_records(
    kafka: KafkaConfig, starts: Offsets, ends: Offsets | None = None, properties: Mapping[str, Any] = _NO_PROPERTIES
) -> AsyncGenerator[list[Record], None]:
    """Read partitions from given offsets, in batches, in offset order inside each partition; before `ends`.

    Without ends, the partitions are followed; an empty list means that no record arrived for a moment.

    Raises:
        KafkaError: Kafka refuses the read, or a start offset is no longer in the log.
    """
    async with contextlib.aclosing(_read_parts(kafka, starts, ends, properties, _BATCH)) as parts:
        async for part in parts:
            records = [record for batch in part.batches for record in batch]
            if records or ends is None:
                yield records


async def _read_parts(
    kafka: KafkaConfig, starts: Offsets, ends: Offsets | None, properties: Mapping[str, Any], most_records: int
) -> AsyncGenerator[ReadPart, None]:
    """Read as `read_records`, in columns; with ends, too, a part may be empty."""
    open_partitions = {p for p, start in starts.items() if ends is None or start < ends[p]}
    if not open_partitions:
        return
    reading = read_batches(kafka, {p: starts[p] for p in open_partitions}, properties, most_records)
    async with contextlib.aclosing(reading) as parts:
        async for part in parts:
            if ends is None:
                yield part
                continue
            last = {batch.topic_partition: batch.offsets[-1] for batch in part.batches}
            completed = {partition for partition, offset in last.items() if offset >= ends[partition] - 1}
            # The last stable offset: if aborted records or markers follow, no record reaches `end`.
            completed |= {partition for partition, at in part.reached.items() if at >= ends[partition]}
            if completed:
                open_partitions -= completed
                before = [batch[: bisect_left(batch.offsets, ends[batch.topic_partition])] for batch in part.batches]
                part = part._replace(batches=[batch for batch in before if len(batch)])
            yield part
            if not open_partitions:
                return


async def read_batches(
    kafka: KafkaConfig, starts: Offsets, properties: Mapping[str, Any] = _NO_PROPERTIES, most_records: int = _BATCH
) -> AsyncGenerator[ReadPart, None]:
    """Follow partitions from given offsets; a part without batches means that no record arrived for a moment.

    Args:
        most_records: Of one part.

    Raises:
        KafkaError: Kafka refuses the read, or a start offset is no longer in the log.
    """
    next_offsets = dict(starts)
    fetched = _Fetched()
    watched = {"statistics.interval.ms": _LOOK_MS, "stats_cb": fetched.look, **properties}
    open_queue = functools.partial(_open_queue, kafka, watched, next_offsets)
    security = ClientSecurity(kafka.security, open_queue)
    queue = open_queue()
    try:
        while True:
            if (renewed := security.replacement(queue)) is not None:
                outdated = queue
                queue = renewed
                await run_blocking(outdated.close)
            batches, append_times, events = await run_blocking(poll_part, queue, most_records)
            reached: dict[TopicPartition, int] = {}
            for error, partition, offset in (event for event in events if event.error.code() != _OF_THE_GROUP):
                if error.code() != _END:
                    raise to_error(error, f"read {partition}", kafka, Right("Read", "topic", partition.topic))
                reached[partition] = offset or 0
            next_offsets.update((batch.topic_partition, batch.offsets[-1] + 1) for batch in batches)
            yield ReadPart(batches, reached, append_times, fetched.has_moved())
    finally:
        await run_blocking(queue.close)


class _Fetched:
    """How far a client has fetched, by its statistics."""

    def __init__(self) -> None:
        self._offsets: list[int] = []
        self._moved = False

    def look(self, statistics: str) -> None:
        """Take the client's statistics; on the thread that polls it."""
        topics = json.loads(statistics)["topics"].values()
        found = [partition["next_offset"] for topic in topics for partition in topic["partitions"].values()]
        self._moved, self._offsets = self._moved or found != self._offsets, found

    def has_moved(self) -> bool:
        """Return whether it has moved since the call before."""
        moved, self._moved = self._moved, False
        return moved


async def read_window(kafka: KafkaConfig, starts: Offsets, ends: Offsets) -> AsyncGenerator[list[Record], None]:
    """Read partitions from `starts` to before `ends`, in batches; see `read_records`.

    Raises:
        KafkaUnavailable: Nothing was received for 30 s before the end.
    """
    async with contextlib.aclosing(read_columns(kafka, starts, ends, _NO_PROPERTIES, _BATCH)) as reading:
        async for part in reading:
            if records := [record for batch in part.batches for record in batch]:
                yield records


async def read_columns(
    kafka: KafkaConfig, starts: Offsets, ends: Offsets | None, properties: Mapping[str, Any], most_records: int
) -> AsyncGenerator[ReadPart, None]:
    """Read as `read_window`, or follow the partitions without ends; in columns, which is the fastest way.

    Args:
        most_records: Of one part, which may be empty.

    Raises:
        KafkaError: Kafka refuses the read, or a start offset is no longer in the log.
        KafkaUnavailable: Nothing was received for 30 s before the end.
    """
    parts = _read_parts(kafka, starts, ends, properties, most_records)
    async with contextlib.aclosing(parts if ends is None else _never_silent(parts, kafka)) as reading:
        async for part in reading:
            yield part


async def _never_silent(reading: AsyncGenerator[ReadPart, None], kafka: KafkaConfig) -> AsyncGenerator[ReadPart, None]:
    async with contextlib.aclosing(reading) as reader:
        while True:
            try:
                async with asyncio.timeout(_SILENT_SECONDS):  # wait_for may lose a cancellation before Python 3.12
                    part = await anext(reader)
                    while not (part.batches or part.reached or part.has_fetched):
                        part = await anext(reader)
            except StopAsyncIteration:
                return
            except TimeoutError as cause:
                raise KafkaUnavailable(
                    f"reading stopped: no records from Kafka at {kafka.bootstrap_servers} for {_SILENT_SECONDS:g} s. "
                    "Check the brokers (headrace dev status, headrace topics describe) and start again"
                ) from cause
            yield part


async def read_slice(
    kafka: KafkaConfig,
    partition: TopicPartition,
    span: tuple[int, int],
    *,
    count: int,
    max_bytes: int,
    isolation_level: str,
    limit_seconds: float,
) -> tuple[list[Record], int]:
    """Return the first records of a range of offsets, and the offset to read next.

    Args:
        span: The first offset, and the one to stop before: the end of the partition, or less.
        max_bytes: Bytes of keys and values. A first record that is larger is returned alone.
        limit_seconds: When to return what has been received.

    Raises:
        KafkaError: Kafka refuses the read.
        KafkaTimeout: No record was received in that time.
    """
    start, end = span
    found: list[Record] = []
    size = 0
    properties = {**_SLICE_PROPERTIES, "isolation.level": isolation_level}
    reading = read_records(kafka, {partition: start}, {partition: end}, properties)
    try:
        async with asyncio.timeout(limit_seconds), contextlib.aclosing(reading) as batches:
            async for batch in batches:
                for record in batch:
                    if found and (len(found) == count or size + record.size_bytes > max_bytes):
                        return found, record.offset
                    found.append(record)
                    size += record.size_bytes
                if len(found) == count or size >= max_bytes:
                    return found, found[-1].offset + 1
    except TimeoutError as cause:
        if not found:
            text = f"no record of {partition} from offset {start} on was received within {limit_seconds:g} s"
            hint = "it may be removed or part of an aborted transaction, which isolation=read_uncommitted returns"
            raise KafkaTimeout(f"{text}: {hint}; or send this again") from cause
        return found, found[-1].offset + 1
    return found, max(start, end)


def poll_part(
    queue: FetchQueue, most_records: int
) -> tuple[list[RecordBatch], frozenset[TopicPartition], list[FetchEvent]]:
    """Return records, partitions with times of the broker, and the client's events.

    All are made on the thread, because that takes time.
    """
    parts, append_times = queue.poll(_WAIT_SECONDS, most_records)
    batches = [part for part in parts if isinstance(part, RecordBatch)]
    return batches, append_times, [part for part in parts if isinstance(part, FetchEvent)]


def _open_queue(kafka: KafkaConfig, properties: Mapping[str, Any], at: Offsets) -> FetchQueue:
    queue = FetchQueue(library.Consumer({**_properties(kafka), **properties}), kafka)
    partitions = [library.TopicPartition(*partition, offset) for partition, offset in at.items()]
    queue.client.assign(partitions)
    queue.assigned(partitions)
    return queue


def _properties(kafka: KafkaConfig) -> dict[str, Any]:
    return {
        **client_properties(kafka, "headrace-reader", consumer=True),
        "group.id": "headrace.reader",  # required by the client; never joined
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "fetch.queue.backoff.ms": 10,
        "queued.max.messages.kbytes": 16_384,
        # The client reconnects by itself; fatal and authentication errors are returned with the records too.
        "error_cb": lambda error: None,
    }


async def window(
    admin: Admin, topic: str, partition: int | None = None, offset: int | None = None
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return where reading starts and ends: the whole topic, one partition, or one partition from an offset on.

    Raises:
        TopicNotFound: The cluster does not have the topic.
        PartitionNotFound: The topic does not have the partition.
        InvalidRequest: The offset is not in the partition's log.
    """
    offsets = await admin.topic_offsets(topic, "Read")
    if partition is not None:
        chosen = TopicPartition(topic, partition)
        if chosen not in offsets:
            last = len(offsets) - 1
            raise PartitionNotFound(f"topic {topic} has no partition {partition}: it has 0 to {last}", topic=topic)
        offsets = {chosen: offsets[chosen]}
    if offset is not None:
        for found, (first, end) in offsets.items():
            if not first <= offset < end:
                content = f"it holds {first} to {end - 1}" if end > first else "it is empty"
                raise InvalidRequest(f"offset {offset} is not in {found}: {content}", topic=topic, partition=partition)
            offsets = {found: (offset, end)}
    return {p: first for p, (first, _) in offsets.items()}, {p: end for p, (_, end) in offsets.items()}
