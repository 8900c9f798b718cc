"""How a consumer takes part in its group: what reaches the client, what is refused, and what is only warned of."""

from __future__ import annotations

from typing import Any

import confluent_kafka
import pytest
from pydantic import ValidationError

from headrace.config.kafka import KafkaConfig
from headrace.config.membership import ConsumerConfig
from headrace.config.model import HeadraceConfig
from headrace.errors import ConfigError
from headrace.kafka.client.properties import member_properties
from yaml_table import table

BROAD: dict[str, Any] = table(__file__, "broad")


def test_every_setting_reaches_the_client_which_takes_it() -> None:
    """Numbers as text, and assignors by Java's classes too; a small fetch stays small."""
    found = member_properties(KafkaConfig(), "me", "g", ConsumerConfig(properties=BROAD))
    expected: dict[str, Any] = table(__file__, "every_setting_reaches_the_client")
    assert expected.items() <= found.items()
    confluent_kafka.Consumer(found).close()
    assert ConsumerConfig(properties={"group.instance.id": ""}) == ConsumerConfig()  # of a variable that is not set


def test_what_every_client_is_given_counts_too() -> None:
    """A contradiction between the two is refused; what belongs to the broker is left out, with a warning."""
    kafka = KafkaConfig(properties={"session.timeout.ms": 4000, "fetch.min.bytes": "7"})
    with pytest.raises(ConfigError, match=r"heartbeat\.interval\.ms is 5000 and session\.timeout\.ms 4000"):
        member_properties(kafka, "me", "g", ConsumerConfig(properties={"heartbeat.interval.ms": 5000}))
    reactive = {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost"}, "consumer": {}}
    whole = {"kafka": kafka.model_dump(), "reactive_consumers": {"r": reactive}}
    HeadraceConfig.model_validate(whole)
    reactive["consumer"] = {"properties": {"heartbeat.interval.ms": 5000}}
    with pytest.raises(ValidationError, match=r"reactive_consumers\.r\.consumer, with kafka\.properties: heartbeat"):
        HeadraceConfig.model_validate(whole)
    newer = ConsumerConfig(properties={"group.protocol": "consumer"})
    found = member_properties(kafka, "me", "g", newer)
    assert ("session.timeout.ms" in found, found["fetch.min.bytes"]) == (False, 7)
    assert newer.warnings(kafka.properties) == [
        "session.timeout.ms has no effect with group.protocol consumer: the broker decides"
    ]
