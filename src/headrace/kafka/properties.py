"""Client properties: what users may set, what Headrace owns, and the settings every client of ours gets.

Names are librdkafka's. An allow-list, because some properties load code or files, or break a promise.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from headrace.config.kafka import KafkaConfig
from headrace.errors import ConfigError

client_log = logging.getLogger("headrace.kafka.client")


class _Seldom(logging.Filter):
    """Lets a line of the client through once in a while: a broker that is down makes several a second per client."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        text = _VARYING.sub("", record.getMessage())
        if record.created - self._last.get(text, 0.0) < _REPEAT_SECONDS:
            return False
        if len(self._last) >= _KNOWN_LINES:
            self._last.clear()
        self._last[text] = record.created
        return True


_VARYING = re.compile(r"\d+|\(.*?\)")
_REPEAT_SECONDS = 30.0
_KNOWN_LINES = 1000
client_log.addFilter(_Seldom())

_ALLOWED = frozenset(
    {
        "client.dns.lookup",
        "client.rack",
        "connections.max.idle.ms",
        "broker.address.family",
        "broker.address.ttl",
        "fetch.max.bytes",
        "fetch.min.bytes",
        "fetch.wait.max.ms",
        "group.instance.id",
        "group.protocol",
        "heartbeat.interval.ms",
        "isolation.level",
        "max.partition.fetch.bytes",
        "max.poll.interval.ms",
        "message.max.bytes",
        "metadata.max.age.ms",
        "receive.message.max.bytes",
        "reconnect.backoff.max.ms",
        "reconnect.backoff.ms",
        "retry.backoff.max.ms",
        "retry.backoff.ms",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.oauthbearer.client.id",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.oauthbearer.extensions",
        "sasl.oauthbearer.method",
        "sasl.oauthbearer.scope",
        "sasl.oauthbearer.token.endpoint.url",
        "sasl.password",
        "sasl.username",
        "security.protocol",
        "session.timeout.ms",
        "socket.connection.setup.timeout.ms",
        "socket.keepalive.enable",
        "socket.receive.buffer.bytes",
        "socket.send.buffer.bytes",
        "socket.timeout.ms",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.cipher.suites",
        "ssl.endpoint.identification.algorithm",
        "ssl.key.location",
        "ssl.key.password",
        "ssl.key.pem",
        "topic.metadata.refresh.interval.ms",
    }
)

_OWNED = {
    "acks": "producer (acks is always all)",
    "auto.offset.reset": "auto_offset_reset of the reactive consumer or initialOffset of the function",
    "bootstrap.servers": "kafka.bootstrap_servers",
    "client.id": "nothing: Headrace names its clients",
    "compression.type": "producer.compression",
    "delivery.timeout.ms": "producer.delivery_timeout_seconds",
    "enable.auto.commit": "nothing: Headrace commits what has ended and only that",
    "enable.idempotence": "nothing: it is always on",
    "group.id": "group of the reactive consumer or consumerGroup of the function",
    "linger.ms": "producer.linger_seconds",
    "message.timeout.ms": "producer.delivery_timeout_seconds",
    "partition.assignment.strategy": "nothing: it is cooperative-sticky",
    "partitioner": "nothing: it is murmur2, as Java's client",
    "queue.buffering.max.kbytes": "producer.max_pending_bytes",
}

_CONSUMER_ONLY = frozenset(
    {
        "fetch.max.bytes",
        "fetch.min.bytes",
        "fetch.wait.max.ms",
        "group.instance.id",
        "group.protocol",
        "heartbeat.interval.ms",
        "isolation.level",
        "max.partition.fetch.bytes",
        "max.poll.interval.ms",
        "session.timeout.ms",
    }
)


def check_properties(properties: Mapping[str, object]) -> None:
    """Refuse what users may not set.

    Raises:
        ConfigError: Names each property, and the setting of ours or the nearest allowed name.
    """
    problems = []
    for name in properties:
        if name in _ALLOWED:
            continue
        if name in _OWNED:
            problems.append(f"kafka.properties.{name} is Headrace's own: set {_OWNED[name]}")
            continue
        near = difflib.get_close_matches(name, sorted(_ALLOWED | _OWNED.keys()), 1)
        hint = f"did you mean {near[0]}?" if near else "it is not on the list of allowed client properties"
        problems.append(f"kafka.properties.{name} is not accepted: {hint}")
    if problems:
        raise ConfigError("; ".join(problems))


def client_properties(kafka: KafkaConfig, client_id: str, *, consumer: bool = False) -> dict[str, Any]:
    """Return the properties every client starts from: the users' own and our fixed ones.

    Raises:
        ConfigError: A property is not allowed.
    """
    check_properties(kafka.properties)
    chosen = {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value
        for name, value in kafka.properties.items()
        if consumer or name not in _CONSUMER_ONLY
    }
    return {
        "reconnect.backoff.max.ms": 2000,
        **chosen,
        "bootstrap.servers": kafka.bootstrap_servers,
        "client.id": client_id,
        "logger": client_log,
    }
