"""Which dead letters are completed: sent back, dropped, moved to quarantine, or delivered again.

A compacted topic holds one bit per dead letter, in a record per block of offsets, under the id of the dead letter
topic. So dead letters may complete in any order, and a topic that is deleted and created again starts with none.
Retention removes no bit.

A writer that was suspended while another took over writes an outdated block. So a block is the union of all its
records. Compaction keeps the last one, and waits long enough for the next writer to merge them.
"""

import contextlib
import zlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Final

from headrace.delivery.dead_letter import write_all
from headrace.errors import LeaseTaken, TopicNotFound
from headrace.kafka import Admin, InternalTopic, Lease, read_back
from headrace.records import Header, Offsets, OutgoingRecord, Produce
from headrace.runtime import Clock

COMPLETED_TOPIC: Final = "_headrace-redriven"
BLOCK_OFFSETS: Final = 8192
_BLOCK_BYTES: Final = BLOCK_OFFSETS // 8
_MOST_DIGITS: Final = 40
_LEASE_SECONDS: Final = 20.0
"""How long to wait for the lease of a run that was killed."""
_CONFIGS: Final = {"cleanup.policy": "compact", "min.compaction.lag.ms": "86400000", "segment.bytes": "16777216"}
"""A day for the next writer. Small segments, because the last one is never compacted and every reader reads it."""
NOTHING_COMPLETED: Final = OutgoingRecord(COMPLETED_TOPIC, b"session", None, None, 0)
"""A record that changes nothing, and proves that the topic can be written."""


def lease_name(topic: str) -> str:
    """Return the name of the lease that a writer of a topic's blocks holds: they have one writer at a time."""
    return f"redrive.{topic}"


class CompletedOffsets:
    """The completed dead letters of one topic: those that were loaded, and those completed since."""

    def __init__(self, admin: Admin, topic: str) -> None:
        self._admin, self._topic = admin, topic
        self.topic_id = ""
        """Id of the topic when it was loaded; empty before that, and if the topic does not exist."""
        self._blocks: dict[tuple[int, int], bytearray] = {}

    async def prepare(self, produce: Produce | None) -> None:
        """Create the topic that holds the bits if it is missing, and write to it before any dead letter is sent.

        Otherwise a run that can send dead letters but cannot save that would send them again and again.

        Args:
            produce: Writes records; None if the caller writes `NOTHING_COMPLETED` itself.

        Raises:
            TopicNotFound: `kafka.create_topics` does not allow creating it.
            DeadLetterFailed: It cannot be written.
        """
        await InternalTopic(COMPLETED_TOPIC, self._topic, _CONFIGS).ensure(self._admin)
        if produce:
            await write_all(produce, [NOTHING_COMPLETED], "completed dead letters")

    async def load(self, *, settled: bool = False) -> None:
        """Read all bits again. With `settled`, first wait until Kafka has aborted transactions of a lost process.

        Raises:
            TopicNotFound: The dead letter topic does not exist.
        """
        await _load(self._admin, {self._topic: self}, settled)
        if not self.topic_id:
            raise TopicNotFound(f"topic {self._topic} does not exist: check its spelling", topic=self._topic)

    def begin(self, topic_id: str) -> None:
        """Discard all bits; from now on those of this id are accepted."""
        self.topic_id = topic_id
        self._blocks.clear()

    def is_completed(self, partition: int, offset: int) -> bool:
        block = self._blocks.get((partition, offset // BLOCK_OFFSETS))
        return block is not None and bool(block[offset % BLOCK_OFFSETS >> 3] & 1 << (offset & 7))

    def completed_count(self, partition: int, start: int, end: int) -> int:
        """Return how many offsets from `start` to before `end` are completed."""
        count = 0
        for number in range(start // BLOCK_OFFSETS, -(-end // BLOCK_OFFSETS)):
            if block := self._blocks.get((partition, number)):
                first = number * BLOCK_OFFSETS
                low, high = max(start - first, 0), min(end - first, BLOCK_OFFSETS)
                bits = int.from_bytes(block, "little") >> low
                count += (bits & (1 << max(high - low, 0)) - 1).bit_count()
        return count

    def first_left(self, partition: int, start: int, end: int) -> int:
        """Return the first offset from `start` to before `end` that is not completed; `end` if all are."""
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
        self, completed: Mapping[int, Iterable[int]], headers: Sequence[Header] | None = None
    ) -> list[OutgoingRecord]:
        """Set the bits of dead letters, and return the records that hold them.

        They count as completed from now on. If the records cannot be written, load again.
        """
        by_block: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        for partition, offsets in completed.items():
            for offset in offsets:
                by_block[partition, offset // BLOCK_OFFSETS].append(offset % BLOCK_OFFSETS)
        records = []
        for key, bits in sorted(by_block.items()):
            block = self._blocks.setdefault(key, bytearray(_BLOCK_BYTES))
            for bit in bits:
                block[bit >> 3] |= 1 << (bit & 7)
            value = zlib.compress(block, 1)
            records.append(OutgoingRecord(COMPLETED_TOPIC, self._key(*key), value, list(headers or ()), 0))
        return records

    async def save(
        self, produce: Produce, completed: Mapping[int, Iterable[int]], headers: Sequence[Header] | None = None
    ) -> None:
        """Write that dead letters are completed, and wait for the acknowledgement.

        Raises:
            DeadLetterFailed: It could not be written.
        """
        if records := self.records_for(completed, headers):
            await write_all(produce, records, "completed dead letters")

    def tombstones_for_expired(self, starts: Offsets) -> list[OutgoingRecord]:
        """Return the records that remove blocks of dead letters below the start of the log."""
        firsts = {partition.partition: first for partition, first in starts.items()}
        return [
            OutgoingRecord(COMPLETED_TOPIC, self._key(partition, number), None, None, 0)
            for partition, number in self._blocks
            if (number + 1) * BLOCK_OFFSETS <= firsts.get(partition, 0)
        ]

    def take(self, position: str, value: bytes | None) -> None:
        """Take one record of the topic that holds the bits, of this topic's id."""
        partition, _, number = position.partition(":")
        if not partition.isdecimal() or not number.isdecimal() or len(position) > _MOST_DIGITS:
            return
        if value is None:
            self._blocks.pop((int(partition), int(number)), None)
            return
        try:
            block = zlib.decompressobj().decompress(value, _BLOCK_BYTES + 1)
        except zlib.error:
            return  # not written by Headrace: its dead letters stay left, and are sent once more
        if len(block) == _BLOCK_BYTES:
            known = self._blocks.setdefault((int(partition), int(number)), bytearray(_BLOCK_BYTES))
            both = int.from_bytes(known, "little") | int.from_bytes(block, "little")
            known[:] = both.to_bytes(_BLOCK_BYTES, "little")

    def _key(self, partition: int, number: int) -> bytes:
        return f"{self.topic_id}:{partition}:{number}".encode()


def lease_taken(topic: str, holder: str) -> LeaseTaken:
    """Return the error for a topic that another run holds."""
    return LeaseTaken(f"{holder} is already working on {topic}: send the request again when it is done", topic=topic)


@contextlib.asynccontextmanager
async def dead_letter_lease(admin: Admin, topic: str, clock: Clock) -> AsyncGenerator[Lease, None]:
    """Hold the lease of a dead letter topic; no other process completes dead letters of it meanwhile.

    Raises:
        LeaseTaken: Another run holds it.
        KafkaUnavailable: Kafka does not respond.
    """
    lease = Lease(admin.config, admin, lease_name(topic), clock, source=topic)
    if not await lease.acquire(_LEASE_SECONDS):
        raise lease_taken(topic, lease.holder)
    try:
        yield lease
    finally:
        await lease.release()


async def load_completed(admin: Admin, topics: Iterable[str]) -> dict[str, CompletedOffsets]:
    """Return the completed dead letters of several topics, read in one pass; none for a topic that does not exist."""
    completed = {topic: CompletedOffsets(admin, topic) for topic in topics}
    await _load(admin, completed)
    return completed


async def _load(admin: Admin, completed: Mapping[str, CompletedOffsets], settled: bool = False) -> None:
    ids = await admin.topic_ids(completed, "Read")
    for topic, of_topic in completed.items():
        of_topic.begin(ids.get(topic, ""))
    if not ids or not await admin.has_topic(COMPLETED_TOPIC):
        return
    by_id = {ids[topic]: of_topic for topic, of_topic in completed.items() if topic in ids}
    async for batch in read_back(admin, InternalTopic(COMPLETED_TOPIC), settled=settled):
        for record in batch:
            topic_id, _, position = (record.key or b"").decode(errors="replace").partition(":")
            if (taking := by_id.get(topic_id)) is not None:
                taking.take(position, record.value)
