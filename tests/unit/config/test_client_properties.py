"""Which client properties are taken, and what is said of the others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.explain import known_keys
from headrace.config.kafka import CONSUMER_KEYS, PRODUCER_KEYS, KafkaConfig
from headrace.config.kafka_java import PROPERTIES_ALONE, SECURITY_KEYS
from headrace.config.model import HeadraceConfig
from headrace.config.producer import ProducerConfig
from headrace.config.section import Section
from headrace.functions.function_keys import keys_of
from headrace_dialects.light4j.key_table import rows_of

SEEDS = yaml.safe_load((Path(__file__).parent / "known_keys.yaml").read_text())


def misfit(section: type[Section], name: str) -> str:
    try:
        section.model_validate({"properties": {name: "x"}})
    except ValidationError as refused:
        return refused.errors()[0]["msg"]
    return ""


@pytest.mark.parametrize(("clients", "table"), [("producer", PRODUCER_KEYS), ("consumer", CONSUMER_KEYS)])
def test_every_key_of_the_seeds_is_in_the_table(clients: str, table: Mapping[str, Any]) -> None:
    """And a key of light-4j's file is there, or in the table of that file, with its default."""
    assert {*SEEDS[clients]["chapters"].split()} <= table.keys()
    rows = {row.key: row.default for row in rows_of(f"kafka-{clients}")}
    for name in SEEDS[clients]["light_4j"].split():
        assert table[name].light_4j if name in table else rows[name]


def test_every_attribute_of_the_seeds_is_a_key_of_a_trigger() -> None:
    """Functions keep Nuclio's names."""
    assert {*SEEDS["trigger"].split()} <= keys_of("attributes").keys()


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


@pytest.mark.parametrize(("name", "setting"), SECURITY_KEYS.items())
def test_a_property_of_tls_and_login_names_its_setting(name: str, setting: str) -> None:
    """It is translated at load; elsewhere it is refused with a setting that exists."""
    known = setting.split(".")[-1] in known_keys(("kafka", "security", *setting.split(".")[:-1]))
    assert known != (name in PROPERTIES_ALONE)
    instead = f"security.{setting}" if known else f"properties.{name}"
    for section in (KafkaConfig, ProducerConfig):
        assert f"is not accepted here: set kafka.{instead}, which all clients use" in misfit(section, name)
