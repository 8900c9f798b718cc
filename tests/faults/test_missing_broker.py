"""A broker that is down is named, by the doctor and by processes that run on without it."""

from __future__ import annotations

import urllib.request
from typing import Any

import pytest

from headrace.testing.forked import run_command
from headrace.testing.scene import Scene


@pytest.mark.long
def test_a_broker_that_is_down_is_named_until_it_is_back(kafka_three: Any, headrace: Any, tmp_path: Any) -> None:
    """The doctor warns of it; the log has a line at its start and at its end, and a gauge counts it."""
    kafka_three.create_topic("missing")
    servers = kafka_three.bootstrap_servers
    process = headrace({"kafka": {"bootstrap_servers": servers}})

    def doctor() -> str:
        return str(run_command(tmp_path, "doctor", "-b", servers).stdout)

    def missing() -> bool:
        with urllib.request.urlopen(f"{process.url}/metrics", timeout=60) as answer:
            return f'headrace_kafka_missing_brokers{{bootstrap_servers="{servers}"}} 1.0' in answer.read().decode()

    assert "3 brokers" in doctor()
    kafka_three.kill(2)
    try:
        Scene.wait_until(lambda: "2 of 3: broker 2 is missing" in doctor(), "the doctor's warning", 120)
        Scene.wait_until(lambda: "broker 2 is missing" in process.output, "the log of the loss", 120)
        Scene.wait_until(missing, "the gauge", 60)
    finally:
        kafka_three.restart(2)
        kafka_three.wait_in_sync()
    Scene.wait_until(lambda: "broker 2 is back" in process.output, "the log of the return", 120)
    assert not missing()
    assert "3 brokers" in doctor()
