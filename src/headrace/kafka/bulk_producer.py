"""A producer for records of which only the number that failed is asked: no report per record, nothing on the loop."""

from __future__ import annotations

import asyncio
import functools
import itertools
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import confluent_kafka

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka.admin import Admin
from headrace.kafka.batch_limits import Batches, BatchLimits, wire_bytes
from headrace.kafka.error_map import report_error
from headrace.kafka.producer_settings import producer_properties
from headrace.lifecycle import Service

_FULL_SECONDS = 0.1
_PAUSE_SECONDS = 0.005
_LINGER_MS = 50
_PORTION_RECORDS = 1000


class BulkProducer(Service):
    """Writes many records from a thread of the caller, one at a time."""

    def __init__(
        self, kafka: KafkaConfig, settings: ProducerConfig, name: str, limits: BatchLimits | None = None
    ) -> None:
        super().__init__(name)
        self._limits = limits or BatchLimits(functools.partial(Admin, kafka), settings.batch_bytes)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kafka, self._settings = kafka, settings
        self._stopped = threading.Event()
        self._fatal = False
        self._failed = 0
        self._why = ""
        self._client = self._new_client()
        self._batches = Batches(self._limits, settings.batch_bytes, self._flush)

    @property
    def waiting(self) -> int:
        """Records that were taken and are neither acknowledged nor failed."""
        return len(self._client)

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def stop(self) -> None:
        self._stopped.set()  # whoever writes ends within a moment
        await super().stop()

    def write(self, topic: str, records: Iterable[tuple[bytes, bytes]]) -> tuple[int, str]:
        """Take records while the client has room, wait a moment, and say what failed since the last call.

        Args:
            topic: Where they go.
            records: Key and value of each; none, to wait for those of earlier calls.

        Returns:
            How many failed, of these and of earlier ones, and why.
        """
        if self._fatal and not self.waiting:
            self._fatal, self._client = False, self._new_client()
        if self._loop and not self._stopped.is_set():
            self._limits.learn_from_thread(topic, self._loop)
        client, rest, taken = self._client, iter(records), False
        while portion := list(itertools.islice(rest, _PORTION_RECORDS)):
            taken = True
            self._hand_over(client, topic, portion)
        if self._stopped.is_set():
            client.purge()
        if taken:
            client.poll(_PAUSE_SECONDS)  # so that the next call has many
        else:
            client.flush(_FULL_SECONDS)
        failed, self._failed = self._failed, 0
        return failed, self._why

    def _flush(self) -> None:
        while self.waiting and not self._stopped.is_set():
            self._client.flush(_FULL_SECONDS)

    def _hand_over(self, client: confluent_kafka.Producer, topic: str, records: Sequence[tuple[bytes, bytes]]) -> None:
        for key, value in records:
            self._batches.make_room(topic, wire_bytes(key, value))
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

    def _report(self, error: confluent_kafka.KafkaError, record: Any) -> None:
        self._failed += 1
        self._fatal = self._fatal or error.fatal()
        batch = self._batches.refusal(error, record) if record else None
        self._why = (batch or report_error(error, "produce")).description

    def _new_client(self) -> confluent_kafka.Producer:
        properties = producer_properties(self._kafka, self._settings, f"headrace-{self.name}")
        linger_ms = max(properties["linger.ms"], min(_LINGER_MS, properties["delivery.timeout.ms"] // 3))
        callbacks: dict[str, Any] = {"on_delivery": self._report, "delivery.report.only.error": True}
        return confluent_kafka.Producer({**properties, **callbacks, "linger.ms": linger_ms})
