"""Which client properties are taken, and what is said of the others."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.explain import known_keys
from headrace.config.kafka import CONSUMER_KEYS, PRODUCER_KEYS, KafkaConfig
from headrace.config.kafka_java import SECURITY_KEYS
from headrace.config.model import HeadraceConfig
from headrace.config.producer import ProducerConfig
from headrace.config.section import Section

KAFKA_FUNDAMENTALS = """
acks batch.size bootstrap.servers buffer.memory delivery.timeout.ms enable.idempotence key.serializer linger.ms
max.block.ms max.in.flight.requests.per.connection metadata.max.age.ms request.timeout.ms retries transactional.id
value.serializer
"""
"""Every key of the seed's chapters on producers and transactions."""
KAFKA_PRODUCER_YML = """
acks auditEnabled auditTarget auditTopic basic.auth.credentials.source basic.auth.user.info batch.size
bootstrap.servers buffer.memory client.rack enable.idempotence injectCallerId injectOpenTracing key.serializer
keyFormat linger.ms max.in.flight.requests.per.connection max.request.size retries sasl.jaas.config sasl.mechanism
schema.registry.auto.register.schemas schema.registry.cache schema.registry.ssl.truststore.location
schema.registry.ssl.truststore.password schema.registry.url security.protocol ssl.endpoint.identification.algorithm
ssl.truststore.location ssl.truststore.password topic value.serializer valueFormat transactional.id
transaction.timeout.ms transactional.id.expiration.ms max.message.size
"""
"""Every key of light-4j's file, those that are commented out and those of its samples too."""


KAFKA_FUNDAMENTALS_CONSUMERS = """
auto.offset.reset enable.auto.commit auto.commit.interval.ms offsets.retention.minutes fetch.max.wait.ms fetch.min.bytes
partition.assignment.strategy session.timeout.ms heartbeat.interval.ms max.poll.interval.ms max.poll.records
isolation.level
"""
"""Every key of the seed's chapters on consumers and on reading transactions."""
KAFKA_CONSUMER_YML = """
key.deserializer value.deserializer enable.auto.commit auto.offset.reset group.id fetch.max.bytes max.poll.records
max.partition.fetch.bytes deadLetterEnabled deadLetterTopicExt auditEnabled auditTarget auditTopic useNoWrappingAvro
topic keyFormat valueFormat waitPeriod backendApiHost backendApiPath maxConsumerThreads serverId requestMaxBytes
requestTimeoutMs fetchMinBytes instanceTimeoutMs iteratorBackoffMs backendConnectionReset batchRollbackThreshold
maxRetries retryDelayMs
"""
"""Every key of light-4j's file that its producer does not have too."""
NUCLIO_TRIGGER = """
topics consumerGroup initialOffset balanceStrategy sessionTimeout heartbeatInterval maxProcessingTime rebalanceTimeout
maxWaitTime fetchMin fetchDefault fetchMax
"""
"""The attributes of Nuclio's trigger that are settings of a consumer."""


def misfit(section: type[Section], name: str) -> str:
    with pytest.raises(ValidationError) as raised:
        section.model_validate({"properties": {name: "x"}})
    return raised.value.errors()[0]["msg"]


def test_every_producer_key_of_the_seeds_is_in_the_table() -> None:
    """And a key of light-4j's file is there with its default."""
    assert set(KAFKA_FUNDAMENTALS.split()) | set(KAFKA_PRODUCER_YML.split()) <= PRODUCER_KEYS.keys()
    assert {name for name in KAFKA_PRODUCER_YML.split() if not PRODUCER_KEYS[name].light_4j} == set()


def test_every_consumer_key_of_the_seeds_is_in_the_table() -> None:
    """And a key of light-4j's file is there with its default."""
    nuclio, light_4j = set(NUCLIO_TRIGGER.split()), set(KAFKA_CONSUMER_YML.split())
    assert set(KAFKA_FUNDAMENTALS_CONSUMERS.split()) | light_4j | nuclio <= CONSUMER_KEYS.keys()
    assert {name for name in light_4j if not CONSUMER_KEYS[name].light_4j} == set()


@pytest.mark.parametrize("name", [*PRODUCER_KEYS, *CONSUMER_KEYS])
def test_a_producer_key_is_taken_or_answered_with_the_way_out(name: str) -> None:
    """Whoever writes a key of Java's client or light-4j is told where it went."""
    for section in (KafkaConfig, ProducerConfig):
        try:
            section.model_validate({"properties": {name: "x"}})
        except ValidationError as refused:
            assert "is not taken here: " in str(refused)


def test_every_setting_the_table_names_exists() -> None:
    """A name in it is a section, a field of one, or a property that is taken."""
    for key in CONSUMER_KEYS.values():
        if not key.setting.startswith("nothing: "):
            section, _, field = key.setting.split("`")[1].partition(".")
            model = ReactiveConsumerConfig if section in ReactiveConsumerConfig.model_fields else HeadraceConfig
            kind = model.model_fields[section].annotation
            assert not field or field in kind.model_fields, key.setting  # type: ignore[union-attr]
    for key in PRODUCER_KEYS.values():
        for named in key.setting.split("`")[1::2]:
            section, _, field = named.partition(".")
            if section not in HeadraceConfig.model_fields or not field:
                continue
            kind: Any = HeadraceConfig.model_fields[section].annotation
            if field.startswith("properties."):
                kind(properties={field.removeprefix("properties."): "x"})
            else:
                assert field.split(".")[-1] in known_keys(tuple(named.split(".")[:-1])), named


@pytest.mark.parametrize(("name", "setting"), SECURITY_KEYS.items())
def test_a_property_of_tls_and_login_names_its_setting(name: str, setting: str) -> None:
    """It is translated at load; elsewhere it is refused with a setting that exists."""
    assert setting.split(".")[-1] in known_keys(("kafka", "security", *setting.split(".")[:-1]))
    for section in (KafkaConfig, ProducerConfig):
        assert f"is not taken here: set kafka.security.{setting}, which all clients use" in misfit(section, name)


@pytest.mark.parametrize(
    ("section", "name", "says"),
    [
        (KafkaConfig, "enable.auto.commit", "Headrace commits what has ended"),
        (KafkaConfig, "group.id", "consumerGroup"),
        (KafkaConfig, "acks", "is not taken here: set producer.acks"),
        (KafkaConfig, "request.required.acks", "set producer.acks"),
        (KafkaConfig, "message.max.bytes", "set producer.max_record_bytes"),
        (KafkaConfig, "max.block.ms", "gets 503 at once"),
        (KafkaConfig, "sticky.partitioning.linger.ms", "set producer.properties.sticky.partitioning.linger.ms"),
        (KafkaConfig, "plugin.library.paths", "not on the list"),
        (KafkaConfig, "sasl.pasword", "did you mean sasl.password"),
        (ProducerConfig, "isolation.level", "set kafka.properties.isolation.level"),
        (ProducerConfig, "socket.timeout.ms", "set producer.request_timeout_seconds"),
        (ProducerConfig, "plugin.library.paths", "not on the list"),
    ],
)
def test_other_properties_are_refused_with_the_way_out(section: type[Section], name: str, says: str) -> None:
    """What is ours names our setting, what is misspelt the nearest name, the rest that it is not allowed."""
    assert says in misfit(section, name)
