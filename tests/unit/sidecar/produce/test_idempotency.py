"""Keys: what is remembered, what is refused, what is read back."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest

from headrace import errors
from headrace.config.producer_config import IdempotencyConfig, ProducerConfig
from headrace.kafka import compacted_table
from headrace.records import OutgoingRecord
from headrace.runtime.telemetry.correlation import caller
from headrace.sidecar.produce.idempotency import Idempotency, RememberedRequests
from headrace.sidecar.produce.produce import ProduceService
from headrace.sidecar.produce.produce_response import EncodedResponse, Prepared
from headrace.sidecar.produce.transactions import PreparedTransaction, Transactions
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster

RECORD = OutgoingRecord("t", None, b"1")
KEYS = IdempotencyConfig().topic


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> MemoryCluster:
    """A cluster that has the topic of keys."""
    made = MemoryCluster({"t": 1, "t2": 1, KEYS: 1})
    made.read_by(monkeypatch, compacted_table)
    return made


class Keys:
    """The service on that, one request after another."""

    def __init__(self, kafka: MemoryCluster, clock: ManualClock | None = None) -> None:
        self.kafka, self.clock = kafka, clock or ManualClock()
        produce = ProduceService(ProducerConfig(), None, None, None)  # type: ignore[arg-type]  # not asked
        self.transactions = Transactions(
            ProducerConfig(properties={"delivery.timeout.ms": 500}), produce, kafka.producer
        )  # type: ignore[arg-type]
        self.service = Idempotency(IdempotencyConfig(), kafka, lambda: None, self.clock)  # type: ignore[arg-type]

    async def __aenter__(self) -> Keys:
        await self.service.start()
        await self.clock.settle()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.stop()

    async def prepare(self) -> PreparedTransaction:
        return self.transactions.of_produce(Prepared([RECORD], None, None))

    def send(self, key: bytes = b"k", target: str = "t", request: bytes = b"r") -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.serve(key, target, request))

    async def serve(self, key: bytes, target: str, request: bytes) -> tuple[EncodedResponse, bool]:
        """Return the response, and whether it belongs to an earlier request."""
        needed = await self.service.load(key, target, request, self.prepare)
        if isinstance(needed, EncodedResponse):
            return needed, True
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.transactions.do(needed, done.set_result)
        return self.transactions.respond(needed, await done), False

    async def write(self, *outcome: errors.HeadraceError, **request: Any) -> Any:
        self.kafka.producer.refuse(*outcome)
        return await self.send(**request)


async def test_a_key_that_comes_again_has_the_same_response(kafka: MemoryCluster) -> None:
    """And writes nothing; the entry holds a hash of the request, not the request."""
    async with Keys(kafka) as keys:
        first, replayed = await keys.write(request=b"a secret")
        assert (first.status, replayed, len(kafka.producer.records)) == (200, False, 2)
        again, replayed = await keys.send(request=b"a secret")
        assert (again.status, again.body, replayed, len(kafka.producer.records)) == (200, first.body, True, 2)
        entry = kafka.producer.records[1]
        assert entry.topic == KEYS
        assert first.body in (entry.value or b"")
        assert b"secret" not in (entry.value or b"") + (entry.key or b"")


async def test_a_key_counts_per_caller_and_topic_and_for_one_request(kafka: MemoryCluster) -> None:
    """Others may take the same word; another request under it is a conflict, also while the first one runs."""
    async with Keys(kafka) as keys:
        await keys.write()
        with pytest.raises(errors.IdempotencyKeyReused):
            await keys.send(request=b"other")
        await keys.write(target="t2", request=b"other")
        caller.set("somebody")
        await keys.write(request=b"other")
        kafka.producer.hold()
        running = keys.send(key=b"k2")
        await keys.clock.settle()
        with pytest.raises(errors.IdempotencyKeyReused):
            await keys.send(key=b"k2", request=b"other")
        with pytest.raises(errors.IdempotencyKeyBusy):
            await keys.send(key=b"k2")
        kafka.producer.release()
        await running
        assert (await keys.send(key=b"k2"))[1]


async def test_a_request_that_failed_is_not_remembered(kafka: MemoryCluster) -> None:
    """It may be sent again, also with another body."""
    async with Keys(kafka) as keys:
        assert (await keys.write(errors.TransactionAborted()))[0].status == 503
        response, replayed = await keys.write(request=b"other")
        assert (response.status, replayed) == (200, False)


async def test_a_request_in_doubt_keeps_its_key_until_its_outcome_is_known(
    kafka: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """504 and unknown; then busy; then the response it should have had."""
    monkeypatch.setattr("headrace.sidecar.produce.transactions._GRACE_SECONDS", 0)
    async with Keys(kafka) as keys:
        keys.transactions._settings = ProducerConfig(properties={"delivery.timeout.ms": 100})
        kafka.producer.hold()
        unknown, _ = await keys.send()
        assert (unknown.status, b'"outcome":"unknown"' in unknown.body) == (504, True)
        with pytest.raises(errors.IdempotencyKeyBusy):
            await keys.send()
        kafka.producer.release()
        await keys.clock.settle()
        response, replayed = await keys.send()
        assert (response.status, replayed) == (200, True)


async def test_a_request_whose_client_leaves_before_it_is_sent_lets_go_of_its_key(kafka: MemoryCluster) -> None:
    """Nothing was written, so it may be sent again."""
    async with Keys(kafka) as keys:
        with pytest.raises(asyncio.CancelledError):
            await keys.service.load(b"k", "t", b"r", AsyncMock(side_effect=asyncio.CancelledError))
        assert (await keys.write())[0].status == 200


async def test_a_cancelled_outcome_is_unknown(kafka: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """No callback fails, and the key stays in use."""
    async with Keys(kafka) as keys:
        problems: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        outcome = asyncio.get_running_loop().create_future()
        monkeypatch.setattr(kafka.producer, "submit", lambda *_: outcome)
        sent = keys.send()
        await keys.clock.settle()
        outcome.cancel()
        assert (await sent)[0].status == 504
        with pytest.raises(errors.IdempotencyKeyBusy):
            await keys.send()
        assert problems == []


async def test_entries_are_read_back_as_far_as_the_window_goes(kafka: MemoryCluster) -> None:
    """What another process of the same name wrote is answered as it would have; what is too old is not."""
    clock = ManualClock()
    async with Keys(kafka, clock) as keys:
        await keys.write()
    entry = kafka.producer.records[1]
    for age, known in ((599, True), (601, False)):
        kafka.empty()
        kafka.write(entry, int((clock.time() - age) * 1000))
        kafka.write(OutgoingRecord(KEYS, b"x", b"\x09another version"), int((clock.time() - age) * 1000))
        async with Keys(kafka, clock) as keys:
            assert len(keys.service.window) == known
            if known:
                assert (await keys.send())[1]


async def test_until_the_keys_are_known_requests_get_503(kafka: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written, and the response says what is waited for."""
    monkeypatch.setattr("headrace.sidecar.produce.idempotency._WAIT_SECONDS", 0.01)
    kafka.failure = errors.KafkaUnavailable("no broker")
    async with Keys(kafka) as keys:
        with pytest.raises(errors.KafkaUnavailable, match="no broker"):
            await keys.send()
        assert kafka.producer.records == []
        kafka.failure = None
        await keys.clock.advance(1)
        assert (await keys.write())[0].status == 200


@pytest.mark.parametrize("key", [b"", b"x" * 256, b"\xe9"])
async def test_a_key_is_visible_ascii(kafka: MemoryCluster, key: bytes) -> None:
    """1 to 255 characters."""
    async with Keys(kafka) as keys:
        with pytest.raises(errors.InvalidRequest):
            await keys.send(key=key)


def test_the_window_is_bounded_in_time_keys_and_bytes() -> None:
    """The oldest goes first; a response that comes again takes its old one's place."""
    clock = ManualClock()
    window = RememberedRequests(10, clock, max_keys=3, max_bytes=3000)
    now = clock.time()
    for number in range(5):
        window.remember(b"%d" % number, b"r", b"a", now + number)
    assert [window.find(b"%d" % number) is not None for number in range(5)] == [False, False, True, True, True]
    window.remember(b"2", b"r", b"b", now + 5)
    assert (len(window), window.find(b"2").response) == (3, b"b")  # type: ignore[union-attr]
    window.remember(b"5", b"r", b"x" * 2000, now + 6)
    assert (len(window), window.find(b"3")) == (2, None)
    asyncio.run(clock.advance(15.5))
    assert (window.find(b"2"), len(window)) == (None, 1)
    window.remember(b"6", b"r", b"x" * 4000, now + 16)
    assert len(window) == 0
