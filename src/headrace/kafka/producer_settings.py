"""From our producer settings to the client's properties: the one place of milliseconds and librdkafka's names."""

from __future__ import annotations

from typing import Any

import confluent_kafka

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.errors import ConfigError
from headrace.kafka.properties import client_properties, opened


def check_properties(kafka: KafkaConfig, settings: ProducerConfig) -> None:
    """Let the client look at every property before anything is started; nothing waits for Kafka.

    Raises:
        ConfigError: It refuses one: a value of the wrong kind, a file that is not there.
    """
    quiet, name = {"log_level": 0}, "headrace-check"
    try:
        confluent_kafka.Producer({**producer_properties(kafka, settings, name), **quiet})
        confluent_kafka.Consumer({**client_properties(kafka, name, consumer=True), "group.id": name, **quiet}).close()
    except confluent_kafka.KafkaException as cause:
        text = cause.args[0].str().strip()
        raise ConfigError(
            f"kafka.properties or producer.properties: Kafka's client says: {text}: correct it"
        ) from cause


def producer_properties(kafka: KafkaConfig, settings: ProducerConfig, client_id: str) -> dict[str, Any]:
    """Return the client properties of a producer."""
    attempt_ms = int(settings.attempt_seconds * 1000)
    return {
        **client_properties(kafka, client_id),
        **opened(settings.properties),
        "acks": settings.acks,
        "enable.idempotence": settings.idempotence,
        "max.in.flight.requests.per.connection": settings.max_in_flight,
        "retries": settings.retries,
        "partitioner": "murmur2_random",
        "linger.ms": settings.linger_seconds * 1000,
        "batch.size": settings.batch_bytes,
        "message.max.bytes": settings.max_record_bytes,
        "compression.type": settings.compression,
        "compression.level": settings.compression_level,
        "delivery.timeout.ms": int(settings.delivery_timeout_seconds * 1000),
        # The client's own wait is the longer one: past it, it cuts the connection, and with it every other request.
        "request.timeout.ms": max(1, attempt_ms * 9 // 10),
        "socket.timeout.ms": max(10, attempt_ms),
        "queue.buffering.max.messages": 2_000_000,
        "queue.buffering.max.kbytes": settings.max_pending_bytes // 512 + 16_384,
    }
