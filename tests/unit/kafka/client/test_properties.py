"""Which client properties users may set."""

from __future__ import annotations

from pathlib import Path

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.kafka.client.properties import client_properties


def test_token_servers_are_checked_with_the_authorities_of_the_system() -> None:
    """Kafka's client looks for them only where they are on the system that it was built on."""
    oauth = {"token_url": "https://localhost:1/token", "client_id": "a", "client_secret": "b"}
    security = KafkaSecurity.model_validate({"sasl": {"mechanism": "OAUTHBEARER", "oauth": oauth}})
    assert Path(client_properties(KafkaConfig(security=security), "me")["https.ca.location"]).is_file()
