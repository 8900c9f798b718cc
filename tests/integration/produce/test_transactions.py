"""Transactions and idempotency keys over HTTP, on a real broker."""

import asyncio
import json
from typing import Any

import pytest
from confluent_kafka import Producer

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import KafkaUnavailable, ProducerQueueFull
from headrace.kafka import TransactionalProducers
from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster, MakeTopic, SharedHeadrace, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

pytestmark = pytest.mark.secured


def values(site: Any, topic: str, count: int) -> list[Any]:
    """Return what a reader at read_committed finds in a topic, once nothing in it is undecided any more.

    Kafka confirms a commit a moment before readers see it.
    """
    site.wait_until(lambda: len(site.records(topic)) >= count, f"{count} records in {topic}")
    return [json.loads(record.value) for record in site.records(topic)]


@pytest.fixture
def url(kafka: Cluster, module_headrace: SharedHeadrace) -> str:
    return str(module_headrace({"kafka": {"bootstrap_servers": kafka.bootstrap_servers}}).url)


def test_a_process_that_is_shut_out_says_so_and_goes_on(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace
) -> None:
    """Others take its names: a request of each producer fails for certain, and what it wrote is never visible."""
    name = topic()
    settings = {"transactions": {"id": name}}
    url = headrace({**site.config, "producer": settings}).url
    body = {"topics": [{"topic": name, "records": [{"value": 1}]}]}
    assert site.ask(f"{url}/transactions", body).status == 200
    for number in (0, 1):  # the process has two producers
        thief = Producer({"bootstrap.servers": site.kafka.bootstrap_servers, "transactional.id": f"{name}-{number}"})
        thief.init_transactions(120)
    responses = [site.ask(f"{url}/transactions", body) for _ in range(4)]
    refused = [response for response in responses if response.status != 200]
    assert 1 <= len(refused) <= 2
    for response in refused:
        assert (response.status, response.body["code"], response.headers["retry-after"]) == (503, "ERR40042", "1")
        assert response.body["topics"][0]["offsets"][0]["outcome"] == "fail"
    written = 1 + len(responses) - len(refused)
    assert values(site, name, written) == [1] * written


def test_what_waits_is_bounded_and_told_apart_from_what_is_in_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers: 503 at once above the bound, and after the limit a certain no for those that waited."""
    monkeypatch.setattr("headrace.kafka.transactions.producers._OPEN_SECONDS", 0.2)
    monkeypatch.setattr("headrace.kafka.transactions.producers.MAX_WAITING", 1)

    async def main() -> list[Any]:
        settings = ProducerConfig(properties={"delivery.timeout.ms": 300})
        producers = TransactionalProducers(KafkaConfig(bootstrap_servers="127.0.0.1:1"), settings, "nobody")
        await producers.start()
        try:
            waiting = producers.submit([OutgoingRecord("t", None, b"1")])
            with pytest.raises(ProducerQueueFull):
                producers.submit([OutgoingRecord("t", None, b"1")])
            return await asyncio.wait_for(waiting, 120)
        finally:
            await producers.stop()

    assert [type(result) for result in asyncio.run(main())] == [KafkaUnavailable]
