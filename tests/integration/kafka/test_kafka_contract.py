"""A broker keeps the contract that the cluster in memory keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from headrace.config.producer_config import ProducerConfig
from headrace.kafka import Admin, Producer, TopicDirectory, TransactionalProducers, read_records
from headrace.kafka.client.native import native_module
from headrace.kafka.client.properties import client_properties
from headrace.records import TopicPartition
from headrace.runtime import SystemClock
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.secured import kafka_settings
from tests.kafka_contract import PROMISES, PROMISES_OF_GROUPS, Clients


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("check", [*PROMISES, *PROMISES_OF_GROUPS], ids=lambda check: check.__name__)
async def test_a_broker_keeps(kafka: Cluster, topic: MakeTopic, check: Any, native: str) -> None:
    """Its members get their partitions from the group's coordinator; with the compiled module and without."""
    settings, name = kafka_settings(kafka.bootstrap_servers, request_timeout_seconds=60, native=native), topic(2)
    if native == "auto" and native_module(settings) is None:
        pytest.skip("the compiled module was not built here")
    admin, written = Admin(settings), ProducerConfig()
    topics = TopicDirectory(admin, SystemClock())
    producer = Producer(settings, written, admin=admin)
    transactions = TransactionalProducers(settings, written, name, admin=admin)

    async def cut(partition: TopicPartition, before: int) -> None:
        client = AdminClient(client_properties(settings, "test"))
        for future in client.delete_records([confluent_kafka.TopicPartition(*partition, before)]).values():
            await asyncio.to_thread(future.result)

    services = (topics, producer, transactions)
    for service in services:
        await service.start()
    try:
        await check(Clients(name, admin, topics, producer, transactions, read_records, cut))
    finally:
        for service in services:
            await service.stop()
