"""How to reach Kafka and the schema registry."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SecretStr

from headrace.config.client_properties import ClientProperties
from headrace.config.section import PositiveSeconds, Seconds, Section, Url


class KafkaConfig(Section):
    """How to reach Kafka."""

    bootstrap_servers: Annotated[str, Field(pattern=r"^[^\s,]+(\s*,\s*[^\s,]+)*$")] = "localhost:9092"
    """Brokers to ask first: `host:port`, comma separated."""
    properties: ClientProperties = Field(default_factory=dict)
    """Client properties by their librdkafka names, after an allow-list; a secret belongs in a `${file:}` reference."""
    create_topics: bool = True
    """Whether topics of ours (dead letter topics, result topics) are created when missing."""
    request_timeout_seconds: PositiveSeconds = 10.0
    """Longest wait for one answer to an administrative question."""


class SchemaRegistryConfig(Section):
    """How to reach the schema registry (Confluent's HTTP API)."""

    url: Url = "http://localhost:8081"
    """Base URL; the path of a compatible API may follow the host."""
    username: str = ""
    """User of HTTP basic authentication; empty for none."""
    password: SecretStr = SecretStr("")
    """Password of HTTP basic authentication."""
    timeout_seconds: PositiveSeconds = 5.0
    """Longest wait for one answer."""
    latest_seconds: Seconds = 30.0
    """How long an answer to "latest version of a subject" is reused, and a "not found" remembered."""
    avro_unions: Literal["wrapped", "plain"] = "wrapped"
    """Values of Avro's unions in JSON: `wrapped` in an object with the branch's name, or `plain`."""
