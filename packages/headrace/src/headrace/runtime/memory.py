"""Measures memory, and returns it to the operating system after a burst.

glibc keeps freed memory below a block that is in use, so a process would keep the size of its largest burst.
"""

import contextlib
import ctypes
import logging
import os
from pathlib import Path
from typing import Final

from headrace.runtime.clock import Clock
from headrace.runtime.threads import run_blocking

log = logging.getLogger(__name__)

_LOOK_SECONDS: Final = 10.0
_GROWTH: Final = 1.1
"""Trim only after this growth, because it stops other threads for milliseconds."""
_MEMORY_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


async def give_back_memory(clock: Clock) -> None:
    """Trim the heap whenever the process has grown since the last time."""
    least = memory_bytes()
    while True:
        await clock.sleep(_LOOK_SECONDS)
        now = memory_bytes()
        if now > least * _GROWTH:
            await run_blocking(trim)
            least = memory_bytes()
            log.debug("memory: %d bytes, %d after trimming", now, least)
        least = min(least, now)


def memory_bytes(process: int | None = None) -> int:
    """Return the resident memory of a process, by default of this one; 0 where the system does not report it."""
    try:
        return int(Path(f"/proc/{process or 'self'}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def trim() -> None:
    """Return free memory to the operating system, if the C library supports it."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if give_back:
        give_back(0)


def machine_bytes() -> int:
    """Return the memory of this machine or container."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no control groups, or no limit
        memory = min(memory, int(_MEMORY_LIMIT.read_text()))
    return memory
