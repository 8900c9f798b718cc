"""The properties every client of ours gets, and its log."""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping
from typing import Any

from pydantic import SecretStr

from headrace.config.kafka import CONSUMER_ONLY, KafkaConfig
from headrace.config.membership import ConsumerConfig
from headrace.errors import ConfigError

client_log = logging.getLogger("headrace.kafka.client")


class _Seldom(logging.Filter):
    """Lets a line of the client through once in a while, and of lost connections none.

    A broker that is down makes several lines a second per client; `Reachability` says once that none answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if _CONNECTION.match(record.getMessage()) and not client_log.isEnabledFor(logging.DEBUG):
            return False
        text = _VARYING.sub("", record.getMessage())
        if record.created - self._last.get(text, 0.0) < _REPEAT_SECONDS:
            return False
        if len(self._last) >= _KNOWN_LINES:
            self._last.clear()
        self._last[text] = record.created
        return True


_CONNECTION = re.compile(r"FAIL|REQTMOUT")  # the client's words for what also comes to `error_cb`
_VARYING = re.compile(r"\d+|\(.*?\)")
_REPEAT_SECONDS = 30.0
_KNOWN_LINES = 1000
client_log.addFilter(_Seldom())


def client_properties(kafka: KafkaConfig, client_id: str, *, consumer: bool = False) -> dict[str, Any]:
    """Return the properties every client starts from: the users' own and our fixed ones."""
    chosen = {name: value for name, value in kafka.properties.items() if consumer or name not in CONSUMER_ONLY}
    return {
        "reconnect.backoff.max.ms": 2000,
        **opened(chosen),
        "bootstrap.servers": kafka.bootstrap_servers,
        "client.id": client_id,
        "logger": client_log,
    }


def opened(properties: Mapping[str, object]) -> dict[str, Any]:
    """Return properties with their secrets as the client needs them."""
    return {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value for name, value in properties.items()
    }


def member_properties(kafka: KafkaConfig, name: str, group: str, consumer: ConsumerConfig) -> dict[str, Any]:
    """Return the properties of a group member that commits, and begins anywhere, only when it is told to.

    Raises:
        ConfigError: Settings of the consumer and of every client contradict each other.
    """
    try:
        own = consumer.client_properties(kafka.properties)
    except ValueError as cause:
        raise ConfigError(f"group {group}: {cause}") from None
    return {
        "fetch.queue.backoff.ms": 10,  # the client's 1000 starves a fast consumer
        "queued.max.messages.kbytes": 16_384,
        "topic.metadata.refresh.interval.ms": 5000,  # a topic that is created later is found soon
        **client_properties(kafka, f"{name} (pid {os.getpid()} on {socket.gethostname()})"),
        **own,
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "check.crcs": True,
    }
