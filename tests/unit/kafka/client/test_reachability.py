"""Whether Kafka answers, since when not, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import KafkaUnavailable
from headrace.kafka.client.reachability import Reachability
from headrace_devkit.testing import ManualClock

_Error = confluent_kafka.KafkaError


def error(name: str, text: str) -> Any:
    return SimpleNamespace(code=lambda: getattr(_Error, name), str=lambda: text, name=lambda: name)


REFUSED = error(
    "_TRANSPORT", "kafka:9092/1: Connect to ipv4#10.0.0.1:9092 failed: Connection refused (after 0ms in state CONNECT)"
)


class Harness:
    """One cluster as a process sees it, on a clock of the test."""

    def __init__(self, servers: str = "kafka:9092") -> None:
        self.clock = ManualClock()
        self.reports: list[str] = []
        self.seen = Reachability(KafkaConfig(bootstrap_servers=servers), self.clock, report=self.reports.append)

    def attempt(self, answered: bool, seconds: float = 1.0) -> None:
        """Ask the brokers; their response, or that there is none, comes after some seconds."""
        began = self.clock.monotonic()
        self.clock._now += seconds
        self.seen.record_attempt(began, answered)


def test_an_outage_has_a_beginning_a_reason_and_an_end() -> None:
    """All places have the same sentence, and requests are refused only after their limit."""
    harness = Harness()
    assert not harness.seen.readiness().ready
    harness.attempt(True)
    assert harness.seen.readiness().ready
    harness.seen.failed(REFUSED)
    assert harness.seen.outage is None, "one client's error is not yet an outage"
    harness.attempt(False, 3)
    outage = harness.seen.outage
    assert outage
    assert outage.why == "Kafka at kafka:9092 has not answered for 3 s: connection refused by kafka:9092"
    assert harness.seen.readiness() == (False, outage.why)
    assert harness.reports == [outage.why]
    harness.seen.check(5)
    harness.attempt(False, 3)
    with pytest.raises(KafkaUnavailable, match="nothing of this request was sent: Kafka at kafka:9092 has not"):
        harness.seen.check(5)
    harness.attempt(True, 4)
    assert harness.seen.outage is None
    harness.seen.check(5)
    harness.attempt(False)
    assert harness.reports[1:] == [
        "Kafka at kafka:9092 answers again after 10 s",
        "Kafka at kafka:9092 has not answered for 1 s: neither a response nor an error arrived",
    ]


def test_a_late_report_does_not_end_an_outage_and_a_later_response_does() -> None:
    """An acknowledgement that was on its way when the brokers went away is none of them coming back."""
    harness = Harness()
    harness.attempt(True)
    harness.attempt(False, 3)
    harness.seen.answered()
    assert not harness.seen.probe.seen_alive.is_set()
    harness.clock._now += 2
    harness.seen.answered()
    assert harness.seen.probe.seen_alive.is_set(), "the watching thread ends the outage"
