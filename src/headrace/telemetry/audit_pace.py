"""How fast notes are written while the process has better things to do."""

import time
from typing import Final

_BUSY: Final = 0.7
_WORTH_SECONDS: Final = 0.001


class Pace:
    """Keeps a thread of a busy process to a share of its time; a process with time to spare is not held back.

    The interpreter runs one thread at a time, so what notes take, the records they tell of have to wait for.
    """

    def __init__(self, share: float) -> None:
        """Begin to count, on the thread; `share` is the part of a processor that it may use, 1 for all."""
        self._share = share
        self._began = self._now()

    def keep(self) -> None:
        """Sleep if the thread has used more than its share since the last time, and others want to run."""
        wall, all_threads, own = (now - then for now, then in zip(self._now(), self._began, strict=True))
        pause = own / self._share - wall
        if pause < _WORTH_SECONDS and wall < _WORTH_SECONDS:
            return
        if pause > 0 and all_threads > _BUSY * wall:
            time.sleep(pause)
        self._began = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.monotonic(), time.process_time(), time.thread_time()
