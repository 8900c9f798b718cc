"""Memory goes back to the operating system."""

from __future__ import annotations

import asyncio

import pytest

from headrace.runtime import memory
from headrace_devkit.testing import ManualClock


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
