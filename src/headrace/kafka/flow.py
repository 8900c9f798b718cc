"""How much a consumer holds that has not ended, and which partitions are therefore paused.

Pure bookkeeping, owned by the consumer's thread. A partition is paused when it holds more than its share while the
whole is over half full, or when the whole is full; it is resumed below half of either. So one slow partition cannot
take the room of the others, and a single busy one may use most of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.config.model import FlowControl
from headrace.records import TopicPartition

_MIN_SHARE_RECORDS = 1000
_MIN_SHARE_BYTES = 1_048_576


class _Held:
    __slots__ = ("bytes", "paused", "records")

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        self.paused = False


class Flow:
    """Counts records and bytes per partition and says what to pause and resume."""

    def __init__(self, limits: FlowControl) -> None:
        self._limits = limits
        self._held: dict[TopicPartition, _Held] = {}
        self._changed = False

    @property
    def busy(self) -> bool:
        """Whether anything is held: commands from the loop are then to be expected soon."""
        return any(held.records for held in self._held.values())

    @property
    def records(self) -> int:
        """Records held in all."""
        return sum(held.records for held in self._held.values())

    @property
    def bytes(self) -> int:
        """Bytes held in all."""
        return sum(held.bytes for held in self._held.values())

    def assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Begin to count for partitions; they start resumed."""
        for partition in partitions:
            self._held[partition] = _Held()

    def revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget partitions with all they hold."""
        for partition in partitions:
            self._held.pop(partition, None)
        self._changed = True

    def taken(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        """Count what was polled."""
        if held := self._held.get(partition):
            held.records += records
            held.bytes += size_bytes
            self._changed = True

    def released(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        """Count what has ended; a partition that was revoked in between is ignored."""
        if held := self._held.get(partition):
            held.records = max(0, held.records - records)
            held.bytes = max(0, held.bytes - size_bytes)
            self._changed = True

    def changes(self) -> tuple[Sequence[TopicPartition], Sequence[TopicPartition]]:
        """Return the partitions to pause and those to resume now; each is reported once."""
        if not self._changed:
            return (), ()
        self._changed = False
        fill = max(self.records / self._limits.max_records, self.bytes / self._limits.max_bytes)
        pause, resume = [], []
        for partition, held in self._held.items():
            share = self._share_used(held)
            if not held.paused and held.records and (fill >= 1 or (fill >= 0.5 and share >= 1)):
                held.paused = True
                pause.append(partition)
            elif held.paused and fill < 1 and (fill < 0.5 or share < 0.5):
                held.paused = False
                resume.append(partition)
        return pause, resume

    def _share_used(self, held: _Held) -> float:
        count = max(1, len(self._held))
        records = max(self._limits.max_records / count, min(_MIN_SHARE_RECORDS, self._limits.max_records))
        size = max(self._limits.max_bytes / count, min(_MIN_SHARE_BYTES, self._limits.max_bytes))
        return max(held.records / records, held.bytes / size)
