"""Producer settings as the client gets them; the defaults are those of sidecar.md 13.3, or differ on purpose."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.kafka import PRODUCER_KEYS, KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.producer_config import ProducerConfig
from headrace.errors import ConfigError
from headrace.kafka.client.properties import check_properties, producer_properties
from yaml_table import table

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


def test_settings_reach_the_client_in_its_names_and_units() -> None:
    """Properties for the producer win over those for every client."""
    kafka = KafkaConfig(properties={"client.rack": "a", "retry.backoff.ms": 9, "socket.timeout.ms": 1})
    settings = ProducerConfig(
        properties={
            "request.timeout.ms": 2000,
            "linger.ms": 0.5,
            "batch.size": 7,
            "compression.type": "zstd",
            "retry.backoff.ms": 8,
            "batch.num.messages": 3,
        }
    )
    found = producer_properties(kafka, settings, "me")
    names = ("client.rack", "retry.backoff.ms", "batch.num.messages", "linger.ms", "batch.size", "compression.type")
    assert [found[name] for name in names] == ["a", 8, 3, 0.5, 7, "zstd"]
    assert (found["socket.timeout.ms"], found["request.timeout.ms"], found["acks"]) == (2000, 1800, "all")


@pytest.mark.parametrize(("properties", "said"), table(__file__, "what_the_client_refuses_is_a_fault_of_the_file"))
def test_what_the_client_refuses_is_a_fault_of_the_file(properties: dict[str, Any], said: str) -> None:
    """Before anything is started, for producers and consumers alike."""
    kafka = KafkaConfig(bootstrap_servers="127.0.0.1:1", properties=properties, security=KafkaSecurity(protocol="ssl"))
    with pytest.raises(ConfigError, match=said):
        check_properties(kafka, ProducerConfig())
