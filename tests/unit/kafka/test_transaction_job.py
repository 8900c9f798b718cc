"""A transaction on its way into a client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from headrace.errors import ProducerQueueFull
from headrace.kafka.producer_limits import Batches, BatchLimits
from headrace.kafka.transaction_job import TransactionJob
from headrace.records import OutgoingRecord


class SmallClient:
    """A client with a queue of a few records, which a flush empties."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.queue: list[Callable[..., None]] = []

    def produce(self, topic: str, value: Any, key: Any, partition: int, report: Any, *others: Any) -> None:
        if len(self.queue) >= self.most:
            raise BufferError
        self.queue.append(report)

    def flush(self) -> None:
        for report in self.queue:
            report(None, SimpleNamespace(offset=lambda: 7, partition=lambda: 0))
        self.queue.clear()


async def sent(client: Any, records: int) -> TransactionJob:
    job = TransactionJob([OutgoingRecord("t", None, b"v")] * records, None)

    async def no_configs(topic: str) -> dict[str, str]:
        return {}

    await asyncio.to_thread(job.send, client, 0, Batches(BatchLimits(no_configs), 1000, client.flush))
    client.flush()
    return job


async def test_a_transaction_may_have_more_records_than_the_queue_of_the_client() -> None:
    """It is sent in parts; else it would be aborted, made again and aborted again."""
    assert (await sent(SmallClient(3), 10)).written


async def test_a_record_for_which_an_empty_queue_is_too_small_fails() -> None:
    """As each attempt would."""
    job = await sent(SmallClient(0), 1)
    assert isinstance(job.results[0], ProducerQueueFull)
    assert not job.written
