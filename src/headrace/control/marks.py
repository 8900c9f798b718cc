"""Which dead letters have ended: gone back, dropped, or moved to quarantine.

A compacted topic says it in bits, a record for each block of offsets, under the topic's id: so letters may end in any
order, nobody reads them to know, and a topic that is made anew begins anew. No retention forgets a mark. A writer that
slept while another took over writes a block as it knew it, so a block is what all its records say together; compaction
keeps the last one, and waits long enough for the next writer to put them into one.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from headrace.config.kafka import KafkaConfig
from headrace.control.topics import read_window
from headrace.errors import TopicNotFound
from headrace.kafka import Admin, InternalTopic
from headrace.records import Header, OutgoingRecord, TopicPartition

MARKS_TOPIC: Final = "_headrace-redriven"
BLOCK_OFFSETS: Final = 8192
_BLOCK_BYTES: Final = BLOCK_OFFSETS // 8
_CONFIGS: Final = {"cleanup.policy": "compact", "min.compaction.lag.ms": "86400000", "segment.bytes": "16777216"}
"""A day for the next writer; and small segments, because the last one is never compacted, and every reader reads it."""
_PLACE: Final = TopicPartition(MARKS_TOPIC, 0)


class Marks:
    """The marks of one dead letter topic, as they are when loaded and with what was marked since."""

    def __init__(self, kafka: KafkaConfig, admin: Admin, topic: str) -> None:
        self._kafka = kafka
        self._admin = admin
        self._topic = topic
        self._id = ""
        self._blocks: dict[tuple[int, int], bytearray] = {}

    async def prepare(self) -> None:
        """Make the topic of the marks if there is none.

        Raises:
            TopicNotFound: It may not be made here (`kafka.create_topics`).
        """
        await InternalTopic(MARKS_TOPIC, self._topic, _CONFIGS).ensure(self._admin)

    async def load(self, *, settled: bool = False) -> None:
        """Read the marks anew.

        Args:
            settled: Wait for transactions that a lost process left open, until Kafka has ended them.

        Raises:
            TopicNotFound: The dead letter topic does not exist.
        """
        await _load(self._kafka, self._admin, {self._topic: self}, settled)
        if not self._id:
            raise TopicNotFound(f"topic {self._topic} does not exist: check its spelling", topic=self._topic)

    def begin(self, topic_id: str) -> None:
        """Forget all marks; from now on those of this id are taken."""
        self._id = topic_id
        self._blocks.clear()

    def is_ended(self, partition: int, offset: int) -> bool:
        """Return whether a letter has ended."""
        block = self._blocks.get((partition, offset // BLOCK_OFFSETS))
        return block is not None and bool(block[offset % BLOCK_OFFSETS >> 3] & 1 << (offset & 7))

    def ended_count(self, partition: int, start: int, end: int) -> int:
        """Return how many offsets from `start` to before `end` have ended."""
        count = 0
        for number in range(start // BLOCK_OFFSETS, -(-end // BLOCK_OFFSETS)):
            if block := self._blocks.get((partition, number)):
                first = number * BLOCK_OFFSETS
                low, high = max(start - first, 0), min(end - first, BLOCK_OFFSETS)
                bits = int.from_bytes(block, "little") >> low
                count += (bits & (1 << max(high - low, 0)) - 1).bit_count()
        return count

    def first_left(self, partition: int, start: int, end: int) -> int:
        """Return the first offset from `start` to before `end` that has not ended; `end` if all have."""
        while start < end:
            block = self._blocks.get((partition, start // BLOCK_OFFSETS))
            if block is None:
                return start
            left = ~int.from_bytes(block, "little") >> start % BLOCK_OFFSETS
            gap = (left & -left).bit_length() - 1
            if gap < BLOCK_OFFSETS - start % BLOCK_OFFSETS:
                return min(start + gap, end)
            start += BLOCK_OFFSETS - start % BLOCK_OFFSETS
        return end

    def records_for(
        self, partition: int, offsets: Iterable[int], headers: Sequence[Header] | None = None
    ) -> list[OutgoingRecord]:
        """Mark letters as ended and return the records that say so.

        They count as ended from now on. If the records cannot be written, load again.

        Args:
            partition: Of the dead letter topic.
            offsets: The letters.
            headers: Who ended them and why, for people who read the topic.
        """
        by_block: defaultdict[int, list[int]] = defaultdict(list)
        for offset in offsets:
            by_block[offset // BLOCK_OFFSETS].append(offset % BLOCK_OFFSETS)
        records = []
        for number, bits in sorted(by_block.items()):
            block = self._blocks.setdefault((partition, number), bytearray(_BLOCK_BYTES))
            for bit in bits:
                block[bit >> 3] |= 1 << (bit & 7)
            value = zlib.compress(block, 1)
            records.append(OutgoingRecord(MARKS_TOPIC, self._key(partition, number), value, list(headers or ()), 0))
        return records

    def outlived(self, starts: Mapping[TopicPartition, int]) -> list[OutgoingRecord]:
        """Return the records that take back marks of letters that are no longer there: those below the log's start."""
        firsts = {place.partition: first for place, first in starts.items()}
        return [
            OutgoingRecord(MARKS_TOPIC, self._key(partition, number), None, None, 0)
            for partition, number in self._blocks
            if (number + 1) * BLOCK_OFFSETS <= firsts.get(partition, 0)
        ]

    def take(self, place: str, value: bytes | None) -> None:
        """Take one record of the marks' topic, of this topic's id."""
        partition, _, number = place.partition(":")
        if not partition.isdecimal() or not number.isdecimal():
            return
        if value is None:
            self._blocks.pop((int(partition), int(number)), None)
            return
        try:
            block = zlib.decompressobj().decompress(value, _BLOCK_BYTES + 1)
        except zlib.error:
            return  # nothing of ours: its letters count as left, and go back once more
        if len(block) == _BLOCK_BYTES:
            known = self._blocks.setdefault((int(partition), int(number)), bytearray(_BLOCK_BYTES))
            both = int.from_bytes(known, "little") | int.from_bytes(block, "little")
            known[:] = both.to_bytes(_BLOCK_BYTES, "little")

    def _key(self, partition: int, number: int) -> bytes:
        return f"{self._id}:{partition}:{number}".encode()


async def load_marks(kafka: KafkaConfig, admin: Admin, topics: Iterable[str]) -> dict[str, Marks]:
    """Return the marks of topics by one reading of all marks; a topic that does not exist has none."""
    marks = {topic: Marks(kafka, admin, topic) for topic in topics}
    await _load(kafka, admin, marks)
    return marks


async def _load(kafka: KafkaConfig, admin: Admin, marks: Mapping[str, Marks], settled: bool = False) -> None:
    ids = await admin.topic_ids(marks)
    for topic, of_topic in marks.items():
        of_topic.begin(ids.get(topic, ""))
    if not ids or not await admin.has_topic(MARKS_TOPIC):
        return
    by_id = {ids[topic]: of_topic for topic, of_topic in marks.items() if topic in ids}
    starts = await admin.start_offsets([_PLACE])
    ends = await (admin.written_offsets if settled else admin.end_offsets)([_PLACE])
    async for batch in read_window(kafka, starts, ends):
        for record in batch:
            topic_id, _, place = (record.key or b"").decode(errors="replace").partition(":")
            if (taking := by_id.get(topic_id)) is not None:
                taking.take(place, record.value)
