"""What small sections of the configuration become: `producer`, `cluster`, retry topics, patterns of topic names."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.config.consumers import RetryConfig
from headrace.config.peer_processes import ClusterConfig
from headrace.config.producer import ProducerConfig
from headrace.config.section import compile_pattern, fits_any


@pytest.mark.parametrize(("given", "acks"), [("all", "all"), ("-1", "all"), (-1, "all"), ("1", 1), (0, 0)])
def test_acks_are_taken_in_the_spellings_of_kafka(given: object, acks: object) -> None:
    """Text, as an environment variable has it, is as good as a number."""
    assert ProducerConfig(properties={"enable.idempotence": "false", "acks": given}).acks == acks


@pytest.mark.parametrize(
    "given", [{"acks": 0}, {"acks": 1, "retries": 0}, {"max.in.flight.requests.per.connection": 9}]
)
def test_dead_letters_wait_for_all_whatever_produce_requests_do(given: dict[str, Any]) -> None:
    """A section that is weak has a lasting form, which is a section that may be written; a strong one is it."""
    weak = ProducerConfig(properties={"enable.idempotence": False, "linger.ms": 500, **given})
    strong = ProducerConfig(properties={"linger.ms": 500})
    assert strong.lasting is strong
    assert weak.lasting == strong


@pytest.mark.parametrize(
    ("given", "seconds"), [({}, 10.0), ({"delivery.timeout.ms": 300_000}, 30.0), ({"request.timeout.ms": 2000}, 2.0)]
)
def test_an_attempt_takes_a_third_of_the_delivery_timeout(given: dict[str, float], seconds: float) -> None:
    """So what a broker that went silent has not answered is sent again in time."""
    assert ProducerConfig(properties=given).attempt_seconds == pytest.approx(seconds, abs=0.001)


def test_retry_topics_are_topics_named_after_group_and_delay() -> None:
    """So a group has its own, and an operator sees what is what."""
    assert RetryConfig(topics=[10, 86_400]).topic_names("g") == ["g.retry.10s", "g.retry.86400s"]


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


SECRET = "x" * 32
COMPLETE = {"url": "https://one:8082/", "peers": ["https://one:8082", "https://two:8082/"], "secret": SECRET}


def test_a_complete_section() -> None:
    assert ClusterConfig().peers == []
    complete = ClusterConfig.model_validate(COMPLETE)
    assert (complete.url, complete.peers) == ("https://one:8082", ["https://one:8082", "https://two:8082"])
    assert SECRET not in repr(complete)
    assert ClusterConfig.model_validate({**COMPLETE, "peers": ["http://127.0.0.1:1"], "url": "http://localhost:2"})


def test_only_the_table_allows_a_fraction() -> None:
    """The client takes half a millisecond for `linger.ms`, and whole numbers elsewhere."""
    assert ProducerConfig(properties={"linger.ms": "0.5"}).properties == {"linger.ms": 0.5}
    with pytest.raises(ValueError, match=r"batch\.size is 0\.5|retries is 1\.5: write a whole number"):
        ProducerConfig(properties={"retries": 1.5})
