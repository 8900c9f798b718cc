"""Whether Kafka answers, since when not, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaUnavailable
from headrace.kafka.client.reachability import Reachability
from headrace.testing import ManualClock

_Error = confluent_kafka.KafkaError


def error(name: str, text: str) -> Any:
    return SimpleNamespace(code=lambda: getattr(_Error, name), str=lambda: text, name=lambda: name)


REFUSED = error(
    "_TRANSPORT", "kafka:9092/1: Connect to ipv4#10.0.0.1:9092 failed: Connection refused (after 0ms in state CONNECT)"
)


class Bed:
    """One cluster as a process sees it, on a clock of the test."""

    def __init__(self, servers: str = "kafka:9092") -> None:
        self.clock = ManualClock()
        self.said: list[str] = []
        self.seen = Reachability(KafkaConfig(bootstrap_servers=servers), self.clock, report=self.said.append)

    def asked(self, answered: bool, seconds: float = 1.0) -> None:
        """Ask the brokers; their answer, or that there is none, comes after some seconds."""
        began = self.clock.monotonic()
        self.clock._now += seconds
        self.seen.record_attempt(began, answered)


def test_an_outage_has_a_beginning_a_reason_and_an_end() -> None:
    """Readiness, the outage and what is logged have the same sentence, with address, length and reason."""
    bed = Bed()
    assert not bed.seen.readiness().ready
    bed.asked(True)
    assert bed.seen.readiness().ready
    bed.seen.failed(REFUSED)
    assert bed.seen.outage is None, "one client's error is not yet an outage"
    bed.asked(False, 3)
    outage = bed.seen.outage
    assert outage
    assert outage.why == "Kafka at kafka:9092 has not answered for 3 s: connection refused by kafka:9092"
    assert bed.seen.readiness() == (False, outage.why)
    assert bed.said == [outage.why]
    bed.asked(True, 4)
    assert bed.seen.outage is None
    assert bed.said[1:] == ["Kafka at kafka:9092 answers again after 7 s"]


def test_an_outage_is_told_again_after_growing_pauses() -> None:
    """An hour without Kafka is a handful of lines, whatever the clients report."""
    bed = Bed()
    bed.asked(True)
    for _ in range(3600):
        bed.seen.failed(REFUSED)
        bed.asked(False)
    assert [line.split(" for ")[1].split(" s:")[0] for line in bed.said[:4]] == ["1", "11", "41", "131"]
    assert len(bed.said) < 15


def test_a_refusal_is_told_at_once_and_once() -> None:
    """The first report may have another reason; the one with the fix does not wait for the reminder."""
    bed = Bed()
    bed.asked(True)
    bed.asked(False)
    for _ in range(5):
        bed.seen.failed(error("_AUTHENTICATION", "sasl_ssl://kafka:9092/1: SASL authentication error: bad password"))
        bed.asked(False)
        bed.seen.failed(REFUSED)
        bed.asked(False)
    assert ["login refused" in line for line in bed.said] == [False, True]


def test_an_outage_without_an_error_says_one_time_only() -> None:
    """A question may end before its limit, so the limit is not said beside the time since the last answer."""
    bed = Bed()
    bed.asked(True)
    bed.asked(False)
    assert bed.said[-1].endswith("has not answered for 1 s: neither an answer nor an error arrived")


def test_an_answer_to_another_client_is_no_outage() -> None:
    """A question that failed says nothing if another client has had an answer since it was asked."""
    bed = Bed()
    bed.asked(True)
    began = bed.clock.monotonic()
    bed.clock._now += 2
    bed.seen.answered()
    bed.clock._now += 1
    bed.seen.record_attempt(began, False)
    assert bed.seen.outage is None


def test_a_late_report_does_not_end_an_outage_and_a_later_answer_does() -> None:
    """An acknowledgement that was on its way when the brokers went away is none of them coming back."""
    bed = Bed()
    bed.asked(True)
    bed.asked(False, 3)
    bed.seen.answered()
    assert not bed.seen._seen_alive.is_set()
    bed.clock._now += 2
    bed.seen.answered()
    assert bed.seen._seen_alive.is_set(), "the watching thread ends the outage"


def test_requests_are_refused_after_the_limit_and_counted() -> None:
    """Before the limit a record may be handed over; after it the error says that nothing was sent."""
    bed = Bed()
    bed.seen.check(5)
    bed.asked(True)
    bed.asked(False, 3)
    bed.seen.check(5)
    bed.asked(False, 3)
    for _ in range(2):
        with pytest.raises(KafkaUnavailable, match="nothing of this request was sent: Kafka at kafka:9092 has not"):
            bed.seen.check(5)
    bed.asked(True)
    assert bed.said[-1].endswith("2 requests were answered 503")
    bed.seen.check(5)


def test_requests_of_a_refused_client_are_refused_at_once() -> None:
    """To wait does not help, so nothing is handed over even before the limit; a listener may yet come back."""
    bed = Bed()
    bed.asked(True)
    bed.seen.failed(error("_TRANSPORT", "ssl://kafka:9092/1: SSL connection closed by peer (after 1ms in state X)"))
    bed.asked(False)
    bed.seen.check(5)
    bed.seen.failed(error("_AUTHENTICATION", "sasl_ssl://kafka:9092/1: SASL authentication error: invalid credentials"))
    bed.asked(False)
    with pytest.raises(KafkaUnavailable, match=r"nothing of this request was sent: .*login refused by kafka:9092"):
        bed.seen.check(5)
    bed.asked(True)
    bed.seen.check(5)


def test_an_address_without_a_port_is_named() -> None:
    """The client takes 9092 for it, which may not be what was meant."""
    bed = Bed("kafka")
    bed.asked(False, 3)
    assert bed.seen.outage
    assert bed.seen.outage.why.endswith("(kafka names no port, so 9092 is taken)")
