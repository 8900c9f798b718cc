from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.runtime import LoopThread


def test_a_coroutine_runs_on_the_other_thread_and_its_result_comes_back() -> None:
    """The caller needs no loop."""
    loop = LoopThread("other")

    async def where() -> str:
        return threading.current_thread().name

    assert loop.call(where(), 5) == "other"
    loop.stop()
    assert "other" not in {thread.name for thread in threading.enumerate()}


def test_a_call_past_its_limit_is_cancelled() -> None:
    """The caller gets the time-out, the coroutine its cancellation."""
    loop = LoopThread("other")
    cancelled = threading.Event()

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    with pytest.raises(TimeoutError):
        loop.call(forever(), 0.01)
    assert cancelled.wait(5)
    loop.stop()
