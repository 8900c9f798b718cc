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
from headrace.errors import KafkaTimeout, KafkaUnauthorized, ProducerQueueFull, RecordRefused
from headrace.kafka import Admin
from headrace.kafka.producer import Producer
from headrace.kafka.producer_limits import BatchLimits, key_of_request
from headrace.kafka.sent_request import Request
from headrace.records import NO_OFFSET, OutgoingRecord, Produced
from headrace.runtime import Deadline, SystemClock


def result_of(offset: int, *, acked: bool) -> object:
    """Return what a request holds after the report of its one record."""
    posted: list[Request] = []
    key = key_of_request([OutgoingRecord("t", None, b"", [], 0, 0)], 1)
    request = Request(1, 0, key, posted.append, lambda results: None, acked)
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


async def limit_of(topic: str) -> dict[str, str]:
    """Tell the limit that a topic has as its name, if that is a number."""
    if not topic.isdigit():
        raise KafkaUnauthorized
    return {"max.message.bytes": topic}


@asynccontextmanager
async def producing(delivery_timeout_seconds: float = 30) -> AsyncIterator[tuple[Producer, Admin]]:
    """Run a producer on a cluster without brokers."""
    admin = Admin(KafkaConfig(bootstrap_servers="127.0.0.1:1"))
    admin.batch_limits = BatchLimits(limit_of)
    settings = ProducerConfig(delivery_timeout_seconds=delivery_timeout_seconds)
    producer = Producer(admin.config, settings, admin=admin)
    await producer.start()
    yield producer, admin
    await producer.stop()


async def test_a_topic_changes_its_client_only_without_records_in_flight() -> None:
    """Whichever topic of its request the records in flight are of: two clients would not keep their order."""
    async with producing(0.5) as (producer, admin):
        first, second = OutgoingRecord("a", b"k", b"1"), OutgoingRecord("b", b"k", b"1")
        producer.send([first, second], lambda results: None)
        too_large = confluent_kafka.KafkaError(confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE)
        admin.batch_limits.refusal(too_large, confluent_kafka.Message(topic="b", value=b"1"), 1_000_000)
        with pytest.raises(ProducerQueueFull, match="records are in flight"):
            await producer.produce([second])
        await producer.drain(Deadline(SystemClock(), 60))
        producer.send([second], lambda results: None)


async def test_topics_with_very_small_limits_share_one_client() -> None:
    """So there are nine clients at most, and the usual one."""
    async with producing() as (producer, admin):
        topics = [str((1 << power) + 256) for power in range(20)]
        for topic in topics:
            await admin.batch_limits.learn(topic)
        assert len({producer._client_of(topic) for topic in topics}) == 9
        assert {producer._client_of(topic)._settings.batch_bytes for topic in topics[:12]} == {1}


async def test_a_long_request_that_is_cancelled_gives_its_room_back() -> None:
    """Records that the client did not get yet count as refused."""
    async with producing(0.5) as (producer, admin):
        await admin.batch_limits.learn("t")
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
    async with producing() as (producer, _):
        odd = OutgoingRecord("t", None, b"1", partition="1")  # type: ignore[arg-type]
        (result,) = await producer.produce([odd])
        assert isinstance(result, RecordRefused)
        assert "did not take the record" in result.description
        assert producer.pending_bytes == 0
