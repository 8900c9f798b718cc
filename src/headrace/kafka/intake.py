"""What a poll brought: records, handed over to the loop by partition, and what the client says in between.

For the thread that owns the consumer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import confluent_kafka

from headrace.kafka.error_map import to_error
from headrace.kafka.flow import Flow
from headrace.kafka.listener import Listener
from headrace.kafka.loop_side import LoopSide
from headrace.kafka.placement import Placement
from headrace.kafka.reader import to_record
from headrace.lifecycle import Clock
from headrace.lifecycle.failpoints import reach
from headrace.records import Record, TopicPartition

log = logging.getLogger(__name__)

_END = confluent_kafka.KafkaError._PARTITION_EOF
_OUT_OF_RANGE = confluent_kafka.KafkaError._AUTO_OFFSET_RESET
_BROKEN = (
    confluent_kafka.KafkaError._BAD_MSG,
    confluent_kafka.KafkaError._BAD_COMPRESSION,
    confluent_kafka.KafkaError._NOT_IMPLEMENTED,
    confluent_kafka.KafkaError.INVALID_MSG,
)
"""A batch whose checksum, compression or format is wrong. The client would go on behind it, and not always rightly."""
_OF_A_PLACE = (_END, _OUT_OF_RANGE, *_BROKEN)
_FENCED = (confluent_kafka.KafkaError._FATAL, confluent_kafka.KafkaError._FENCED)


class Intake:
    """Sorts out what was polled, for one consumer."""

    def __init__(
        self,
        group: str,
        listener: Listener,
        loop: LoopSide,
        flow: Flow,
        placement: Placement,
        epoch_of: Mapping[TopicPartition, int],
        clock: Clock,
        say: Callable[[str, str], None],
    ) -> None:
        """Prepare; everything is the consumer's, as it changes."""
        self._group = group
        self._listener = listener
        self._loop = loop
        self._flow = flow
        self._placement = placement
        self._epoch_of = epoch_of
        self._clock = clock
        self._say = say

    def take(self, client: Any, items: list[Any]) -> None:
        """Hand over records, and tell of what else came."""
        batches: dict[TopicPartition, list[Record]] = {}
        batch: list[Record] = []
        topic, partition = "", -1
        for item in items:
            if item.error() is not None:
                self._flush(batches)
                self._on_event(client, item)
                partition = -1
                continue
            record = to_record(item)
            # Neighbours come from one partition mostly, so the look-up is rare.
            if record.partition != partition or record.topic != topic:
                topic, partition = record.topic, record.partition
                batch = batches.setdefault(TopicPartition(topic, partition), [])
            batch.append(record)
        self._flush(batches)

    def _flush(self, batches: dict[TopicPartition, list[Record]]) -> None:
        if batches:
            self._say("", "")
        for partition, records in batches.items():
            epoch = self._epoch_of.get(partition)
            if epoch is None or self._placement.is_open(partition):
                continue  # revoked inside this very poll, or behind what cannot be read
            size = sum([record.size_bytes for record in records])
            self._flow.taken(partition, len(records), size, self._clock.monotonic())
            self._placement.read_to({partition: records[-1].offset + 1})
            reach("hand-over.before")
            self._loop.post(self._listener.on_records, partition, epoch, records)
            reach("hand-over.after")
        batches.clear()

    def _on_event(self, client: Any, item: Any) -> None:
        error, code = item.error(), item.error().code()
        partition = TopicPartition(item.topic() or "", item.partition() if item.partition() is not None else -1)
        if code in _OF_A_PLACE and self._placement.is_open(partition):
            return  # behind what cannot be read, where the client may not go on
        if code == _END:
            if epoch := self._epoch_of.get(partition):
                self._loop.post(self._listener.on_end, partition, epoch, item.offset())
        elif code == _OUT_OF_RANGE:
            log.warning("group %s, %s: %s", self._group, partition, error.str())
            self._placement.out_of_range(partition, item.offset())
        elif code in _BROKEN and partition in self._epoch_of:
            self._placement.out_of_range(partition, item.offset())  # so it is fetched again, from here
            client.pause([confluent_kafka.TopicPartition(*partition)])
            self._say(str(partition), f"{partition}: {error.str()}; nothing behind it is read until that can be read")
        elif code in _FENCED:
            raise to_error(error, f"group {self._group}")
        else:
            self._say("", f"group {self._group}: {error.str()}")
