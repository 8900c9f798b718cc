"""Bounded queues and their gauges."""

from __future__ import annotations

import asyncio

from headrace.lifecycle import BoundedQueue, ManualClock, gauges


def test_a_full_queue_makes_its_producer_wait() -> None:
    """Back-pressure, first in first out, and the depth can be read."""

    async def test() -> None:
        queue: BoundedQueue[int] = BoundedQueue("q", 2)
        await queue.put(1)
        await queue.put(2)
        third = asyncio.ensure_future(queue.put(3))
        await ManualClock().settle()
        assert not third.done()
        assert gauges()["q"] == 2
        assert [await queue.get(), await queue.get(), await queue.get()] == [1, 2, 3]
        await third

    asyncio.run(test())


def test_a_cancelled_wait_takes_nothing() -> None:
    """What was put while a getter was cancelled stays for the next."""

    async def test() -> None:
        queue: BoundedQueue[int] = BoundedQueue("q", 2)
        getter = asyncio.ensure_future(queue.get())
        await ManualClock().settle()
        getter.cancel()
        await ManualClock().settle()
        await queue.put(1)
        assert await queue.get() == 1

    asyncio.run(test())
