"""Memory goes back to the operating system."""

from __future__ import annotations

import asyncio
import ctypes

import pytest

from headrace.runtime import memory
from headrace_devkit.testing import ManualClock


def test_memory_of_a_burst_is_given_back() -> None:
    """Blocks below one that is still in use stay with the process until the heap is trimmed."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [libc.malloc(60_000) for _ in range(2000)]
    for block in blocks:
        ctypes.memset(block, 1, 60_000)
    for block in blocks[:-1]:
        libc.free(block)
    held = memory.memory_bytes()
    memory.trim()
    assert memory.memory_bytes() < held - 60_000_000
    libc.free(blocks[-1])


async def test_the_heap_is_trimmed_only_when_the_process_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trimming holds up other threads, so a process of constant size never does it."""
    clock, sizes, trimmed = ManualClock(), [100], list[int]()
    monkeypatch.setattr(memory, "memory_bytes", lambda: sizes[-1])

    def trim() -> None:
        trimmed.append(sizes[-1])
        sizes.append(105)

    monkeypatch.setattr(memory, "trim", trim)

    task = asyncio.create_task(memory.give_back_memory(clock))
    await clock.advance(100)
    assert trimmed == []
    sizes.append(300)
    await clock.advance(10)
    while sizes[-1] != 105:  # noqa: ASYNC110 a thread trims
        await asyncio.sleep(0.001)
    await clock.advance(100)
    task.cancel()

    assert trimmed == [300]
