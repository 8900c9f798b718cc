"""What small sections of the configuration become: `producer`, `cluster`, patterns of topic names."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.producer_config import ProducerConfig
from headrace.config.section import compile_pattern, fits_any


@pytest.mark.parametrize(("given", "acks"), [("all", "all"), ("-1", "all"), (-1, "all"), ("1", 1), (0, 0)])
def test_acks_are_taken_in_the_spellings_of_kafka(given: object, acks: object) -> None:
    """Text, as of an environment variable, is as good as a number; `linger.ms` may be a fraction."""
    config = ProducerConfig(properties={"enable.idempotence": "false", "acks": given, "linger.ms": "0.5"})
    assert (config.acks, config.properties["linger.ms"]) == (acks, 0.5)


@pytest.mark.parametrize(
    "given", [{"acks": 0}, {"acks": 1, "retries": 0}, {"max.in.flight.requests.per.connection": 9}]
)
def test_dead_letters_wait_for_all_whatever_produce_requests_do(given: dict[str, Any]) -> None:
    """A section that is weak has a lasting form, which is a section that may be written; a strong one is it."""
    weak = ProducerConfig(properties={"enable.idempotence": False, "linger.ms": 500, **given})
    strong = ProducerConfig(properties={"linger.ms": 500})
    assert strong.lasting is strong
    assert weak.lasting == strong


def test_a_pattern_fits_whole_names() -> None:
    """As Java's subscribe does; alternatives too."""
    fits = fits_any([r"metrics\..*", "a|b"])
    assert [name for name in ("metrics.cpu", "xmetrics.cpu", "metrics", "a", "b", "ab") if fits(name)] == [
        "metrics.cpu",
        "a",
        "b",
    ]


def test_a_pattern_made_to_take_long_does_not() -> None:
    """Row S2: the engine's work grows with the name alone; Python's own would not come to an end here."""
    assert not compile_pattern("(a*)*b|(a+)+c|(.*)*d")("a" * 30_000)
