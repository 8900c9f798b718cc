"""A broker that is down is named, by the doctor and by processes that run on without it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.faults.ledger import Ledger


@pytest.mark.long
def test_a_broker_that_is_down_is_named_until_it_is_back(kafka_three: Any, headrace: Any, ledger: Ledger) -> None:
    """The doctor warns of it; the log has a line at its start and at its end, and a gauge counts it."""
    servers = ledger.kafka.bootstrap_servers
    process = headrace(ledger.config)

    def doctor() -> str:
        return ledger.cli("doctor", "-b", servers, code=None).stdout

    def missing() -> bool:
        counts = ledger.ask(f"{process.url}/metrics").body
        return f'headrace_kafka_missing_brokers{{bootstrap_servers="{servers}"}} 1.0' in counts

    assert "3 brokers" in doctor()
    kafka_three.kill(2)
    ledger.wait_until(lambda: "2 of 3: broker 2 is missing" in doctor(), "the doctor's warning")
    ledger.wait_until(lambda: "broker 2 is missing" in process.output, "the log of the loss")
    ledger.wait_until(missing, "the gauge")
    kafka_three.restart(2)
    kafka_three.wait_in_sync()
    ledger.wait_until(lambda: "broker 2 is back" in process.output, "the log of the return")
    assert not missing()
    assert "3 brokers" in doctor()
