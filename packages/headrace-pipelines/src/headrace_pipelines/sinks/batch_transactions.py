"""Numbered batches of records, each written exactly once: one transaction per batch, with the number of the next one.

The number is committed as the offset of a consumer group without members, on the only partition of an internal topic.
The order matters: `open` first ends the transaction that a predecessor left open, and only then requests the number.
Source: KIP-98, KIP-447.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final

import confluent_kafka
from confluent_kafka import admin as kafka_admin

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.kafka.client.access import Right
from headrace.kafka.client.error_map import to_error
from headrace.kafka.client.properties import client_properties
from headrace.kafka.transactions.transactional_client import (
    BROKEN,
    NotWritten,
    TransactionalClient,
    transactional_properties,
)
from headrace.kafka.write_request import UNCOUNTED, WriteRequest
from headrace.records import OutgoingRecord, WrittenRecords
from headrace.runtime.failpoints import reach

BATCHES_TOPIC: Final = "_headrace-eos"
"""It never has records. Groups commit offsets on its only partition to count the batches of exactly-once sinks."""
_LIMIT_SECONDS: Final = 30.0
_RESPONSE_SECONDS: Final = 10.0
_SETTINGS: Final = ProducerConfig(properties={"linger.ms": 20, "batch.size": 262_144, "compression.type": "lz4"})


class BatchTransactions:
    """Writes batches with one transactional producer; all calls but `poll` come from one thread at a time."""

    def __init__(
        self, kafka: KafkaConfig, name: str, timeout_seconds: float, properties: Mapping[str, Any] | None = None
    ) -> None:
        """Prepare.

        Args:
            kafka: How to reach Kafka.
            name: The producer's name and the group's; a process with the same name fences this one.
            timeout_seconds: Kafka aborts a transaction that is still open after it.
            properties: Further properties of the producer.
        """
        self._kafka = kafka
        self._name = name
        self._properties = properties or {}
        self._timeout_seconds = timeout_seconds
        self._client: TransactionalClient | None = None
        self._group: Any = None
        self._next: int | None = None
        self.digest = ""
        """The digest that `write` got with the batch before the number that `open` returned."""
        self._refused: errors.HeadraceError | None = None
        """Why a record of this transaction is not written."""

    def open(self) -> int | None:
        """End the transaction that a predecessor left open, and return the number of the next batch.

        Returns:
            None if Kafka has no number for this name: nothing was written with it, or its offset has expired.

        Raises:
            HeadraceError: Kafka refuses or cannot be reached, or the topic of numbers is missing.
        """
        self.close()
        limit = {"delivery.timeout.ms": round(self._timeout_seconds * 1000)}
        settings = _SETTINGS.with_properties({**limit, **self._properties})
        properties = transactional_properties(self._kafka, settings, self._name, self._timeout_seconds)
        try:
            client = TransactionalClient(self._kafka, properties, _LIMIT_SECONDS)
            self._next = self._look_up()
        except confluent_kafka.KafkaException as cause:
            raise self._error(cause, f"open the transactional producer {self._name}") from cause
        self._client = client
        return self._next

    def write(self, number: int, rows: Any, digest: str = "") -> None:
        """Write a batch: its records and the number of the next batch become visible together.

        Args:
            number: Number of the batch.
            rows: Arrow table with the columns `topic`, `key`, `value` and `headers`, and perhaps `partition`.
            digest: Text that is kept with the number.

        Raises:
            HeadraceError: It failed, and the producer is closed. The next `open` shows whether it was written.
        """
        client = self._usable_client()
        began = time.monotonic()
        committing = False
        topics: set[str] = set()
        self._refused = None
        try:
            client.begin()
            for records in _records(rows):
                topics.update(record.topic for record in records)
                request = WriteRequest(records, UNCOUNTED, self._reported, None, [None] * len(records))
                if refused := client.write(request, self._has_failed):
                    raise refused[1]
            reach("batch.produced")
            client.flush(self._has_failed)
            offset = confluent_kafka.TopicPartition(BATCHES_TOPIC, 0, number + 1, digest)
            client.send_offsets([offset], self._group)
            reach("batch.numbered")
            committing = True
            client.commit()
            reach("batch.committed")
        except BROKEN as cause:
            failed = self._refused or self._error(cause, f"write batch {number}", *topics)
            if (seconds := time.monotonic() - began) >= self._timeout_seconds:
                text = f"This took {seconds:.0f} s, and a transaction has {self._timeout_seconds:g} s at most"
                hint = "lower trigger.max_records, or maxOffsetsPerTrigger of Spark's source"
                failed = errors.TransactionAborted(f"{failed.description} {text}: {hint}")
            with contextlib.suppress(*BROKEN):
                client.producer.purge()
                client.flush(self._has_failed)
                if not committing:  # a transaction that may have been committed is not aborted
                    client.producer.transact("abort_transaction", _RESPONSE_SECONDS)
            self.close()
            raise failed from cause
        self._next = number + 1

    def poll(self) -> None:
        """Read statistics, which would fill the memory otherwise; from any thread, and often."""
        client = self._client
        with contextlib.suppress(*BROKEN):
            if client:
                client.poll(0)

    def close(self) -> None:
        """Close the producer. A transaction that may have been committed is not aborted."""
        if self._client:
            self._client.close()
            self._client = None

    def _usable_client(self) -> TransactionalClient:
        """Return a client that no late request of an earlier transaction can disturb."""
        known = self._next
        is_usable = self._client and self._client.has_statistics() and not self._client.problem()
        if not is_usable and self.open() != known:
            raise errors.TransactionAborted(f"another process has written batches of {self._name}")
        assert self._client
        return self._client

    def _has_failed(self) -> bool:
        return self._refused is not None

    def _reported(self, request: WriteRequest) -> None:
        if type(request.results) is not WrittenRecords:
            found = (result.error if type(result) is NotWritten else result for result in request.results)
            self._refused = self._refused or next(
                (each for each in found if isinstance(each, errors.HeadraceError)), None
            )

    def _error(self, cause: Exception, doing: str, *topics: str) -> errors.HeadraceError:
        if not isinstance(cause, confluent_kafka.KafkaException):
            return errors.TransactionAborted(f"{doing}: {cause}")
        needed = [Right("Write", "transactional-id", self._name), Right("Read", "group", self._name)]
        needed += [Right("Read", "topic", BATCHES_TOPIC), *(Right("Write", "topic", topic) for topic in topics)]
        found = to_error(cause, doing, self._kafka, *needed)
        if cause.args[0].code() == confluent_kafka.KafkaError.INVALID_TRANSACTION_TIMEOUT:
            advice = f"Set transaction.max.timeout.ms of the brokers to {self._timeout_seconds * 1000:.0f} or more"
            return errors.ConfigError(f"{found.description} {advice}")
        return found

    def look_up(self) -> int | None:
        """Return the number of the next batch as `open` does, of a name for which only `record` stores numbers.

        Raises:
            HeadraceError: Kafka refuses or cannot be reached, or the topic of numbers is missing.
        """
        try:
            return self._look_up()
        except confluent_kafka.KafkaException as cause:
            raise self._error(cause, f"read the number of {self._name}") from cause

    def record(self, number: int, digest: str) -> None:
        """Store that a batch is written, outside a transaction: each of its parts has a number of its own.

        Raises:
            HeadraceError: Kafka refuses or cannot be reached.
        """
        offset = confluent_kafka.TopicPartition(BATCHES_TOPIC, 0, number + 1, digest)
        try:
            with self._member() as consumer:
                for stored in consumer.commit(offsets=[offset], asynchronous=False):
                    if stored.error:
                        raise confluent_kafka.KafkaException(stored.error)
        except confluent_kafka.KafkaException as cause:
            raise self._error(cause, f"store the number of {self._name}") from cause

    def create_topic(self) -> None:
        """Create the topic of numbers, compacted and with one partition, unless it exists.

        Raises:
            HeadraceError: Kafka refuses or cannot be reached.
        """
        topic = kafka_admin.NewTopic(BATCHES_TOPIC, 1, config={"cleanup.policy": "compact"})
        client = kafka_admin.AdminClient(client_properties(self._kafka, f"headrace-{self._name}"))
        try:
            client.create_topics([topic], operation_timeout=_LIMIT_SECONDS)[BATCHES_TOPIC].result(_LIMIT_SECONDS)
        except confluent_kafka.KafkaException as cause:
            if cause.args[0].code() != confluent_kafka.KafkaError.TOPIC_ALREADY_EXISTS:
                raise to_error(
                    cause, f"create {BATCHES_TOPIC}", self._kafka, Right("Create", "topic", BATCHES_TOPIC)
                ) from cause

    @contextlib.contextmanager
    def _member(self) -> Iterator[Any]:
        """Give a consumer of the group, which joins nothing. `committed` and `commit` are its only calls."""
        properties = client_properties(self._kafka, f"headrace-{self._name}", consumer=True)
        own = {"group.id": self._name, "isolation.level": "read_committed", "enable.auto.commit": False}
        consumer = confluent_kafka.Consumer({**properties, **own})
        try:
            topic = consumer.list_topics(BATCHES_TOPIC, _LIMIT_SECONDS).topics[BATCHES_TOPIC]
            if topic.error and topic.error.code() == confluent_kafka.KafkaError.UNKNOWN_TOPIC_OR_PART:
                text = "which counts the batches of exactly-once sinks: create it with one partition"
                raise errors.TopicNotFound(f"topic {BATCHES_TOPIC} does not exist, {text}", topic=BATCHES_TOPIC)
            if topic.error:
                raise confluent_kafka.KafkaException(topic.error)
            yield consumer
        finally:
            consumer.close()

    def _look_up(self) -> int | None:
        # Not by the administrative client: it crashes the process when the coordinator moves (librdkafka 2.16).
        with self._member() as consumer:
            try:
                partition = confluent_kafka.TopicPartition(BATCHES_TOPIC, 0)
                found = consumer.committed([partition], _RESPONSE_SECONDS)[0]
            except confluent_kafka.KafkaException:
                refused = consumer.poll(0)  # without a right on the group the call itself only times out
                if refused and refused.error():
                    raise confluent_kafka.KafkaException(refused.error()) from None
                raise
            if found.error:
                raise confluent_kafka.KafkaException(found.error)
            self._group = consumer.consumer_group_metadata()
        self.digest = found.metadata or ""
        return found.offset if found.offset >= 0 else None


def _records(rows: Any) -> Iterator[list[OutgoingRecord]]:
    for batch in rows.to_batches():
        columns = (batch.column(name).to_pylist() for name in ("topic", "key", "value", "headers"))
        has_partitions = "partition" in batch.schema.names
        partitions = batch.column("partition").to_pylist() if has_partitions else [None] * len(batch)
        yield [
            OutgoingRecord(topic, key, value, headers and [(each["key"], each["value"]) for each in headers], partition)
            for topic, key, value, headers, partition in zip(*columns, partitions, strict=True)
        ]
