"""Bounded queues whose depth can be read, and the gauges that telemetry publishes."""

import asyncio
import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

_gauges: dict[str, Callable[[], float]] = {}


def gauges() -> dict[str, float]:
    """Return the present depth of every named queue and budget: name to number."""
    return {name: read() for name, read in list(_gauges.items())}


def register_gauge(name: str, read: Callable[[], float]) -> None:
    """Publish a depth under a name; the last one registered under a name counts."""
    _gauges[name] = read


def unregister_gauge(name: str) -> None:
    """Take a depth back; a name that is not there is fine."""
    _gauges.pop(name, None)


class BoundedQueue(Generic[T]):
    """A first-in first-out queue for one loop; `put` waits while it is full."""

    def __init__(self, name: str, size_records: int) -> None:
        """Make an empty queue.

        Args:
            name: Name of its gauge.
            size_records: Items it holds at most.
        """
        self._items: deque[T] = deque()
        self._size = size_records
        self._changed = asyncio.Condition()
        held = weakref.ref(self)
        register_gauge(name, lambda: len(queue._items) if (queue := held()) else 0)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        """Whether `put` would wait."""
        return len(self._items) >= self._size

    async def put(self, item: T) -> None:
        """Add an item, waiting for room. If cancelled, the item was not added."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self.full)
            self._items.append(item)
            self._changed.notify_all()

    async def get(self) -> T:
        """Take the oldest item, waiting for one. If cancelled, nothing was taken."""
        async with self._changed:
            await self._changed.wait_for(lambda: bool(self._items))
            item = self._items.popleft()
            self._changed.notify_all()
            return item
