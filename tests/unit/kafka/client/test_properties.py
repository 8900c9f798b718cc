"""Which client properties users may set."""

from __future__ import annotations

from pathlib import Path

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.kafka.client.properties import client_log, client_properties


def test_the_client_does_not_repeat_itself() -> None:
    """A line comes once in a while, one of a start only if it lasts; lost connections are told elsewhere, once."""

    def passes(text: str, seconds: float, level: int = 40) -> bool:
        record = client_log.makeRecord(client_log.name, level, "f", 1, text, (), None)
        record.created = 1000 + seconds
        return bool(client_log.filter(record)) and record.levelno == level

    assert passes("GETPID 127.0.0.1:1/2: refused (after 0ms in state CONNECT)", 0)
    assert not passes("GETPID 127.0.0.1:1/2: refused (after 7ms, 3 suppressed)", 5)
    assert passes("GETPID 127.0.0.1:1/2: timed out", 5)
    assert passes("GETPID 127.0.0.1:1/2: refused (after 0ms in state CONNECT)", 31)
    assert not passes("FAIL 127.0.0.1:1/2: refused (after 0ms in state CONNECT)", 100)
    assert not passes("REQTMOUT 127.0.0.1:1/2: Timed out 1 in-flight requests", 100)
    metadata = "METADATA [c#consumer-13] [thrd:main]: sasl_ssl://b:1/1: Metadata request failed: connected: Local: x"
    assert not passes(metadata, 100)
    fenced = (
        "TXNERR [p#producer-1] [thrd:main]: Current transaction failed in state BeginCommit: x (ILLEGAL_GENERATION)"
    )
    assert not passes(fenced, 150)  # it passes, at another level
    loading = "GETPID [p#producer-4] [thrd:main]: Failed to acquire idempotence PID from broker b:1/1: x: retrying"
    assert [passes(loading, seconds, 30) for seconds in (200, 205, 231)] == [False, False, True]


def test_token_servers_are_checked_with_the_authorities_of_the_system() -> None:
    """Kafka's client looks for them only where they are on the system that it was built on."""
    oauth = {"token_url": "https://localhost:1/token", "client_id": "a", "client_secret": "b"}
    security = KafkaSecurity.model_validate({"sasl": {"mechanism": "OAUTHBEARER", "oauth": oauth}})
    assert Path(client_properties(KafkaConfig(security=security), "me")["https.ca.location"]).is_file()
