"""The properties of each kind of client, and the clients' log: the only file with librdkafka's names."""

import logging
import os
import re
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from headrace.config.kafka import CONSUMER_ONLY, KafkaConfig
from headrace.config.kafka_security import KafkaSasl, KafkaSecurity, KafkaTls, is_pem
from headrace.config.membership import RECEIVE_BYTES, ConsumerConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import ConfigError
from headrace.kafka.client import library

client_log = logging.getLogger("headrace.kafka.librdkafka")


def librdkafka_version() -> str:
    """Return the version of the client's C library."""
    return str(library.libversion()[0])


class _Seldom(logging.Filter):
    """Passes a repeated line of the client once in a while, and no lines about lost connections.

    A broker that is down causes several lines a second per client; `Reachability` reports the outage once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if _CONNECTION.match(record.getMessage()) and not client_log.isEnabledFor(logging.DEBUG):
            return False
        if _FENCED.match(record.getMessage()):
            record.levelno, record.levelname = logging.INFO, "INFO"
        text = _VARYING.sub("", record.getMessage())
        if _STARTING.match(text) and record.levelno < logging.ERROR and not client_log.isEnabledFor(logging.DEBUG):
            self._last.setdefault(text, record.created)  # logged only if it lasts
        if record.created - self._last.get(text, 0.0) < _REPEAT_SECONDS:
            return False
        if len(self._last) >= _KNOWN_LINES:
            self._last.clear()
        self._last[text] = record.created
        return True


_ONLY_TLS_1_3 = "PSK-AES256-GCM-SHA384"
"""The client has no setting for versions. This suite of TLS 1.2 is never usable here, and those of 1.3 stay offered."""
_AUTHORITY_FILES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
"""The files of authorities on Debian, Fedora, openSUSE and Alpine."""
_CONNECTION = re.compile(r"FAIL|REQTMOUT|SESSTMOUT|OIDC|METADATA .* request failed|FATAL.* authorization failed")
"""Lines about what is reported by other means."""
_FENCED = re.compile("TXNERR .*(ILLEGAL_GENERATION|UNKNOWN_MEMBER_ID)")
"""The group has other members by now, so the transaction is aborted; its caller gets the error."""
_STARTING = re.compile("GETPID .*: retrying")
"""Every new cluster causes it once, and the client retries at once."""
_VARYING = re.compile(r"\d+|\(.*?\)")
_REPEAT_SECONDS = 30.0
_KNOWN_LINES = 1000
client_log.addFilter(_Seldom())


def client_properties(kafka: KafkaConfig, client_id: str, *, consumer: bool = False) -> dict[str, Any]:
    """Return the properties of every client: those of `kafka.properties`, and the fixed ones."""
    chosen = {name: value for name, value in kafka.properties.items() if consumer or name not in CONSUMER_ONLY}
    return {
        "reconnect.backoff.max.ms": 2000,
        **opened(chosen),
        **security_properties(kafka.security),
        "bootstrap.servers": kafka.bootstrap_servers,
        "client.id": client_id,
        "logger": client_log,
    }


def security_properties(security: KafkaSecurity) -> dict[str, Any]:
    """Return the properties of TLS and login, as they are in use now."""
    security = security.in_use
    protocol = security.effective_protocol
    properties: dict[str, Any] = {} if protocol == "plaintext" else {"security.protocol": protocol}
    if protocol.endswith("ssl"):
        properties |= _tls_properties(security.tls or KafkaTls())
    return properties | (_login_properties(security.sasl) if security.sasl else {})


def _tls_properties(tls: KafkaTls) -> dict[str, Any]:
    properties = {
        **_pem("ssl.ca", tls.ca),
        **_pem("ssl.certificate", tls.certificate),
        **_pem("ssl.key", tls.key.get_secret_value()),
        "ssl.key.password": tls.key_password.get_secret_value(),
        "ssl.keystore.location": str(tls.keystore or ""),
        "ssl.keystore.password": tls.keystore_password.get_secret_value(),
        "ssl.cipher.suites": _ONLY_TLS_1_3 if tls.min_version == "1.3" else "",
        "enable.ssl.certificate.verification": "" if tls.verify_certificate else "false",
    }
    written = {name: value for name, value in properties.items() if value}
    return {**written, "ssl.endpoint.identification.algorithm": "https" if tls.verify_host_name else "none"}


def _login_properties(sasl: KafkaSasl) -> dict[str, Any]:
    oauth = sasl.oauth
    if oauth is None:
        password = sasl.password.get_secret_value()
        return {"sasl.mechanism": sasl.mechanism, "sasl.username": sasl.username, "sasl.password": password}
    properties = {
        "sasl.mechanism": sasl.mechanism,
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": oauth.token_url,
        "sasl.oauthbearer.client.id": oauth.client_id,
        "sasl.oauthbearer.client.secret": oauth.client_secret.get_secret_value(),
        "sasl.oauthbearer.scope": " ".join(oauth.scopes),
        "sasl.oauthbearer.extensions": ",".join(f"{name}={value}" for name, value in oauth.extensions.items()),
        **_pem("https.ca", oauth.ca or _system_authorities()),
    }
    return {name: value for name, value in properties.items() if value}


def _system_authorities() -> str:
    """Return the file of the system's authorities, empty if it is not known.

    The client finds it for brokers. For token servers it only looks at the path of the system that it was built on.
    """
    files = [ssl.get_default_verify_paths().cafile or "", *_AUTHORITY_FILES]
    return next((name for name in files if name and Path(name).is_file()), "")


def _pem(name: str, value: str) -> dict[str, str]:
    return {f"{name}.{'pem' if is_pem(value) else 'location'}": value} if value else {}


def opened(properties: Mapping[str, object]) -> dict[str, Any]:
    """Return properties with their secrets as the client needs them."""
    return {
        name: value.get_secret_value() if isinstance(value, SecretStr) else value for name, value in properties.items()
    }


def member_properties(kafka: KafkaConfig, name: str, group: str, consumer: ConsumerConfig) -> dict[str, Any]:
    """Return the properties of a group member that commits and chooses start positions by explicit calls only.

    Raises:
        ConfigError: Settings of the consumer and of every client contradict each other.
    """
    try:
        own = consumer.client_properties(kafka.properties)
    except ValueError as cause:
        raise ConfigError(f"group {group}: {cause}") from None
    return {
        "fetch.queue.backoff.ms": 10,  # the client's 1000 starves a fast consumer
        "topic.metadata.refresh.interval.ms": 5000,  # a topic that is created later is found soon
        "receive.message.max.bytes": RECEIVE_BYTES,
        **client_properties(kafka, f"{name} (pid {os.getpid()} on {socket.gethostname()})"),
        **own,
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "enable.partition.eof": True,
        "check.crcs": True,
    }


def check_properties(kafka: KafkaConfig, settings: ProducerConfig) -> None:
    """Have the client check every property before anything is started, without contact to Kafka.

    Raises:
        ConfigError: A value has the wrong type, or a file does not exist.
    """
    quiet = {"log_level": 0}
    name = "headrace-check"
    try:
        library.Producer({**producer_properties(kafka, settings, name), **quiet})
        library.Consumer({**client_properties(kafka, name, consumer=True), "group.id": name, **quiet}).close()
    except library.KafkaException as cause:
        text = cause.args[0].str().strip()
        raise ConfigError(
            f"kafka.properties or producer.properties: Kafka's client refused a value: {text}: correct it"
        ) from cause


def producer_properties(kafka: KafkaConfig, settings: ProducerConfig, client_id: str) -> dict[str, Any]:
    """Return the client properties of a producer."""
    attempt_ms = int(settings.attempt_seconds * 1000)
    return {
        **client_properties(kafka, client_id),
        **opened(settings.client_properties),
        "partitioner": "murmur2_random",
        # The client waits longer than the broker. After its wait it closes the connection, and all its requests fail.
        "request.timeout.ms": max(1, attempt_ms * 9 // 10),
        "socket.timeout.ms": max(10, attempt_ms),
        "queue.buffering.max.messages": 2_000_000,
        "queue.buffering.max.kbytes": settings.max_pending_bytes // 512 + 16_384,
    }
