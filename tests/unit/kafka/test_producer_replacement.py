"""A producer's client is replaced after changes of its files: in order, without loss, also while the process stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.producer_config import ProducerConfig
from headrace.kafka.client import library
from headrace.kafka.producer import Producer
from headrace.records import OutgoingRecord, Produced

LIMIT_SECONDS = 30


class Client:
    """A client whose records are acknowledged when the test says so."""

    made: list[Client]

    def __init__(self, _properties: dict[str, Any]) -> None:
        self.taken: list[bytes] = []
        self._reports: list[Callable[[], None]] = []
        self.acknowledges = False
        Client.made.append(self)

    def __len__(self) -> int:
        return len(self._reports)

    def produce(self, topic: str, value: bytes, *rest: Any) -> None:
        offset = len(self.taken)
        self.taken.append(value)
        record = SimpleNamespace(topic=lambda: topic, partition=lambda: 0, offset=lambda: offset, key=lambda: None)
        self._reports.append(lambda: rest[2](None, record))

    def poll(self, _seconds: float) -> None:
        if self.acknowledges:
            reports, self._reports = self._reports, []
            for report in reports:
                report()

    flush = poll

    def purge(self, *, in_flight: bool = True) -> None:
        self.acknowledges = True


@asynccontextmanager
async def producing(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Producer, KafkaSecurity]]:
    """Start a producer whose clients are those of the test."""
    Client.made = []
    monkeypatch.setattr(library, "Producer", Client)
    security = KafkaSecurity.model_validate({"sasl": {"mechanism": "PLAIN", "username": "a", "password": "p"}})
    producer = Producer(KafkaConfig(security=security, native="off"), ProducerConfig())
    await producer.start()
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            yield producer, security
    finally:
        await producer.stop()


def change_user(security: KafkaSecurity, *, after_refusal: bool = False) -> None:
    sasl = {"mechanism": "PLAIN", "username": "b", "password": "p"}
    security.use(KafkaSecurity.model_validate({"sasl": sasl}), after_refusal=after_refusal)


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 the state is that of another thread
        await asyncio.sleep(0.01)


async def test_the_new_client_gets_nothing_before_the_old_one_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """So records of a partition keep their order; every request is answered once."""
    responses: list[list[Any]] = []
    async with producing(monkeypatch) as (producer, security):
        producer.send([OutgoingRecord("t", None, b"1", [], 0, 0)], responses.append)
        change_user(security)
        await until(
            lambda: len(Client.made) > 1 and producer._client and producer._client._replacement.waiting is not None
        )
        for value in (b"2", b"3"):
            producer.send([OutgoingRecord("t", None, value, [], 0, 0)], responses.append)
        old, new = Client.made
        new.acknowledges = True
        for _ in range(20):
            await asyncio.sleep(0.01)
        assert (old.taken, new.taken, responses) == ([b"1"], [], [])
        old.acknowledges = True
        await until(lambda: len(responses) == 3)
        assert (old.taken, new.taken) == ([b"1"], [b"2", b"3"])
        assert responses == [[Produced(0, 0)], [Produced(0, 0)], [Produced(0, 1)]]
        assert len(Client.made) == 2


async def test_records_of_a_client_whose_login_was_refused_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """No broker answers that client any more: its records end at once, and the others follow."""
    responses: list[list[Any]] = []
    async with producing(monkeypatch) as (producer, security):
        producer.send([OutgoingRecord("t", None, b"1", [], 0, 0)], responses.append)
        change_user(security, after_refusal=True)
        await until(lambda: len(Client.made) > 1)
        Client.made[1].acknowledges = True
        producer.send([OutgoingRecord("t", None, b"2", [], 0, 0)], responses.append)
        await until(lambda: len(responses) == 2)
        assert len(Client.made) == 2
