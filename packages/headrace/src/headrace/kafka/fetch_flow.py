"""Flow control of one consumer: how much is in flight, what waits for capacity, and which partitions are paused.

Pure bookkeeping, used on the consumer's thread. What was received waits here, and partitions take turns, so that with a
backlog in all of them all have records in flight. One half of the budget is divided equally among the partitions; the
other half goes to those that take it first, up to a share for each. A pause makes the client discard the records it has
fetched ahead, and what waits of it is fetched again. So only partitions that make no progress are paused: one
that has its share in flight and has completed nothing for a while, or all if nothing could be passed on for that long.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from headrace.config.consumers import FlowControl
from headrace.records import Epochs, RecordBatch, TopicPartition

_MIN_SHARE_RECORDS = 1000
_MIN_SHARE_BYTES = 1_048_576
_NO_PROGRESS_SECONDS = 1.0
_COMMON = 0.5
"""Part of the budget that is not divided among the partitions."""
_MOST_FETCH_AHEAD_KBYTES = 8192
MOST_WAITING_RECORDS = 50_000
_LEAST_RECORDS = 100
"""A partition with records in flight gets no fewer at a time, because each time costs as much as many records."""


class _InFlight:
    __slots__ = ("bytes", "epoch", "moved_at", "paused", "records", "waiting")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.records = 0
        self.bytes = 0
        self.paused = False
        self.moved_at = 0.0
        self.waiting: deque[RecordBatch | int] = deque()
        """Records that were received and are not in flight yet, and where the partition ended."""


class _WaitingRecords:
    """What was received and is not in flight yet, of all partitions."""

    def __init__(self) -> None:
        self.partitions: dict[TopicPartition, _InFlight] = {}
        """Those with something, the next one first."""
        self.records = 0
        self.bytes = 0
        self.mean_bytes = 1
        """Bytes of a record, as the last poll had them."""
        self.dropped: dict[TopicPartition, int] = {}
        """Partitions of which something was dropped, with the offset of its first record."""

    def add(self, partition: TopicPartition, each: _InFlight, part: RecordBatch | int) -> None:
        """Keep records of a partition, or where it ended."""
        each.waiting.append(part)
        self.partitions[partition] = each
        if isinstance(part, RecordBatch):
            self.records += len(part)
            self.bytes += part.size_bytes
            self.mean_bytes = max(1, part.size_bytes // len(part))

    def drop(self, partition: TopicPartition, each: _InFlight) -> None:
        """Forget what waits of a partition."""
        batches = [part for part in each.waiting if isinstance(part, RecordBatch)]
        if self.partitions.pop(partition, None) and batches:
            self.records -= sum(map(len, batches))
            self.bytes -= sum(batch.size_bytes for batch in batches)
            self.dropped[partition] = batches[0].offsets[0]
        each.waiting.clear()


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
        self._waiting = _WaitingRecords()
        self._paused = 0
        self._full_since: float | None = None
        self._look_at = 0.0
        """When to look next for partitions that have completed nothing for too long."""

    @property
    def has_waiting(self) -> bool:
        """Whether records wait for capacity."""
        return bool(self._waiting.partitions)

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
        """How many records the next poll may return; 0 if almost as many wait for capacity as may."""
        free = MOST_WAITING_RECORDS - self._waiting.records
        free_bytes = self.fetch_ahead_kbytes * 1024 - self._waiting.bytes
        if self._waiting.partitions and (
            free < MOST_WAITING_RECORDS // 8 or free_bytes < self.fetch_ahead_kbytes * 128
        ):
            return 0
        return max(1, min(free, free_bytes // self._waiting.mean_bytes))

    @property
    def fetch_ahead_kbytes(self) -> int:
        """How much the client fetches ahead, and how much waits here; both are in memory besides what is in flight."""
        return min(_MOST_FETCH_AHEAD_KBYTES, max(1, self._limits.max_bytes // 2048))

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
                self._waiting.drop(partition, found)
                self._waiting.dropped.pop(partition, None)

    def received(self, partition: TopicPartition, part: RecordBatch | int) -> None:
        """Keep records until there is capacity for them, or where the partition ended after them."""
        if found := self._partitions.get(partition):
            self._waiting.add(partition, found, part)

    def take(self, now: float) -> Iterator[tuple[TopicPartition, int, RecordBatch | int]]:
        """Yield what is in flight from now on, or an end that was received, with the epoch; partitions take turns."""
        if not self._waiting.partitions:
            return
        own = self._own_part
        most = max(1 / len(self._partitions), min(1.0, _MIN_SHARE_RECORDS / self._limits.max_records))
        common = _COMMON - self._common_used()
        for partition, each in list(self._waiting.partitions.items()):
            if self.fill >= 1:
                return
            used = self._part(each)
            capacity = max(own, min(most, max(own, used) + common)) - used
            for part in self._take_of(partition, each, min(capacity, 1 - self.fill), now):
                yield partition, each.epoch, part
            common -= max(own, self._part(each)) - max(own, used)

    def _take_of(
        self, partition: TopicPartition, each: _InFlight, capacity: float, now: float
    ) -> Iterator[RecordBatch | int]:
        least = min(_LEAST_RECORDS / self._limits.max_records, self._own_part)
        while each.waiting:
            part = each.waiting[0]
            rest: RecordBatch | None = None
            if isinstance(part, RecordBatch):
                size = self.part_of(len(part), part.size_bytes)
                count = int(capacity / size * len(part))
                if each.records and capacity < size and (capacity < least or not count):
                    return
                if count < len(part):
                    part, rest = part[: max(1, count)], part[max(1, count) :]
                self._waiting.records -= len(part)
                self._waiting.bytes -= part.size_bytes
                self.fetched(partition, len(part), part.size_bytes, now)
                capacity -= self.part_of(len(part), part.size_bytes)
            each.waiting.popleft()
            del self._waiting.partitions[partition]
            if rest:
                each.waiting.appendleft(rest)
            if each.waiting:
                self._waiting.partitions[partition] = each  # as the last one
            yield part
            if rest:
                return

    def take_dropped(self) -> Iterator[tuple[TopicPartition, int]]:
        """Yield paused partitions whose waiting records were dropped, with the offset of the first one."""
        while self._waiting.dropped:
            yield self._waiting.dropped.popitem()

    def fetched(self, partition: TopicPartition, records: int, size_bytes: int, now: float) -> None:
        """Count polled records, at a time of the monotonic clock."""
        if found := self._partitions.get(partition):
            found.moved_at = found.moved_at if found.records else now
            found.records += records
            found.bytes += size_bytes
            self._busy[partition] = found
            self.records += records
            self.bytes += size_bytes

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
        full = not self.poll_limit_records
        if not full:
            self._full_since = None
        elif self._full_since is None:
            self._full_since = now
        if fill < _COMMON and not full and not self._paused and not self._must_look(now):
            return (), ()
        stays_full = self._full_since is not None and now - self._full_since >= _NO_PROGRESS_SECONDS
        before = now - _NO_PROGRESS_SECONDS
        pause: list[TopicPartition] = []
        resume: list[TopicPartition] = []
        for partition, each in list((self._partitions if stays_full else self._busy).items()):
            share = self._share_used(each)
            late = self._is_late(each, now)
            if each.paused:
                if fill < 1 and not late and not stays_full and (self._part(each) < self._own_part / 2 or share < 0.5):
                    each.paused = False
                    resume.append(partition)
                    if not each.records:
                        del self._busy[partition]
            elif late or stays_full or (share >= 1 and each.moved_at <= before):
                each.paused = True
                self._busy[partition] = each
                self._waiting.drop(partition, each)
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

    def _common_used(self) -> float:
        """Return how much of the common part of the budget is used."""
        own = self._own_part
        return sum(max(0.0, self._part(each) - own) for each in self._busy.values())

    def _share_used(self, each: _InFlight) -> float:
        count = max(1, len(self._partitions))
        records = max(self._limits.max_records / count, min(_MIN_SHARE_RECORDS, self._limits.max_records))
        size = max(self._limits.max_bytes / count, min(_MIN_SHARE_BYTES, self._limits.max_bytes))
        return max(each.records / records, each.bytes / size)
