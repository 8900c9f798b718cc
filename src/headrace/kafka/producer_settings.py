"""From our producer settings to the client's properties: the one place of milliseconds and librdkafka's names."""

from __future__ import annotations

from typing import Any

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka.properties import client_properties


def producer_properties(kafka: KafkaConfig, settings: ProducerConfig, client_id: str) -> dict[str, Any]:
    """Return the client properties of a producer.

    Raises:
        ConfigError: A property is not allowed.
    """
    return {
        **client_properties(kafka, client_id),
        "acks": "all",
        "enable.idempotence": True,
        "max.in.flight.requests.per.connection": 5,
        "partitioner": "murmur2_random",
        "linger.ms": settings.linger_seconds * 1000,
        "compression.type": settings.compression,
        "delivery.timeout.ms": int(settings.delivery_timeout_seconds * 1000),
        "queue.buffering.max.messages": 2_000_000,
        "queue.buffering.max.kbytes": settings.max_pending_bytes // 512 + 16_384,
    }
