"""Threads and the bridge to the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headrace.runtime import LoopBridge, OwnedThread, call_within


def test_items_cross_in_order_and_in_batches() -> None:
    """Nothing is lost or reordered, and wake-ups are fewer than items."""

    async def test() -> None:
        got: list[int] = []
        wakeups = 0
        all_there = asyncio.Event()

        def deliver(items: list[int]) -> None:
            nonlocal wakeups
            wakeups += 1
            got.extend(items)
            if len(got) == 20_000:
                all_there.set()

        bridge = LoopBridge(asyncio.get_running_loop(), deliver)

        def work(stop: threading.Event) -> None:
            for number in range(20_000):
                bridge.post(number)

        thread = OwnedThread("t", work, lambda cause: None)
        thread.start()
        await asyncio.wait_for(all_there.wait(), 60)
        assert got == list(range(20_000))
        assert wakeups < 20_000
        assert await thread.stop(5)

    asyncio.run(test())


async def test_a_thread_that_dies_reports_its_error() -> None:
    """The error arrives on the loop."""
    death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def work(stop: threading.Event) -> None:
        raise OSError("gone")

    OwnedThread("t", work, death.set_result).start()
    assert str(await asyncio.wait_for(death, 60)) == "gone"


async def test_a_thread_that_does_not_end_is_abandoned_after_the_limit() -> None:
    """The loop never waits for a thread without a limit."""
    release = threading.Event()
    thread = OwnedThread("t", lambda stop: release.wait(10) and None, lambda cause: None)
    thread.start()
    assert not await thread.stop(0.01)
    release.set()
    assert await thread.stop(5)


def test_calls_that_do_not_return_are_left_behind_up_to_a_number() -> None:
    release = threading.Event()
    for _ in range(4):
        with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
            call_within(0.01, release.wait)
    with pytest.raises(TimeoutError, match="4 earlier calls have not returned"):
        call_within(5, int)
    release.set()
    for thread in threading.enumerate():
        if thread.name == "call-within":
            thread.join(60)
    assert call_within(5, lambda: "result") == "result"
    with pytest.raises(ZeroDivisionError):
        call_within(5, lambda: 1 / 0)
