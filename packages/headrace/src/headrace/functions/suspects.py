"""Records that may have killed their worker, and which of them are delivered next."""

from typing import Final, NamedTuple

from headrace.records import RecordBatch, TopicPartition

_POISON_DEATHS: Final = 3
_ALONE: Final = 2
"""Of them; after a call with several records, the cause may be an earlier record."""
_MAX_SUSPECTS: Final = 100_000
"""More than can be in flight."""


class _SuspectGroup(NamedTuple):
    """Records that a worker had begun when it died: one of them is to blame."""

    offsets: list[int]
    at_work: int
    """The first offset of the call at which the worker died."""
    deaths: int
    """Workers in a row that died of these records, among fewer and fewer others."""
    alone: int
    """How many of these workers had one record only."""


class Suspects:
    """The records of one trigger that were begun in a worker that died.

    First the records before the fatal call are delivered together, then that call. If a worker dies of the former as
    well, the death follows its cause later: then each part is half of what is left. So a record that kills every worker
    is found after about log2(n) + 3 deaths for a frame of n records.
    """

    def __init__(self, batch_size: int) -> None:
        """Prepare; `batch_size` is the most records of one call."""
        self._batch_size = batch_size
        self._groups: dict[tuple[TopicPartition, int], _SuspectGroup] = {}

    def part_of(self, partition: TopicPartition, records: RecordBatch) -> RecordBatch:
        """Return the first of these records that may be delivered as one frame."""
        groups = [self._groups.get((partition, offset)) for offset in records.offsets]
        group = groups[0]
        count = next((index for index, each in enumerate(groups) if each is not group), len(groups))
        if group is None:
            return records[:count]
        before = sum(offset < group.at_work for offset in records.offsets[:count])
        return records[: before if before and group.deaths == 1 else (count + 1) // 2]

    def died(self, partition: TopicPartition, records: RecordBatch, begun: int) -> int:
        """Count the death of a worker at the call that began with the last of the `begun` records.

        Return 0 if the records have to be attempted again. Else the only record is to blame: return how many workers
        died of it.
        """
        before = self._groups.get((partition, records.offsets[0]))
        deaths, alone = (before.deaths, before.alone) if before else (0, 0)
        self.ended(partition, before.offsets if before else [])
        offsets = records.offsets[: begun - 1 + self._batch_size]
        group = _SuspectGroup(offsets, offsets[begun - 1], deaths + 1, alone + (len(records) == 1))
        if group.deaths >= _POISON_DEATHS and group.alone >= _ALONE:
            return group.deaths
        self._groups |= dict.fromkeys([(partition, offset) for offset in offsets], group)
        while len(self._groups) > _MAX_SUSPECTS:
            del self._groups[next(iter(self._groups))]
        return 0

    def ended(self, partition: TopicPartition, offsets: list[int]) -> None:
        """Clear records that a worker has completed."""
        for offset in offsets:
            self._groups.pop((partition, offset), None)

    def __len__(self) -> int:
        return len(self._groups)
