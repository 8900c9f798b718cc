"""What the settings of a producer may be together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.config.load import load_config
from headrace.config.producer import ProducerConfig
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("acks: 1", ":2: producer.acks: is 1, and idempotence, which is on, needs all"),
        ("idempotence: true\n  acks: 0", ":3: producer.acks: is 0, and idempotence, which is on, needs all"),
        ("max_in_flight: 6", ":2: producer.max_in_flight: is 6, and idempotence, which is on, allows 5 at most"),
        ("retries: 0", ":2: producer.retries: is 0, and idempotence, which is on, needs retries"),
        ("acks: true", ":2: producer.acks: should be 'all', 1 or 0"),
        ("acks: 2", ":2: producer.acks: should be 'all', 1 or 0"),
        ("linger_seconds: 30", ":2: producer.linger_seconds: is 30, and delivery_timeout_seconds is 30"),
        (
            "delivery_timeout_seconds: 10\n  linger_seconds: 5\n  request_timeout_seconds: 5",
            ":4: producer.request_timeout_seconds: is 5, and delivery_timeout_seconds is 10",
        ),
        (
            "properties: {buffer.memory: 1}",
            ":2: producer.properties.buffer.memory: is not taken here: set producer.max",
        ),
        ("compression_level: 13", ":2: producer.compression_level: should be less than or equal to 12"),
    ],
)
def test_contradictions_are_refused_with_the_line(tmp_path: Path, text: str, problem: str) -> None:
    """Nothing is left for the client to refuse in its own words."""
    path = tmp_path / "headrace.yaml"
    path.write_text(f"producer:\n  {text}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(path, {})
    assert f"headrace.yaml{problem}" in raised.value.description


@pytest.mark.parametrize(("given", "acks"), [("all", "all"), ("-1", "all"), (-1, "all"), ("1", 1), (0, 0)])
def test_acks_are_taken_in_the_spellings_of_kafka(given: object, acks: object) -> None:
    """Text, as an environment variable has it, is as good as a number."""
    assert ProducerConfig(idempotence=False, acks=given).acks == acks


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, []),
        ({"idempotence": False}, ["reorder and double"]),
        ({"idempotence": False, "max_in_flight": 1}, []),
        ({"idempotence": False, "retries": 0}, []),
        ({"idempotence": False, "acks": 1}, ["may be lost", "reorder and double"]),
    ],
)
def test_what_is_given_up_is_said(given: dict[str, Any], words: list[str]) -> None:
    """The defaults give up nothing; retries reorder only with several requests in flight."""
    found = ProducerConfig(**given).warnings
    assert [word in text for word, text in zip(words, found, strict=True)] == [True] * len(words)


@pytest.mark.parametrize("given", [{"acks": 0}, {"acks": 1, "retries": 0}, {"max_in_flight": 9}])
def test_dead_letters_wait_for_all_whatever_produce_requests_do(given: dict[str, Any]) -> None:
    """A section that is weak has a lasting form, which is a section that may be written; a strong one is it."""
    strong, weak = ProducerConfig(), ProducerConfig(idempotence=False, linger_seconds=0.5, **given)
    assert strong.lasting is strong
    assert weak.lasting == ProducerConfig(linger_seconds=0.5)


@pytest.mark.parametrize(
    ("given", "seconds"), [({}, 10.0), ({"delivery_timeout_seconds": 300}, 30.0), ({"request_timeout_seconds": 2}, 2.0)]
)
def test_an_attempt_takes_a_third_of_the_delivery_timeout(given: dict[str, float], seconds: float) -> None:
    """So what a broker that went silent has not answered is sent again in time."""
    assert ProducerConfig(**given).attempt_seconds == pytest.approx(seconds, abs=0.001)
