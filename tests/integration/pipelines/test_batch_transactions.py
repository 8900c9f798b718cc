"""Numbered batches on a real broker: each visible whole or not at all, and numbered by the transaction itself."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Callable
from typing import Any

import confluent_kafka
import pyarrow
import pytest

from headrace.errors import ConfigError, KafkaUnavailable, RecordTooLarge, TransactionAborted
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import kafka_settings
from headrace_pipelines.sinks import batch_transactions
from headrace_pipelines.sinks.batch_transactions import BATCHES_TOPIC, BatchTransactions


@pytest.fixture
def make(kafka: Cluster) -> Callable[..., BatchTransactions]:
    """Make producers on the shared broker, with a new name unless one is given."""
    with contextlib.suppress(confluent_kafka.KafkaException):
        kafka.create_topic(BATCHES_TOPIC, 1, {"cleanup.policy": "compact"})

    def of(name: str = "", seconds: float = 30.0) -> BatchTransactions:
        config = kafka_settings(kafka.bootstrap_servers)
        made.append(BatchTransactions(config, name or f"headrace.test.{uuid.uuid4().hex}", seconds))
        return made[-1]

    made: list[BatchTransactions] = []
    for _ in range(60):  # the first group of a broker waits for the topic of all offsets
        with contextlib.suppress(KafkaUnavailable):
            of().open()
            break
        time.sleep(0.5)
    return of


HEADERS = pyarrow.list_(pyarrow.struct([("key", pyarrow.string()), ("value", pyarrow.binary())]))


def table(*records: tuple[Any, ...]) -> Any:
    """Return records (topic, key, value, headers) as Spark gives them."""
    types = {"topic": pyarrow.string(), "key": pyarrow.binary(), "value": pyarrow.binary(), "headers": HEADERS}
    columns = zip(*records, strict=True) if records else ([], [], [], [])
    arrays = [pyarrow.array(values, kind) for values, kind in zip(columns, types.values(), strict=True)]
    return pyarrow.table(arrays, names=list(types))


def records(topic: str, *values: str) -> Any:
    return table(*((topic, None, value.encode(), None) for value in values))


def visible(site: Any, topic: str) -> list[str]:
    return [record.value.decode() for record in site.records(topic)]


def test_a_batch_and_its_number_become_visible_together(
    site: Scenario, topic: MakeTopic, make: Callable[..., BatchTransactions]
) -> None:
    """Keys, values, headers and nulls of several topics arrive; the next process continues behind them."""
    first, second = topic(), topic()
    batches = make("headrace.test." + first)
    assert batches.open() is None
    headers = [{"key": "h", "value": b"1"}, {"key": "n", "value": None}]
    batches.write(0, table((first, b"k", b"v", headers), (second, None, None, None)))
    batches.write(1, records(first, "w"))
    batches.write(2, table())
    site.wait_until(lambda: len(site.records(first)) == 2, "both batches")
    (found, other), (tombstone,) = site.records(first), site.records(second)
    assert (found.key, found.value, found.headers) == (b"k", b"v", [("h", b"1"), ("n", None)])
    assert (other.value, tombstone.key, tombstone.value) == (b"w", None, None)
    assert make("headrace.test." + first).open() == 3


def test_a_refused_record_keeps_its_whole_batch_out(
    site: Scenario, topic: MakeTopic, make: Callable[..., BatchTransactions]
) -> None:
    """The error names the topic; after it the same producer is opened again, and its number is unchanged."""
    name, small = topic(), topic(max_message_bytes=2000)
    batches = make()
    batches.open()
    with pytest.raises(RecordTooLarge, match=small):
        batches.write(0, table((name, None, b"a", None), (small, None, os.urandom(5000), None)))
    assert batches.open() is None
    batches.write(0, records(name, "b"))
    site.wait_until(lambda: visible(site, name) == ["b"], "the second attempt alone")


def test_a_batch_that_takes_too_long_names_the_remedy(
    topic: MakeTopic, make: Callable[..., BatchTransactions], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka has aborted its transaction by then."""
    name = topic()
    batches = make(seconds=2.0)
    batches.open()

    def slow(point: str) -> None:
        time.sleep(5)

    monkeypatch.setattr(batch_transactions, "reach", slow)
    with pytest.raises(TransactionAborted, match=r"a transaction has 2 s at most: lower trigger.max_records"):
        batches.write(0, records(name, "a"))
    assert batches.open() is None


def test_a_time_limit_above_that_of_the_brokers_is_refused(make: Callable[..., BatchTransactions]) -> None:
    """Kafka allows 15 minutes by default."""
    with pytest.raises(ConfigError, match=r"Set transaction.max.timeout.ms of the brokers to 100000000"):
        make(seconds=100_000.0).open()


def test_a_writer_that_was_overtaken_writes_nothing(
    site: Scenario, topic: MakeTopic, make: Callable[..., BatchTransactions]
) -> None:
    """It slept while another process wrote the batch. To open again would fence that one, and write it twice."""
    name = topic()
    batches = make("headrace.test." + name)
    batches.open()
    batches.write(0, records(name, "a"), "one")
    batches.close()
    other = make("headrace.test." + name)
    assert (other.open(), other.digest) == (1, "one")
    other.write(1, records(name, "b"), "two")
    with pytest.raises(TransactionAborted, match="another process has written batches of"):
        batches.write(1, records(name, "b"))
    assert (batches.open(), batches.digest) == (2, "two")
    assert visible(site, name) == ["a", "b"]
