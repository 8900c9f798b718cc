"""What a producer does that nobody has configured: the table of sidecar.md 13.3, and where we differ on purpose."""

from __future__ import annotations

from headrace.config.kafka import PRODUCER_KEYS, KafkaConfig, SchemaRegistryConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka.properties import producer_properties

DIFFERENT = {
    "batch.size": "1000000",  # filled by the linger time, not by one request
    "buffer.memory": str(67_108_864 // 512 + 16_384),  # KiB; the byte budget itself is kept before the client
    "retries": str(2**31 - 1),  # the delivery timeout ends them
}


def test_the_clients_defaults_are_those_of_light_4j() -> None:
    """Each that the client knows is the same, or stands here with the reason."""
    ours = producer_properties(KafkaConfig(), ProducerConfig(), "test")
    compared = set()
    for name, key in PRODUCER_KEYS.items():
        if key.light_4j and key.client in ours:
            value = ours[key.client]
            said = str(value).lower() if isinstance(value, bool | str) else f"{value:.0f}"
            assert said == DIFFERENT.get(name, key.light_4j), name
            compared.add(name)
    same = {"acks", "enable.idempotence", "linger.ms", "max.in.flight.requests.per.connection", "max.request.size"}
    assert compared == same | set(DIFFERENT) | {"bootstrap.servers"}


def test_the_other_defaults_of_producing() -> None:
    """Formats as the product says; nothing of the caller goes into records unless it is switched on (defect 16)."""
    ours = ProducerConfig()
    assert (ours.key_format, ours.value_format) == ("string", "json")
    assert (ours.auto_register, ours.forward_authorization, ours.caller_id, ours.always_200) == (True, False, "", False)
    assert str(SchemaRegistryConfig().url).rstrip("/") == PRODUCER_KEYS["schema.registry.url"].light_4j
