"""A producer for records of which only the number that failed is asked: no report per record, nothing on the loop."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import confluent_kafka

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka.error_map import report_error
from headrace.kafka.producer_settings import producer_properties
from headrace.lifecycle import Service

_FULL_SECONDS = 0.1
_FLUSH_SECONDS = 0.1
_PORTION_RECORDS = 1000


class BulkProducer(Service):
    """Writes many records from a thread of the caller."""

    def __init__(self, kafka: KafkaConfig, settings: ProducerConfig, name: str) -> None:
        super().__init__(name)
        self._kafka, self._settings = kafka, settings
        self._stopped = threading.Event()
        self._fatal = False
        self._failed = 0
        self._why = ""
        self._client = self._new_client()

    async def stop(self) -> None:
        self._stopped.set()  # whoever writes ends within a moment
        await super().stop()

    def write(self, topic: str, records: Iterable[tuple[bytes, bytes]]) -> tuple[int, str]:
        """Write records and wait until Kafka has acknowledged them or they have failed. Call on one thread at a time.

        Args:
            topic: Where they go.
            records: Key and value of each.

        Returns:
            How many are not known to be written, and why.
        """
        if self._fatal:
            self._fatal, self._client = False, self._new_client()
        client, rest = self._client, iter(records)
        self._failed = 0
        while portion := list(itertools.islice(rest, _PORTION_RECORDS)):
            self._hand_over(client, topic, portion)
        while len(client):
            if self._stopped.is_set():
                client.purge()
            client.flush(_FLUSH_SECONDS)
        return self._failed, self._why

    def _hand_over(self, client: confluent_kafka.Producer, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        for key, value in records:
            while not self._produced(client, topic, key, value):
                client.poll(_FULL_SECONDS)
                if self._stopped.is_set():
                    self._failed += 1
                    break

    def _produced(self, client: confluent_kafka.Producer, topic: str, key: bytes, value: bytes) -> bool:
        """Return whether the client has taken a record or refused it; if not, it is full."""
        try:
            client.produce(topic, value, key or None)
        except BufferError:
            return False
        except confluent_kafka.KafkaException as cause:
            self._report(cause.args[0], None)
        return True

    def _report(self, error: confluent_kafka.KafkaError, _: Any) -> None:
        self._failed += 1
        self._fatal = self._fatal or error.fatal()
        self._why = report_error(error, "produce").description

    def _new_client(self) -> confluent_kafka.Producer:
        properties = producer_properties(self._kafka, self._settings, f"headrace-{self.name}")
        callbacks: dict[str, Any] = {"on_delivery": self._report, "delivery.report.only.error": True}
        return confluent_kafka.Producer({**properties, **callbacks})
