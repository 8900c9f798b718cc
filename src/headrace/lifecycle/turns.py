"""Lets long computations take turns: in each turn of the event loop one of them runs a slice."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final
from weakref import WeakKeyDictionary

_WAITING: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, deque[asyncio.Future[None]]]] = WeakKeyDictionary()


async def next_slice() -> None:
    """Return when this computation may run its next slice, of a few milliseconds.

    `asyncio.sleep(0)` would let all of them run in the same turn: thirty slices of 5 ms hold the loop for 150 ms.
    """
    loop = asyncio.get_running_loop()
    waiting = _WAITING.setdefault(loop, deque())
    waiting.append(loop.create_future())
    if len(waiting) == 1:
        loop.call_soon(_wake_one, loop, waiting)
    await waiting[-1]


def _wake_one(loop: asyncio.AbstractEventLoop, waiting: deque[asyncio.Future[None]]) -> None:
    while waiting and waiting[0].cancelled():
        waiting.popleft()
    if waiting:
        waiting.popleft().set_result(None)
    if waiting:
        loop.call_soon(_wake_one, loop, waiting)
