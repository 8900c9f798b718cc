"""What a delivery report becomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import KafkaTimeout, RecordRefused
from headrace.kafka import Admin
from headrace.kafka.polled_client import PolledClient
from headrace.kafka.producer import Producer
from headrace.kafka.producer_client import ProducerClient
from headrace.kafka.write_request import Claim, WriteRequest
from headrace.records import NO_OFFSET, OutgoingRecord, Produced
from headrace.runtime import Deadline, LoopBridge, SystemClock


@pytest.mark.parametrize(
    ("offset", "acks", "result"),
    [(7, "all", Produced(2, 7)), (7, "0", Produced(2, 7)), (-1001, "0", Produced(2, NO_OFFSET)), (-1001, "all", None)],
)
async def test_a_record_is_where_the_report_says(offset: int, acks: str, result: Produced | None) -> None:
    """With `acks: 0` there is no offset. Otherwise the leader knows a repeated record, but not where it is."""
    posted: list[WriteRequest] = []
    settings = ProducerConfig(properties={} if acks == "all" else {"enable.idempotence": False, "acks": "0"})
    kafka = KafkaConfig(native="off")
    bridge = LoopBridge(asyncio.get_running_loop(), posted.extend)
    client = ProducerClient("p", Admin(kafka), settings, bridge, lambda cause: None)
    assert isinstance(client._client, PolledClient)
    records = [OutgoingRecord("t", None, b"", [], 0, 0)]
    request = WriteRequest(records, Claim(("t", 0), 0), posted.append, None, [None] * len(records))
    client._client._reported(request, 0, None, confluent_kafka.Message(topic="t", partition=2, offset=offset))
    assert posted == [request]
    found = request.results[0]
    assert found == result if result else isinstance(found, KafkaTimeout) and "to partition 2" in found.description


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
