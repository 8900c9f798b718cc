"""The one limiter of rates."""

from __future__ import annotations

import asyncio

import pytest

from headrace.runtime import TokenBucket
from headrace.testing import ManualClock


def test_a_bucket_gives_its_burst_at_once_and_then_its_rate() -> None:
    """What is refused takes nothing; a full bucket does not grow."""
    clock = ManualClock()
    bucket = TokenBucket(clock, per_second=10, burst=3)
    assert [bucket.try_take() for _ in range(4)] == [True, True, True, False]
    assert bucket.seconds_until(1) == pytest.approx(0.1)
    asyncio.run(clock.advance(60))
    assert [bucket.try_take() for _ in range(4)] == [True, True, True, False]


async def test_takes_of_any_size_keep_the_rate() -> None:
    """An overdrawn bucket makes the next take wait until the debt is paid; more waits add up."""
    clock = ManualClock()
    bucket = TokenBucket(clock, per_second=100)
    began = clock.monotonic()

    async def take(tokens: int) -> float:
        await bucket.wait(tokens)
        return clock.monotonic() - began

    assert await take(250) == 0
    waiting = asyncio.ensure_future(take(50))
    await clock.advance(2.5)
    assert await waiting == pytest.approx(2.5)
    assert bucket.seconds_until() == pytest.approx(0.5)
