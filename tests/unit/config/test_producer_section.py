"""What the settings of a producer may be together."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.producer import ProducerConfig


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
