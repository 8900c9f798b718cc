"""A transaction on its way into a client."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError

from headrace.errors import ProducerQueueFull, RecordRefused, TransactionAborted
from headrace.kafka.transactions.transaction_job import OF_BATCH, TransactionJob
from headrace.kafka.transactions.transactional_client import flush
from headrace.records import OutgoingRecord

INVALID, OTHER = ClientError.INVALID_RECORD, ClientError._INVALID_DIFFERENT_RECORD


class SmallClient:
    """A client with a queue of a few records, which a flush empties."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.queue: list[Callable[..., None]] = []

    def produce(self, topic: str, value: Any, key: Any, partition: int, report: Any, *others: Any) -> None:
        if len(self.queue) >= self.most:
            raise BufferError
        self.queue.append(report)

    def flush(self, _seconds: float) -> None:
        for report in self.queue:
            report(None, SimpleNamespace(offset=lambda: 7, partition=lambda: 0))
        self.queue.clear()


async def sent(client: Any, records: int) -> TransactionJob:
    job = TransactionJob([OutgoingRecord("t", None, b"v")] * records, None)
    job.send(client, 0, lambda: job.has_failed)
    client.flush(0)
    return job


async def test_a_transaction_may_have_more_records_than_the_queue_of_the_client() -> None:
    """It is sent in parts; else it would be aborted, made again and aborted again."""
    assert (await sent(SmallClient(3), 10)).written


async def test_a_record_for_which_an_empty_queue_is_too_small_fails() -> None:
    """As each attempt would."""
    job = await sent(SmallClient(0), 1)
    assert isinstance(job.results[0], ProducerQueueFull)
    assert not job.written


async def test_what_is_queued_behind_a_refused_record_is_dropped() -> None:
    """Kafka's client never sends it; a transaction would wait for its time limit before it is aborted."""
    queued = [object(), object()]
    client = SimpleNamespace(flush=lambda _: len(queued), purge=lambda in_flight: queued.clear())
    flush(client, lambda: True)
    assert queued == []


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ([INVALID] * 2, [True] * 2),
        ([INVALID, OTHER, INVALID], [False, None, False]),
        ([OTHER, INVALID, INVALID], [None, True, True]),
        ([INVALID], [False]),
    ],
)
async def test_a_refusal_beside_another_one_may_be_of_the_batch(reported: list[int], expected: list[Any]) -> None:
    """Kafka's client reports all records of a batch if exactly one is refused, else the refused ones."""
    for names_culprits in (True, False):
        job = TransactionJob([OutgoingRecord("t", None, b"v")] * len(reported), None, names_culprits=names_culprits)
        job.results = [None] * len(reported)
        record: Any = SimpleNamespace(topic=lambda: "t", partition=lambda: 0)
        for index, code in enumerate(reported):
            job._reported(index, ClientError(code), record)
        job.fail(TransactionAborted())
        marks = [OF_BATCH in why.parameters if isinstance(why, RecordRefused) else None for why in job.results]
        assert marks == [None if each is None else each and names_culprits for each in expected]
