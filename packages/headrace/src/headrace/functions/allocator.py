"""Chooses the worker of the next frame, and the worker that a partition or a key always has.

Pure bookkeeping on the loop: workers are numbers here. A worker is up, starting, or down. A caller waits for a worker;
it is rejected only while every worker that could serve it is down.
"""

import asyncio
import itertools
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from headrace.errors import DestinationUnavailable
from headrace.records import TopicPartition

FRAMES_PER_WORKER = 2
"""One that it serves and one that waits in the worker, so that it does not wait for the parent between frames."""
_GOLDEN = 0x9E3779B1


class Allocator:
    """Hands out workers. They are numbered from 0, and all are starting at first.

    A worker that has a frame gets a second one only while no worker that could serve is idle.
    """

    def __init__(self, workers: int, recall: Callable[[int], bool] | None = None) -> None:
        """Prepare; `recall` recalls the second frame of a worker for an idle one; returns whether it could."""
        self._frames: list[dict[object, Sequence[int]]] = [{} for _ in range(workers)]
        """Per worker: its frames, oldest first, and which workers could serve each.

        The key is the future of a caller of `acquire` until the caller continues, and sends the frame.
        """
        self._recall = recall
        self._sharing = False
        self._up: dict[int, None] = {}
        """The least recently used worker is first."""
        self._down: dict[int, str] = {}
        self._waiters: list[tuple[Sequence[int], asyncio.Future[int | None], TopicPartition | None]] = []

    @property
    def waiting(self) -> int:
        """Callers that wait for a worker."""
        return len(self._waiters)

    @property
    def idle(self) -> int:
        """Workers that are up and have no frame."""
        return sum(not self._frames[worker] for worker in self._up)

    def take(self, candidates: Sequence[int]) -> int | None:
        """Return one of these workers, which then has one frame more; None if the caller must wait in `acquire`."""
        worker = None if self._waiters else self._best(candidates)
        if worker is not None:
            self._give(worker, object(), candidates)
            self._share()
        return worker

    async def acquire(self, candidates: Sequence[int], partition: TopicPartition | None = None) -> int | None:
        """Wait for a worker, which then has one frame more; callers are served in the order of their calls.

        Returns None if the partition is revoked first. If cancelled, no worker was taken.

        Raises:
            DestinationUnavailable: Every candidate is down; the text has the reason.
        """
        waiter: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._waiters.append((candidates, waiter, partition))
        self._assign()
        try:
            worker = await waiter
        except asyncio.CancelledError:
            # Race: the worker may have been assigned before the cancellation arrived; it must not leak.
            for frames in self._frames:
                frames.pop(waiter, None)
            self._waiters = [each for each in self._waiters if each[1] is not waiter]
            self._assign()
            raise
        if worker is not None and waiter in (frames := self._frames[worker]):
            frames[object()] = frames.pop(waiter)  # it is sent now, behind those that `take` has let overtake it
        return worker

    def give_up(self, partitions: Collection[TopicPartition]) -> None:
        """Release the callers that wait for workers of these partitions."""
        for _, waiter, partition in self._waiters:
            if partition in partitions and not waiter.done():
                waiter.set_result(None)
        self._assign()

    def started(self, worker: int) -> None:
        """Record that a worker is up and idle."""
        self.starting(worker)
        self._up[worker] = None
        self._assign()

    def frame_ended(self, worker: int) -> None:
        """Record that a frame of a worker was completed or recalled."""
        frames = self._frames[worker]
        sent = (frame for frame in frames if not isinstance(frame, asyncio.Future))
        if frames:
            del frames[next(sent, next(iter(frames)))]
        self._assign()

    def lost(self, worker: int) -> None:
        """Record that a worker has ended, or takes no more frames."""
        self._up.pop(worker, None)
        self._frames[worker].clear()

    def starting(self, worker: int) -> None:
        self.lost(worker)
        self._down.pop(worker, None)

    def down(self, worker: int, why: str) -> None:
        self.lost(worker)
        self._down[worker] = why
        self._assign()

    def _assign(self) -> None:
        """Give each waiting caller, in order, a worker of its candidates, or refuse it if all of them are down."""
        free = sum(len(self._frames[worker]) < FRAMES_PER_WORKER for worker in self._up)
        waiters, self._waiters = self._waiters, []
        for index, (candidates, waiter, partition) in enumerate(waiters):
            if not free and not self._down:
                self._waiters += waiters[index:]
                break
            worker = self._best(candidates)
            if waiter.done():
                continue
            if worker is not None:
                self._give(worker, waiter, candidates)
                free -= len(self._frames[worker]) == FRAMES_PER_WORKER
                waiter.set_result(worker)
            elif all(number in self._down for number in candidates):
                waiter.set_exception(DestinationUnavailable(self._down[candidates[0]]))
            else:
                self._waiters.append((candidates, waiter, partition))
        self._share()

    def _give(self, worker: int, frame: object, candidates: Sequence[int]) -> None:
        """Count a frame of a worker, which becomes the most recently used one."""
        self._up[worker] = self._up.pop(worker)
        self._frames[worker][frame] = candidates

    def _best(self, candidates: Sequence[int]) -> int | None:
        """Return the candidate with the fewest frames, None if each has enough."""
        ready = [number for number in self._up if number in candidates]
        best = min(ready, key=lambda number: len(self._frames[number]), default=None)
        return best if best is not None and len(self._frames[best]) < FRAMES_PER_WORKER else None

    def _share(self, again: bool = True) -> None:
        """Recall second frames that idle workers can begin."""
        idle = [number for number in self._up if not self._frames[number]]
        if self._sharing or not self._recall or not idle:
            return
        self._sharing = True
        for worker, frames in enumerate(self._frames):
            if idle and len(frames) > 1 and any(number in [*frames.values()][-1] for number in idle):
                if self._recall(worker):
                    idle = idle[1:]
                elif again:  # its caller got the worker in this turn of the loop, and sends the frame in the next
                    asyncio.get_running_loop().call_soon(self._share, False)
        self._sharing = False


class PartitionWorkers:
    """Which worker each assigned partition of a trigger has.

    The partitions of a topic are spread evenly. A partition keeps its worker while it is assigned, so a handler may
    keep its state in memory. A partition that returns gets its former worker, unless that has its share already.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._assigned: dict[TopicPartition, int] = {}
        self._last: dict[TopicPartition, int] = {}
        self._loads: Counter[tuple[str, int]] = Counter()
        """Assigned partitions by topic and worker; by worker alone under an empty topic."""

    def worker_of(self, partition: TopicPartition) -> int:
        """Return the worker of a partition; also for one that is not assigned, as in a replay."""
        return self._assigned.get(partition, self._preferred(partition))

    def assigned(self, partitions: Iterable[TopicPartition]) -> None:
        """Choose workers for partitions that are assigned from now on."""
        fresh = sorted(set(partitions) - self._assigned.keys())
        totals = Counter(partition.topic for partition in itertools.chain(self._assigned, fresh))
        loads, left = self._loads, []
        for partition in fresh:
            worker = self._preferred(partition)
            if loads[partition.topic, worker] < -(-totals[partition.topic] // self._workers):
                self._add(partition, worker, 1)
            else:
                left.append(partition)
        for partition in left:
            ranks = [(loads[partition.topic, worker], loads["", worker], worker) for worker in range(self._workers)]
            self._add(partition, min(ranks)[-1], 1)

    def given_up(self, partitions: Collection[TopicPartition]) -> None:
        """Forget partitions that are not assigned any more, except which worker they had."""
        for partition in self._assigned.keys() & set(partitions):
            self._add(partition, self._assigned[partition], -1)
            del self._assigned[partition]

    def _add(self, partition: TopicPartition, worker: int, count: int) -> None:
        self._assigned[partition] = self._last[partition] = worker
        self._loads[partition.topic, worker] += count
        self._loads["", worker] += count

    def _preferred(self, partition: TopicPartition) -> int:
        # Round robin per topic, with a different start for each topic; the same in every process.
        number = (zlib.crc32(partition.topic.encode()) + partition.partition) % self._workers
        return self._last.get(partition, number)


def worker_of_key(key: bytes | None, partition: TopicPartition, workers: int) -> int:
    """Return the worker that a key always has, in every process; records without a key go by their partition."""
    text = f"{partition.topic} {partition.partition}".encode() if key is None else key
    # The low bits of a CRC of similar keys are alike; the product's upper bits depend on all of them.
    return (zlib.crc32(text) * _GOLDEN >> 16 & 0xFFFF) % workers
