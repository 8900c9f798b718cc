"""A transaction on its way into a client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaError as ClientError

from headrace.config.kafka import KafkaConfig
from headrace.errors import ProducerQueueFull, RecordRefused, TransactionAborted
from headrace.kafka.transactions import transactional_client
from headrace.kafka.transactions.transaction_job import OF_BATCH, TransactionJob
from headrace.kafka.transactions.transactional_client import TransactionalClient
from headrace.records import OutgoingRecord, Produced

Send = Callable[..., TransactionJob]
INVALID, OTHER = ClientError.INVALID_RECORD, ClientError._INVALID_DIFFERENT_RECORD


class SmallClient:
    """A client with a queue of a few records, which a flush empties: by these reports, then as written."""

    def __init__(self, most: int, *reported: int) -> None:
        self.most = most
        self.reported = list(reported)
        self.queue: list[tuple[Any, int]] = []
        self.stuck: list[object] = []

    def produce(self, request: Any, records: Any, first: int, at_once: bool) -> Any:
        for index in range(first, first + len(records)):
            if len(self.queue) >= self.most:
                return index, BufferError()
            self.queue.append((request, index))
        return None

    def flush(self, _seconds: float) -> int:
        for request, index in self.queue:
            error = ClientError(self.reported.pop(0)) if self.reported else None
            request.reported(index, 1, [transactional_client._result(KafkaConfig(), "t", 0, 7, error)])
        self.queue.clear()
        return len(self.stuck)

    def purge(self, in_flight: bool) -> None:
        self.stuck.clear()

    def transact(self, step: str, seconds: float) -> None:
        """Do nothing."""


def client_of(small: SmallClient, monkeypatch: pytest.MonkeyPatch) -> TransactionalClient:
    monkeypatch.setattr(transactional_client, "new_client", lambda *_: small)
    return TransactionalClient(KafkaConfig(), {}, 1)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Send:
    def send(small: SmallClient, records: int, **options: bool) -> TransactionJob:
        client = client_of(small, monkeypatch)
        job = TransactionJob([OutgoingRecord("t", None, b"v")] * records, None, **options)
        job.send(client, lambda: job.has_failed)
        client.flush(lambda: job.has_failed)
        return job

    return send


async def test_a_transaction_may_have_more_records_than_the_queue_of_the_client(sent: Send) -> None:
    """It is sent in parts; else it would be aborted, made again and aborted again."""
    job = sent(SmallClient(3), 10)
    assert job.written
    assert job.results == [Produced(0, 7)] * 10


async def test_a_record_for_which_an_empty_queue_is_too_small_fails(sent: Send) -> None:
    """As each attempt would."""
    job = sent(SmallClient(0), 2)
    assert [type(result) for result in job.results] == [ProducerQueueFull, type(None)]
    assert not job.written


async def test_what_is_queued_behind_a_refused_record_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka's client never sends it; a transaction would wait for its time limit before it is aborted."""
    small = SmallClient(3)
    small.stuck = [object(), object()]
    client_of(small, monkeypatch).flush(lambda: True)
    assert small.stuck == []


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ([INVALID] * 2, [True] * 2),
        ([INVALID, OTHER, INVALID], [False, None, False]),
        ([OTHER, INVALID, INVALID], [None, True, True]),
        ([INVALID], [False]),
    ],
)
async def test_a_refusal_beside_another_one_may_be_of_the_batch(
    sent: Send, reported: list[int], expected: list[Any]
) -> None:
    """Kafka's client reports all records of a batch if exactly one is refused, else the refused ones."""
    for names_culprits in (True, False):
        job = sent(SmallClient(3, *reported), len(reported), names_culprits=names_culprits)
        job.fail(TransactionAborted())
        marks = [OF_BATCH in why.parameters if isinstance(why, RecordRefused) else None for why in job.results]
        assert marks == [None if each is None else each and names_culprits for each in expected]
