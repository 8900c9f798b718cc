"""What the next polls of a client return or call, and the thread that waits for it."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import confluent_kafka

from headrace_devkit.simulation.fetcher import FetchedPartition, Fetcher
from headrace_devkit.simulation.greenlet_threads import Waiter
from headrace_devkit.simulation.partition_log import StoredRecord


class ClientQueue:
    """The queue between a client and the application. Reports of commits and errors come before all else."""

    def __init__(self) -> None:
        self._reports: deque[Callable[[], object]] = deque()
        self._items: deque[tuple[FetchedPartition | None, int, Any]] = deque()
        """A partition and its version, and a record, an error with its offset, or a call."""
        self._waiter: Waiter | None = None

    def __bool__(self) -> bool:
        return bool(self._reports or self._items)

    def report(self, call: Callable[[], object]) -> None:
        """Have the next poll call this."""
        self._reports.append(call)
        self.wake()

    def push(self, item: Any, state: FetchedPartition | None = None) -> None:
        """Add a record or error of a partition's present version, or something that belongs to none."""
        self._items.append((state, state.version if state else 0, item))
        self.wake()

    def wake(self) -> None:
        """Let the thread that waits look again."""
        if self._waiter:
            self._waiter.wake()

    def wait(self, seconds: float) -> bool:
        """Wait until there is something, and return whether there is."""
        self._waiter = Waiter()
        woken = self._waiter.wait(seconds)
        self._waiter = None
        return woken

    def take(self, fetcher: Fetcher) -> Any:
        """Run the calls that are due, and return the next record or error, or None."""
        while self:
            if self._reports:
                self._reports.popleft()()
                continue
            state, version, item = self._items.popleft()
            if state is None:
                if not callable(item):
                    return confluent_kafka.Message(topic=item.topic, partition=0, error=item.error)
                item()
                continue
            if isinstance(item, StoredRecord):
                fetcher.queued_records -= 1
                fetcher.queued_bytes -= item.size_bytes
            if state.version != version:
                continue
            if isinstance(item, StoredRecord):
                fetcher.taken(state, item)
                return _message(state, item)
            error, offset = item
            return confluent_kafka.Message(topic=state.topic, partition=state.partition, offset=offset, error=error)
        return None


def problem(error: confluent_kafka.KafkaError, topic: str) -> SimpleNamespace:
    """Return an error as an item that belongs to no partition."""
    return SimpleNamespace(error=error, topic=topic or None)


def _message(state: FetchedPartition, record: StoredRecord) -> Any:
    named: dict[str, Any] = {"headers": list(record.headers)} if record.headers else {}
    return confluent_kafka.Message(
        topic=state.topic,
        partition=state.partition,
        offset=record.offset,
        key=record.key,
        value=record.value,
        timestamp=(confluent_kafka.TIMESTAMP_CREATE_TIME, record.timestamp_ms),
        **named,
    )
