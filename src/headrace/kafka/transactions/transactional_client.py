"""A client that writes one transaction after the other, until a late request could disturb the next one."""

import contextlib
import time
from collections.abc import Callable
from typing import Any, Final

import confluent_kafka

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka.client.error_map import ClientErrors
from headrace.kafka.client.properties import producer_properties
from headrace.kafka.transactions.transaction_guard import TransactionGuard

STATISTICS_SECONDS: Final = 0.02
_STATISTICS_LIMIT_SECONDS: Final = 10.0
_FLUSH_SECONDS: Final = 0.1
BROKEN: Final = (confluent_kafka.KafkaException, SystemError)
"""What the client's calls raise; a SystemError if a fatal error and a delivery report meet in one call."""


def transactional_properties(kafka: KafkaConfig, settings: ProducerConfig, name: str, seconds: float) -> dict[str, Any]:
    """Return the properties of a client with a name; Kafka aborts a transaction that stays open for `seconds`."""
    return {
        **producer_properties(kafka, settings, f"headrace-{name}"),
        "transactional.id": name,
        "transaction.timeout.ms": int(seconds * 1000),
        "statistics.interval.ms": int(STATISTICS_SECONDS * 1000),
    }


def flush(producer: confluent_kafka.Producer, has_failed: Callable[[], bool]) -> None:
    """Wait until each record is reported. After a failure, drop the records that are still queued.

    Kafka's client sends no record of a transaction that failed: they would wait for `delivery.timeout.ms`.
    """
    while producer.flush(_FLUSH_SECONDS):
        if has_failed():
            producer.purge(in_flight=False)


class TransactionalClient:
    """One client, used by one thread. After a failure it is closed, because its sequence numbers may have a gap.

    All calls but `has_statistics` and `close` may raise one of `BROKEN`.
    """

    def __init__(self, properties: dict[str, Any], limit_seconds: float) -> None:
        """Open it, which fences its predecessor and so ends the transaction that it left open.

        Raises:
            KafkaException: Kafka refuses, or did not answer in time.
        """
        self._guard = TransactionGuard()
        self.producer = confluent_kafka.Producer({**properties, "stats_cb": self._guard.observe})
        """Takes records and offsets between `begin` and `commit`."""
        self.producer.init_transactions(limit_seconds)
        self._guard.opened(time.monotonic())

    def poll(self, seconds: float) -> None:
        """Read statistics and reports; statistics would fill the memory otherwise."""
        with ClientErrors():
            self.producer.poll(seconds)

    def has_statistics(self) -> bool:
        """Wait for statistics that are younger than the last transaction, and return whether there are any."""
        end = time.monotonic() + _STATISTICS_LIMIT_SECONDS
        with contextlib.suppress(*BROKEN):
            while not self._guard.fresh and time.monotonic() < end:
                self.poll(STATISTICS_SECONDS)
        return self._guard.fresh

    def problem(self) -> str:
        """Return why the client must not begin another transaction; empty if it may."""
        return self._guard.problem()

    def begin(self) -> None:
        """Begin a transaction, when there are statistics and no problem."""
        self._guard.begin()
        self.producer.begin_transaction()

    def commit(self) -> None:
        """Commit the transaction. If this raises, it may still have been committed, and must not be aborted."""
        with ClientErrors():
            self.producer.commit_transaction()
        self._guard.ended(time.monotonic())

    def close(self) -> None:
        """Drop the client without an abort, which could be wrong after a commit in doubt."""
        self.producer.purge()
