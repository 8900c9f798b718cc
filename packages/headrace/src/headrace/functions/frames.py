"""The frames of a worker that are in flight, and its progress in them."""

import asyncio
import contextlib
import mmap
import os
from collections import deque
from collections.abc import Callable, Collection, Set
from typing import NamedTuple

from headrace.errors import WorkerLost
from headrace.framing import ProtocolBroken
from headrace.functions import protocol
from headrace.records import TopicPartition

Response = protocol.Done | protocol.Results
NOTHING_BEGUN = protocol.Results([])
"""The response of a frame of which no record was begun."""

_NUMBERS = 256


def open_shared_page() -> int:
    """Return a descriptor of a page of memory for two processes, which the caller closes.

    The page is allocated here: without space, the first access to a hole would kill a process by SIGBUS.

    Raises:
        OSError: Memory or descriptors are used up.
    """
    shared = os.memfd_create("headrace frames")
    try:
        os.posix_fallocate(shared, 0, mmap.PAGESIZE)
    except OSError:
        os.close(shared)
        raise
    return shared


class Frame(NamedTuple):
    """One frame in flight."""

    number: int
    records: int
    partition: TopicPartition
    response: asyncio.Future[Response]
    """`NOTHING_BEGUN` if the frame was recalled."""


class FramesInFlight:
    """The frames of one worker, oldest first.

    The worker counts the records that it has begun, in memory that both processes share. Before it begins a frame, it
    reads the number of the frame from a pipe. If the parent reads the number first, the worker skips the frame. The
    parent stops a frame between two records by a word in the same memory.
    """

    def __init__(self, progress: mmap.mmap) -> None:
        """Begin without a frame.

        The first 8 bytes of `progress` are the worker's count of records begun. The next 8 are one more than the number
        of the frame to stop.
        """
        self.served = 0
        """Completed frames."""
        self.claims, self._claims_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """The pipe of numbers; the worker has its reading end too."""
        self._progress = progress
        self._shared = memoryview(progress).cast("Q")
        self._ended_records = 0
        self._frames: deque[Frame] = deque()
        self._number = 0
        self._stopped = set[int]()
        self._seen = (-1, 0.0)

    @property
    def numbers(self) -> Set[int]:
        return {frame.number for frame in self._frames}

    def add(self, records: int, partition: TopicPartition) -> asyncio.Future[Response]:
        """Count a frame that is about to be sent, and return its response."""
        if not self._frames:
            self.restart_watch()
        self._number = (self._number + 1) % _NUMBERS
        os.write(self._claims_end, bytes((self._number,)))
        frame = Frame(self._number, records, partition, asyncio.get_running_loop().create_future())
        self._frames.append(frame)
        return frame.response

    def completed(self, response: Response) -> int:
        """Complete the oldest frame; return how many of its records were begun.

        A response has fewer results than records if a failure ends the frame, or if more do not fit.

        Raises:
            ProtocolBroken: No frame is in flight, or the response has too many results, or a `Done` has some bodies.
                Or it has none, and the parent has not stopped the frame.
        """
        if not self._frames:
            raise ProtocolBroken("a response without a request")
        frame = self._frames[0]
        if isinstance(response, protocol.Done):
            records = frame.records
            fits = len(response.bodies) in (0, records)
        else:
            records = len(response.results)
            fits = records <= frame.records and (records > 0 or frame.number in self._stopped)
        if not fits:
            raise ProtocolBroken("a response without a request")
        self._frames.popleft()
        self._stopped.discard(frame.number)
        if self._shared[1] == frame.number + 1:  # else the next frame is stopped already
            self._shared[1] = 0
        self._ended_records += records
        self.served += 1
        if not frame.response.done():
            frame.response.set_result(response)
        return records

    def recall(self) -> int:
        """Recall the frames that the worker has not begun; return how many."""
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self.claims, _NUMBERS) if self._frames else b""
        recalled = [frame for frame in self._frames if frame.number in numbers]
        for frame in recalled:
            self._frames.remove(frame)
            if not frame.response.done():
                frame.response.set_result(NOTHING_BEGUN)
        return len(recalled)

    def stop(self, partitions: Collection[TopicPartition]) -> Frame | None:
        """Stop the worker between two records if it serves these partitions; return the frame at work.

        Recall the frames that it has not begun before.
        """
        frame = self._frames[-1] if self._frames else None
        if frame is None or frame.partition not in partitions:
            return None
        self._stopped.add(frame.number)
        self._shared[1] = frame.number + 1
        return frame

    def has(self, partitions: Collection[TopicPartition]) -> bool:
        return any(frame.partition in partitions for frame in self._frames)

    def lose(self, lost: Callable[[int], WorkerLost]) -> None:
        """Fail every frame because the process has ended; `lost` makes the error from the number of records begun."""
        begun = self._shared[0] - self._ended_records
        while self._frames:
            frame = self._frames.popleft()
            if not frame.response.done():
                # A larger number means that the frame was complete and that its response was cut off.
                frame.response.set_exception(lost(begun if begun <= frame.records else 0))
                frame.response.exception()  # retrieved here, or asyncio would log it if its caller was cancelled
            begun = max(0, begun - frame.records)

    def restart_watch(self) -> None:
        """Measure the time of the record at work from the next check on."""
        self._seen = (-1, 0.0)

    def is_stuck(self, now: float, limit_seconds: float) -> bool:
        """Return whether the worker has been at the same record for longer than the limit; call it periodically."""
        if self._shared[0] != self._seen[0]:
            self._seen = (self._shared[0], now)
        return now - self._seen[1] >= limit_seconds

    def close(self) -> None:
        """Close the pipe and the shared memory, which has a descriptor too."""
        if self._claims_end >= 0:
            self._shared.release()
            self._progress.close()
            os.close(self.claims)
            os.close(self._claims_end)
            self._claims_end = -1
