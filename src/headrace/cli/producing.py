"""A producer for the length of one command."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from headrace.config.model import KafkaConfig, ProducerConfig
from headrace.kafka import Producer
from headrace.lifecycle import Deadline, SystemClock


@contextlib.asynccontextmanager
async def producer(kafka: KafkaConfig) -> AsyncIterator[Producer]:
    """Start a producer, and on leaving wait for what is in flight, at most 5 s, and stop it."""
    made = Producer(kafka, ProducerConfig(), "cli")
    await made.start()
    try:
        yield made
        await made.drain(Deadline(SystemClock(), 5.0))
    finally:
        await made.stop()
