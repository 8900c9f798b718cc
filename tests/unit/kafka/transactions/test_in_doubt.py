"""A transaction whose commit was asked for and not confirmed."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from confluent_kafka import KafkaError, KafkaException

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import KafkaTimeout, KafkaUnavailable, RecordTooLarge, TransactionAborted
from headrace.kafka.transactions import producers as transactional
from headrace.kafka.transactions.transaction_job import TransactionJob
from headrace.kafka.transactions.transactional_client import NotWritten
from headrace.kafka.write_request import WriteRequest
from headrace.records import OutgoingRecord, Produced

RECORD = OutgoingRecord("t", None, b"1")


def outcome_of(monkeypatch: pytest.MonkeyPatch, responses: list[Any], *, closing: bool) -> Any:
    """Return the result of a transaction in doubt; `responses` are those to requests for its last record."""

    async def read(*_: Any) -> AsyncGenerator[list[Any], None]:
        response = responses.pop(0)
        if isinstance(response, Exception):
            raise response
        yield response

    async def main() -> Any:
        producers = transactional.TransactionalProducers(KafkaConfig(), ProducerConfig(), "x")
        job = TransactionJob([RECORD], (lambda results: RECORD) if closing else None)
        job.records += [RECORD] * closing
        job.results = [Produced(0, n) for n in range(len(job.records))]
        job.in_doubt = True
        producers._open_jobs[job] = asyncio.get_running_loop().call_later(60, job.claim)
        producers._finish([job])
        (result,) = await asyncio.wait_for(job.response, 60)
        assert not producers._open_jobs
        return result

    monkeypatch.setattr(transactional, "read_records", read)
    monkeypatch.setattr(transactional, "_LOOK_AGAIN_SECONDS", 0)
    return asyncio.run(main())


@pytest.mark.parametrize(
    ("closing", "responses", "kind"),
    [
        (True, [[object()]], Produced),
        (False, [[object()]], Produced),
        (True, [[]], TransactionAborted),
        (False, [[]], TransactionAborted),
        (True, [KafkaUnavailable(), TimeoutError(), [object()]], Produced),
        (False, [KafkaUnavailable(), []], KafkaTimeout),
    ],
)
def test_the_topic_tells_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, closing: bool, responses: list[Any], kind: type
) -> None:
    """Its last record can be read, or is passed over. With a record that frees a key, it is read until then."""
    assert type(outcome_of(monkeypatch, [*responses], closing=closing)) is kind


async def test_what_waits_is_taken_back_at_its_limit_and_what_is_being_written_is_not() -> None:
    """Who sends it again would otherwise have it twice."""
    producers = transactional.TransactionalProducers(KafkaConfig(), ProducerConfig(), "x")
    waiting, claimed = TransactionJob([RECORD], None), TransactionJob([RECORD], None)
    assert claimed.claim()
    for job in (waiting, claimed):
        producers._withdraw(job)
    assert isinstance(waiting.response.result()[0], KafkaUnavailable)
    assert not waiting.claim()
    assert not claimed.response.done()


class RefusingClient:
    """Refuses each batch as too large; a second client is not there."""

    opened: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, kafka: KafkaConfig, properties: dict[str, Any], limit_seconds: float) -> None:
        self.opened.append(dict(properties))
        if len(self.opened) > 1:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        self.producer = self

    def write(self, request: WriteRequest, has_failed: Any) -> None:
        request.reported(0, len(request.records), [NotWritten(("t", 0), RecordTooLarge())] * len(request.records))

    def has_statistics(self) -> bool:
        return True

    def problem(self) -> str:
        return ""

    def begin(self, *_: Any) -> None:
        """Do nothing, as the other calls."""

    transact = close = flush = begin


async def test_a_refused_batch_blames_no_record_if_no_client_writes_them_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be answered 413, or become a dead letter, although it was never tried by itself."""
    monkeypatch.setattr(transactional, "TransactionalClient", RefusingClient)
    properties = {"transactional.id": "x", "batch.size": 1_000_000, "transaction.timeout.ms": 10_000}
    security = SimpleNamespace(make=lambda: dict(properties), must_replace=lambda client: False)
    job, posted = TransactionJob([RECORD, RECORD], None), list[TransactionJob]()
    writer = transactional._Writer(KafkaConfig(), security, queue.SimpleQueue(), posted.append)
    assert job.claim()
    writer._open()
    writer._write([job])
    assert [type(result) for result in posted[0].results] == [KafkaUnavailable] * 2
    first, alone = RefusingClient.opened
    assert alone["batch.size"] == 1
    assert alone["transaction.timeout.ms"] > first["transaction.timeout.ms"]
