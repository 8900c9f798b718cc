"""Flow control of one consumer: how much is in flight, and which partitions are therefore paused.

Pure bookkeeping, used on the consumer's thread. A pause makes the client discard the records it has fetched ahead. So
only partitions that make no progress are paused, and not for short peaks. When the budget is full, the consumer first
waits a moment for records to complete, and pauses only if none do. A partition that has more than its share in flight
and has completed nothing for a while is paused alone. One half of the budget is divided equally among the partitions;
the other half goes to the partitions that fill it first. So a partition without progress takes at most that half in
addition to its own part, and the other partitions continue.
"""

from collections.abc import Iterable, Sequence

from headrace.config.consumers import FlowControl
from headrace.records import Epochs, TopicPartition

_MIN_SHARE_RECORDS = 1000
_MIN_SHARE_BYTES = 1_048_576
_NO_PROGRESS_SECONDS = 1.0
_COMMON = 0.5
"""Part of the budget that is not divided among the partitions."""
_MOST_FETCH_AHEAD_KBYTES = 16_384


class _InFlight:
    __slots__ = ("bytes", "epoch", "moved_at", "paused", "records")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.records = 0
        self.bytes = 0
        self.paused = False
        self.moved_at = 0.0


class FetchFlowControl:
    """Counts records and bytes per partition and says which partitions to pause and resume."""

    def __init__(self, limits: FlowControl, max_processing_seconds: float = 0.0) -> None:
        """Prepare; `max_processing_seconds` is that of `ReadPolicy`."""
        self.records = 0
        """Records in flight, of all partitions."""
        self.bytes = 0
        """Bytes in flight, of all partitions."""
        self._limits = limits
        self._max_processing_seconds = max_processing_seconds
        self._partitions: dict[TopicPartition, _InFlight] = {}
        self._busy: dict[TopicPartition, _InFlight] = {}
        """Those with records in flight, and paused ones: others change only when the whole budget is full. Most of a
        thousand are others, and a look at each in every turn took a third of the cost of a record."""
        self._paused = 0
        self._mean_bytes = 1
        """Bytes of a record, as the last poll had them."""
        self._full_since: float | None = None
        self._look_at = 0.0
        """When to look next for partitions that have completed nothing for too long."""

    @property
    def must_wait(self) -> bool:
        """Whether a poll now could return records beyond the budget."""
        if self.fill >= 1:
            return self._paused < len(self._partitions)
        return self._is_full() and any(not each.paused and self._exceeds(each) for each in self._busy.values())

    @property
    def all_paused(self) -> bool:
        """Whether there are partitions, and all are paused."""
        return 0 < len(self._partitions) == self._paused

    @property
    def fill(self) -> float:
        """Part of the budget that is used; 1 is full."""
        return self.part_of(self.records, self.bytes)

    def part_of(self, records: int, size_bytes: int) -> float:
        """Return which part of the budget these records and bytes take; callable on any thread."""
        return max(records / self._limits.max_records, size_bytes / self._limits.max_bytes)

    @property
    def poll_limit_records(self) -> int:
        """Half of the free records or bytes, at least 1 record, so that no single poll takes the whole budget."""
        free_bytes = self._limits.max_bytes - self.bytes
        return max(1, min(self._limits.max_records - self.records, free_bytes // self._mean_bytes) // 2)

    @property
    def fetch_ahead_kbytes(self) -> int:
        """How much the client fetches ahead: as much as may be in flight, so that a consumer's memory is bounded."""
        return min(_MOST_FETCH_AHEAD_KBYTES, max(1, self._limits.max_bytes // 1024))

    def is_paused(self, partition: TopicPartition) -> bool:
        """Return whether a partition is paused now; callable on any thread."""
        found = self._partitions.get(partition)
        return found is not None and found.paused

    def pause_reason(self, partition: TopicPartition, now: float) -> str:
        """Return why a partition is paused now; empty if it is not. Callable on any thread."""
        found = self._partitions.get(partition)
        if found is None or not found.paused:
            return ""
        if self._is_late(found, now):
            seconds = self._max_processing_seconds
            return f"fetching stopped until a record completes: none has completed for more than {seconds:g} s"
        return "fetching stopped until records in flight complete: the limits of flow are reached"

    def assigned(self, epochs: Epochs) -> None:
        """Begin to count for partitions, from zero; they start resumed."""
        self.revoked(epochs)
        for partition, epoch in epochs.items():
            self._partitions[partition] = _InFlight(epoch)

    def revoked(self, partitions: Iterable[TopicPartition]) -> None:
        """Forget partitions and everything in flight for them."""
        for partition in partitions:
            if found := self._partitions.pop(partition, None):
                self.records -= found.records
                self.bytes -= found.bytes
                self._paused -= found.paused
                self._busy.pop(partition, None)

    def fetched(self, partition: TopicPartition, records: int, size_bytes: int, now: float) -> None:
        """Count polled records, at a time of the monotonic clock."""
        if found := self._partitions.get(partition):
            found.moved_at = found.moved_at if found.records else now
            found.records += records
            found.bytes += size_bytes
            self._busy[partition] = found
            self.records += records
            self.bytes += size_bytes
            self._mean_bytes = max(1, size_bytes // max(1, records))

    def released(self, partition: TopicPartition, epoch: int | None, records: int, size_bytes: int, now: float) -> None:
        """Count completed records; those of an assignment that is over are ignored."""
        found = self._partitions.get(partition)
        if found and found.epoch == epoch:
            records, size_bytes = min(records, found.records), min(size_bytes, found.bytes)
            found.records -= records
            found.bytes -= size_bytes
            found.moved_at = now
            self.records -= records
            self.bytes -= size_bytes
            if not (found.records or found.paused):
                self._busy.pop(partition, None)

    def changes(self, now: float) -> tuple[Sequence[TopicPartition], Sequence[TopicPartition]]:
        """Return the partitions to pause and those to resume now; each change is returned once."""
        fill = self.fill
        full = self._is_full()
        if not full:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        if fill < _COMMON and not self._paused and not self._must_look(now):
            return (), ()
        stays_full = self._full_since is not None and now - self._full_since >= _NO_PROGRESS_SECONDS
        before = now - _NO_PROGRESS_SECONDS
        pause: list[TopicPartition] = []
        resume: list[TopicPartition] = []
        for partition, each in list((self._partitions if stays_full and fill >= 1 else self._busy).items()):
            share = self._share_used(each)
            late = self._is_late(each, now)
            if each.paused:
                if fill < 1 and not late and (self._part(each) < self._own_part / 2 or (share < 0.5 and not full)):
                    each.paused = False
                    resume.append(partition)
                    if not each.records:
                        del self._busy[partition]
            elif (
                late or (stays_full and (fill >= 1 or self._exceeds(each))) or (share >= 1 and each.moved_at <= before)
            ):
                each.paused = True
                self._busy[partition] = each
                pause.append(partition)
        self._paused += len(pause) - len(resume)
        return pause, resume

    def _is_late(self, each: _InFlight, now: float) -> bool:
        limit = self._max_processing_seconds
        return 0 < limit <= now - each.moved_at and each.records > 0

    def _must_look(self, now: float) -> bool:
        if not self._max_processing_seconds or now < self._look_at:
            return False
        self._look_at = now + min(1.0, self._max_processing_seconds / 4)
        return True

    @property
    def _own_part(self) -> float:
        return (1 - _COMMON) / max(1, len(self._partitions))

    def _part(self, each: _InFlight) -> float:
        return self.part_of(each.records, each.bytes)

    def _exceeds(self, each: _InFlight) -> bool:
        """Return whether a partition has used up its own part of the budget."""
        return self._part(each) >= self._own_part

    def _is_full(self) -> bool:
        """Return whether the common part of the budget is used up, or the whole."""
        if self.fill < _COMMON:
            return False
        own = self._own_part
        return self.fill >= 1 or sum(max(0.0, self._part(each) - own) for each in self._busy.values()) >= _COMMON

    def _share_used(self, each: _InFlight) -> float:
        count = max(1, len(self._partitions))
        records = max(self._limits.max_records / count, min(_MIN_SHARE_RECORDS, self._limits.max_records))
        size = max(self._limits.max_bytes / count, min(_MIN_SHARE_BYTES, self._limits.max_bytes))
        return max(each.records / records, each.bytes / size)
