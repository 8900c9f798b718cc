"""How much a consumer holds that has not ended, and which partitions are therefore paused.

Pure bookkeeping, owned by the consumer's thread. Pausing makes the client throw away what it has fetched ahead, so it
is for partitions that stand still, not for short peaks: when the whole is full the consumer first waits a moment for
room, and pauses only if none comes. A partition that holds more than its share and has ended nothing for a while is
paused alone. Half of the room is kept for all partitions in equal parts and half is for whoever comes first; so one
that stands still takes at most that half beside its own part, and the others go on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from headrace.config.consumers import FlowControl
from headrace.records import TopicPartition

_MIN_SHARE_RECORDS = 1000
_MIN_SHARE_BYTES = 1_048_576
_STILL_SECONDS = 1.0
_COMMON = 0.5
"""Part of the room that belongs to no partition."""


class _Held:
    __slots__ = ("bytes", "moved_at", "paused", "records")

    def __init__(self) -> None:
        self.records = 0
        self.bytes = 0
        self.paused = False
        self.moved_at = 0.0


class Flow:
    """Counts records and bytes per partition and says what to pause and resume."""

    def __init__(self, limits: FlowControl) -> None:
        self._limits = limits
        self._held: dict[TopicPartition, _Held] = {}
        self._records = 0
        self._bytes = 0
        self._paused = 0
        self._full_since: float | None = None

    @property
    def records(self) -> int:
        """Records held in all."""
        return self._records

    @property
    def bytes(self) -> int:
        """Bytes held in all."""
        return self._bytes

    @property
    def must_wait(self) -> bool:
        """Whether a poll now could bring records for which there is no room."""
        if self.fill >= 1:
            return self._paused < len(self._held)
        return self._is_full() and any(not held.paused and self._is_beyond(held) for held in self._held.values())

    @property
    def fill(self) -> float:
        """Part of the budget that is used; 1 is full."""
        return self.part_of(self._records, self._bytes)

    def part_of(self, records: int, size_bytes: int) -> float:
        """Return the part of the budget that so much is; callable on any thread."""
        return max(records / self._limits.max_records, size_bytes / self._limits.max_bytes)

    @property
    def half_room_records(self) -> int:
        """Half of the records for which there is room, at least 1: so no single poll takes the room of all."""
        return max(1, (self._limits.max_records - self._records) // 2)

    def is_paused(self, partition: TopicPartition) -> bool:
        """Whether a partition is paused now; callable on any thread."""
        held = self._held.get(partition)
        return held is not None and held.paused

    def assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Begin to count for partitions, from zero; they start resumed."""
        self.revoked(partitions)
        for partition in partitions:
            self._held[partition] = _Held()

    def revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget partitions with all they hold."""
        for partition in partitions:
            if held := self._held.pop(partition, None):
                self._records -= held.records
                self._bytes -= held.bytes
                self._paused -= held.paused

    def taken(self, partition: TopicPartition, records: int, size_bytes: int, now: float) -> None:
        """Count what was polled at a time of the monotonic clock."""
        if held := self._held.get(partition):
            held.moved_at = held.moved_at if held.records else now
            held.records += records
            held.bytes += size_bytes
            self._records += records
            self._bytes += size_bytes

    def released(self, partition: TopicPartition, records: int, size_bytes: int, now: float) -> None:
        """Count what has ended; a partition that was revoked in between is ignored."""
        if held := self._held.get(partition):
            records, size_bytes = min(records, held.records), min(size_bytes, held.bytes)
            held.records -= records
            held.bytes -= size_bytes
            held.moved_at = now
            self._records -= records
            self._bytes -= size_bytes

    def changes(self, now: float) -> tuple[Sequence[TopicPartition], Sequence[TopicPartition]]:
        """Return the partitions to pause and those to resume now; each is reported once."""
        fill, full = self.fill, self._is_full()
        if not full:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        if fill < _COMMON and not self._paused:
            return (), ()
        no_room = self._full_since is not None and now - self._full_since >= _STILL_SECONDS
        before, pause, resume = now - _STILL_SECONDS, [], []
        for partition, held in self._held.items():
            share = self._share_used(held)
            if held.paused:
                if fill < 1 and (self._part(held) < self._own_part / 2 or (share < 0.5 and not full)):
                    held.paused = False
                    resume.append(partition)
            elif (no_room and (fill >= 1 or self._is_beyond(held))) or (share >= 1 and held.moved_at <= before):
                held.paused = True
                pause.append(partition)
        self._paused += len(pause) - len(resume)
        return pause, resume

    @property
    def _own_part(self) -> float:
        return (1 - _COMMON) / max(1, len(self._held))

    def _part(self, held: _Held) -> float:
        return self.part_of(held.records, held.bytes)

    def _is_beyond(self, held: _Held) -> bool:
        """Return whether a partition has used up the part of the room that is its own."""
        return self._part(held) >= self._own_part

    def _is_full(self) -> bool:
        """Return whether what belongs to no partition is used up, or the whole is."""
        if self.fill < _COMMON:
            return False
        own = self._own_part
        return self.fill >= 1 or sum(max(0.0, self._part(held) - own) for held in self._held.values()) >= _COMMON

    def _share_used(self, held: _Held) -> float:
        count = max(1, len(self._held))
        records = max(self._limits.max_records / count, min(_MIN_SHARE_RECORDS, self._limits.max_records))
        size = max(self._limits.max_bytes / count, min(_MIN_SHARE_BYTES, self._limits.max_bytes))
        return max(held.records / records, held.bytes / size)
