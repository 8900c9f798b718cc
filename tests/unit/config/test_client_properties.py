"""Which client properties are taken, and what is said of the others."""

from __future__ import annotations

import re

import pytest
from pydantic import ValidationError

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.explain import known_keys
from headrace.config.kafka import CONSUMER_KEYS, PRODUCER_KEYS, KafkaConfig
from headrace.config.kafka_java import PROPERTIES_ALONE
from headrace.config.model import HeadraceConfig
from headrace.config.producer_config import ProducerConfig
from headrace.config.section import Section


def misfit(section: type[Section], name: str) -> str:
    try:
        section.model_validate({"properties": {name: "x"}})
    except ValidationError as refused:
        return refused.errors()[0]["msg"]
    return ""


@pytest.mark.parametrize("name", [*PRODUCER_KEYS, *CONSUMER_KEYS])
def test_a_producer_key_is_taken_or_answered_with_the_way_out(name: str) -> None:
    """Whoever writes a key of Java's client or light-4j is told where it went."""
    for section in (KafkaConfig, ProducerConfig):
        try:
            section.model_validate({"properties": {name: "x"}})
        except ValidationError as refused:
            assert re.search("is not accepted here: |is x: write", str(refused))


def test_every_setting_the_table_names_exists() -> None:
    """A name in it is a section, a setting of one, or a property that is taken."""
    consumer = ReactiveConsumerConfig.model_fields
    keys = [key.setting for key in (*CONSUMER_KEYS.values(), *PRODUCER_KEYS.values())]
    for named in [name for setting in keys for name in setting.split("`")[1::2]]:
        section, _, field = named.partition(".")
        found = consumer.get(section) or HeadraceConfig.model_fields.get(section)
        if field.startswith("properties."):
            assert found
            name = field.removeprefix("properties.")
            assert name in PROPERTIES_ALONE or "is not accepted here" not in misfit(found.annotation, name)  # type: ignore[arg-type]
        elif found and field:
            prefix = ("reactive_consumers", "a") if section in consumer else ()
            assert field.split(".")[-1] in known_keys((*prefix, *named.split(".")[:-1])), named
