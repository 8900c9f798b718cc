"""What a delivery report becomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.errors import KafkaTimeout, RecordRefused
from headrace.kafka import Admin
from headrace.kafka.producer import Producer
from headrace.kafka.producer_client import Claim, ProducerClient, Request
from headrace.records import NO_OFFSET, OutgoingRecord, Produced
from headrace.runtime import Deadline, SystemClock


def result_of(offset: int, *, acked: bool) -> object:
    """Return what a request holds after the report of its one record."""
    posted: list[Request] = []
    records = [OutgoingRecord("t", None, b"", [], 0, 0)]
    weak = {"enable.idempotence": False, "acks": "0"}
    settings = ProducerConfig(properties={} if acked else weak)
    client = ProducerClient("p", Admin(KafkaConfig()), settings)
    request = Request(records, Claim(("t", 0), 0), posted.append, lambda results: None, client.result)
    request.reported(0, None, confluent_kafka.Message(topic="t", partition=2, offset=offset))
    assert posted == [request]
    return request.results[0]


@pytest.mark.parametrize("acked", [True, False])
def test_an_acknowledged_record_is_where_kafka_says(acked: bool) -> None:
    """Partition and offset are those of the report."""
    assert result_of(7, acked=acked) == Produced(2, 7)


def test_a_record_without_an_offset_is_no_ok() -> None:
    """The leader recognised a repeat whose first attempt it no longer has at hand: written, nobody says where."""
    result = result_of(-1001, acked=True)
    assert isinstance(result, KafkaTimeout)
    assert "written to partition 2" in result.description


def test_without_acknowledgement_no_offset_is_expected() -> None:
    """With acks 0 the client has none to tell."""
    assert result_of(-1001, acked=False) == Produced(2, NO_OFFSET)


async def test_a_request_without_records_is_answered_in_a_context_of_its_own() -> None:
    """As any other: so nothing of its caller stays where the next request comes from."""
    name: ContextVar[str] = ContextVar("name", default="")
    done: list[object] = []
    producer = Producer(KafkaConfig(), ProducerConfig())
    producer.send([], lambda results: done.append((results, name.set("me"))))
    assert not done
    await asyncio.sleep(0)
    assert len(done) == 1
    assert name.get() == ""
    await producer.stop()


@asynccontextmanager
async def producing(delivery_timeout_seconds: float = 30) -> AsyncIterator[Producer]:
    """Run a producer on a cluster without brokers."""
    settings = ProducerConfig(properties={"delivery.timeout.ms": 1000 * delivery_timeout_seconds})
    producer = Producer(KafkaConfig(bootstrap_servers="127.0.0.1:1"), settings)
    await producer.start()
    yield producer
    await producer.stop()


async def test_a_long_request_that_is_cancelled_gives_its_room_back() -> None:
    """Records that the client did not get yet count as refused."""
    async with producing(0.5) as producer:
        request = asyncio.ensure_future(producer.produce([OutgoingRecord("t", None, b"1")] * 5000, sliced=True))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(request), 0.01)
        assert producer.pending_bytes
        request.cancel()
        await producer.drain(Deadline(SystemClock(), 60))
        with pytest.raises(asyncio.CancelledError):
            await request
        assert producer.pending_bytes == 0


async def test_a_record_that_the_client_cannot_take_fails_alone() -> None:
    """Whatever the client raises, the request ends and gives its room back."""
    async with producing() as producer:
        odd = OutgoingRecord("t", None, b"1", partition="1")  # type: ignore[arg-type]
        (result,) = await producer.produce([odd])
        assert isinstance(result, RecordRefused)
        assert "did not take the record" in result.description
        assert producer.pending_bytes == 0
