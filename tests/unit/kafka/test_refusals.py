"""What is not handed over to a client while no broker answers."""

from __future__ import annotations

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import KafkaUnavailable
from headrace.kafka import Admin, Producer, Reachability, TransactionalProducers
from headrace.records import OutgoingRecord
from headrace_devkit.testing import ManualClock

NOWHERE = KafkaConfig(bootstrap_servers="127.0.0.1:1")
RECORD = OutgoingRecord("t", None, b"1")


async def test_nothing_is_handed_over_when_no_broker_has_answered_for_a_while() -> None:
    """Producer and transactions refuse at once after `unreachable_seconds`; the producer of dead letters waits."""
    clock = ManualClock()
    seen = Reachability(NOWHERE, clock)
    settings = ProducerConfig(unreachable_seconds=2)
    admin = Admin(NOWHERE, seen)
    producer = Producer(NOWHERE, settings, admin=admin, refuses=True)
    inner = Producer(NOWHERE, settings, "inner", admin)
    transactions = TransactionalProducers(NOWHERE, settings, "x", admin=admin)
    for service in (producer, inner, transactions):
        await service.start()
    began = clock.monotonic()
    await clock.advance(3)
    seen.record_attempt(began, False)
    for submit in (producer.produce([RECORD]), _submitted(transactions)):
        with pytest.raises(KafkaUnavailable, match="nothing of this request was sent"):
            await submit
    assert producer.pending_bytes == 0
    inner.send([RECORD], lambda results: None)
    assert inner.pending_bytes > 0
    for service in (producer, inner, transactions):
        await service.stop()


async def _submitted(transactions: TransactionalProducers) -> None:
    await transactions.submit([RECORD])
