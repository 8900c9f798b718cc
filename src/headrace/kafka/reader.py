"""Reading a stretch of a topic without a group: nothing is joined, nothing is committed."""

from __future__ import annotations

import gc
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import confluent_kafka

from headrace.config.kafka import KafkaConfig
from headrace.kafka.error_map import to_error
from headrace.kafka.properties import client_properties
from headrace.lifecycle import run_blocking
from headrace.records import Header, Record, TopicPartition

_BATCH = 500
_WAIT_SECONDS = 0.2
_END = confluent_kafka.KafkaError._PARTITION_EOF


def to_record(taken: Any) -> Record:
    """Return our value for a client's record, which is let go: to keep it costs more than to read its headers."""
    key, value, headers = taken.key(), taken.value(), _headers_of(taken)
    return Record(
        taken.topic(),
        taken.partition(),
        taken.offset(),
        taken.timestamp()[1],
        key,
        value,
        headers.copy if headers else list,
        (len(key) if key else 0) + (len(value) if value else 0),
    )


def _headers_of(taken: Any) -> list[Header] | None:
    """Return a record's headers; a name that is not UTF-8, which the client cannot read, is U+FFFD."""
    try:
        headers: list[Header] | None = taken.headers()
    except SystemError:  # the client holds them all the same, with nothing in place of the name
        parts = [gc.get_referents(header) for header in taken.headers()]  # to look into such a one ends the process
        names = [next((part for part in pair if isinstance(part, str)), "\ufffd") for pair in parts]
        values = [next((part for part in pair if isinstance(part, bytes)), None) for pair in parts]
        headers = list(zip(names, values, strict=True))
        taken.set_headers(headers)
    return headers


async def read_records(
    kafka: KafkaConfig,
    starts: Mapping[TopicPartition, int],
    ends: Mapping[TopicPartition, int] | None = None,
) -> AsyncGenerator[list[Record], None]:
    """Read partitions from given offsets, in batches, offset order inside each partition.

    Args:
        kafka: Where.
        starts: Partition to the first own offset wanted; the set of partitions to read.
        ends: Partition to the offset to stop before; None follows the partitions for ever, and then an empty
            list is yielded whenever nothing came for a moment.

    Raises:
        KafkaError: Kafka refuses the read, or a start offset is no longer there.
    """
    open_partitions = {p for p, start in starts.items() if ends is None or start < ends[p]}
    if not open_partitions:
        return
    client = confluent_kafka.Consumer(_properties(kafka))
    try:
        client.assign([confluent_kafka.TopicPartition(p.topic, p.partition, starts[p]) for p in open_partitions])
        while open_partitions or ends is None:
            records, events = await run_blocking(_take, client)
            for event in events:
                partition = TopicPartition(event.topic(), event.partition())
                if event.error().code() != _END:
                    raise to_error(event.error(), f"read {partition}")
                # The end of what is committed: with aborted records or markers behind it, no record reaches `end`.
                if ends is not None and event.offset() >= ends[partition]:
                    open_partitions.discard(partition)
            if ends is not None:
                last = {(record.topic, record.partition): record.offset for record in records}
                ended = {partition for partition, offset in last.items() if offset >= ends[partition] - 1}  # type: ignore[index]
                if ended:
                    open_partitions -= ended
                    records = [record for record in records if record.offset < ends[record.topic_partition]]
            if records or ends is None:
                yield records
    finally:
        await run_blocking(client.close)


def _take(client: confluent_kafka.Consumer) -> tuple[list[Record], list[Any]]:
    """Return records, and what else the client says; made on the thread, because each costs time."""
    first = client.poll(_WAIT_SECONDS)
    if first is None:
        return [], []
    taken = [first, *client.consume(_BATCH - 1, 0)]
    events = [item for item in taken if item.error() is not None]
    return [to_record(item) for item in taken if item.error() is None] if events else [*map(to_record, taken)], events


def _properties(kafka: KafkaConfig) -> dict[str, Any]:
    return {
        **client_properties(kafka, "headrace-reader", consumer=True),
        "group.id": "headrace.reader",  # demanded by the client; never joined
        "enable.auto.commit": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "fetch.queue.backoff.ms": 10,
        "queued.max.messages.kbytes": 16_384,
        "error_cb": _ignore_transport,
    }


def _ignore_transport(error: confluent_kafka.KafkaError) -> None:
    """Let the client reconnect by itself; fatal and authentication errors come with the records too."""
