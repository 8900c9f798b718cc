"""Client properties by name: what users may pass to Kafka's client, and where everything else went.

Names are librdkafka's. An allow-list, because some properties load code or files, or break a promise. The keys that
Kafka's Java clients, light-4j's `kafka-producer.yml` and `kafka-consumer.yml` and Nuclio's triggers know are in two
tables, which documentation pages show.
"""

from __future__ import annotations

import csv
import difflib
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

from pydantic import AfterValidator, BeforeValidator, SecretStr

from headrace.config.secrecy import is_secret_name


class Key(NamedTuple):
    """What became of a key of Java's clients, of light-4j's files, or of Nuclio's triggers."""

    light_4j: str
    """Its default in light-4j; empty if the file does not have it."""
    client: str
    """librdkafka's name; empty if it has none."""
    ours: str
    """The setting to use, or `nothing:` and why none is needed."""


def _table(name: str) -> dict[str, Key]:
    with Path(__file__).with_name(name).open(newline="") as file:
        return {row.pop("seed"): Key(**row) for row in csv.DictReader(file)}


PRODUCER_KEYS: Final = _table("producer_keys.csv")
"""Every producer key by its name there; a setting is written from the top of the file."""
CONSUMER_KEYS: Final = _table("consumer_keys.csv")
"""Every consumer key by its name there; a setting is one of a reactive consumer, but for sections of the file."""

_OTHER_NAMES: Final = {
    "compression.codec": "compression.type",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "message.send.max.retries": "retries",
    "message.timeout.ms": "delivery.timeout.ms",
    "queue.buffering.max.ms": "linger.ms",
    "request.required.acks": "acks",
    "socket.timeout.ms": "request.timeout.ms",
}
"""librdkafka's second names."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


CONSUMER_ONLY: Final = _names(
    """
    fetch.max.bytes fetch.min.bytes fetch.wait.max.ms group.protocol heartbeat.interval.ms isolation.level
    max.partition.fetch.bytes max.poll.interval.ms session.timeout.ms
    """
)
"""Allowed for consumers; the client warns of them in a producer."""
_PRODUCER_ONLY: Final = _names(
    """
    batch.num.messages queue.buffering.backpressure.threshold sticky.partitioning.linger.ms
    topic.metadata.propagation.max.ms
    """
)
_EVERY_CLIENT: Final = _names(
    """
    broker.address.family broker.address.ttl client.dns.lookup client.rack connections.max.idle.ms metadata.max.age.ms
    receive.message.max.bytes reconnect.backoff.max.ms reconnect.backoff.ms retry.backoff.max.ms retry.backoff.ms
    sasl.mechanism sasl.mechanisms sasl.oauthbearer.client.id sasl.oauthbearer.client.secret sasl.oauthbearer.config
    sasl.oauthbearer.extensions sasl.oauthbearer.method sasl.oauthbearer.scope sasl.oauthbearer.token.endpoint.url
    sasl.password sasl.username security.protocol socket.connection.setup.timeout.ms socket.keepalive.enable
    socket.receive.buffer.bytes socket.send.buffer.bytes socket.timeout.ms ssl.ca.location ssl.ca.pem
    ssl.certificate.location ssl.certificate.pem ssl.cipher.suites ssl.endpoint.identification.algorithm
    ssl.key.location ssl.key.password ssl.key.pem topic.metadata.refresh.interval.ms
    """
)


def _owner(name: str, tables: tuple[dict[str, Key], ...]) -> str:
    """Return the setting to use in place of a property, empty if we do not know the name."""
    name = _OTHER_NAMES.get(name, name)
    for keys in tables:
        if found := keys.get(name) or next((key for key in keys.values() if key.client == name), None):
            return found.ours
    return ""


def way_out(name: str, *tables: dict[str, Key]) -> str:
    """Return what to do instead of setting a client's property, empty if it is in no table (by default: in neither)."""
    owner = _owner(name, tables or (PRODUCER_KEYS, CONSUMER_KEYS)).replace("`", "")
    _, nothing, why = owner.partition("nothing: ")
    return owner and f"is not taken here: {why if nothing else f'set {owner}'}"


def _require(name: str, allowed: frozenset[str], elsewhere: frozenset[str], place: str) -> str:
    if name in allowed:
        return name
    if name in elsewhere:
        raise ValueError(f"is not taken here: set {place}.{name}")
    if text := way_out(name):
        raise ValueError(text)
    near = difflib.get_close_matches(name, sorted(allowed), 1)
    raise ValueError(
        f"is not accepted: did you mean {near[0]}?" if near else "is not on the list of allowed client properties"
    )


def _for_clients(name: str) -> str:
    return _require(name, _EVERY_CLIENT | CONSUMER_ONLY, _PRODUCER_ONLY, "producer.properties")


def _for_producers(name: str) -> str:
    return _require(name, (_EVERY_CLIENT - _OTHER_NAMES.keys()) | _PRODUCER_ONLY, CONSUMER_ONLY, "kafka.properties")


def _hide_secrets(properties: Any) -> Any:
    if not isinstance(properties, dict):
        return properties
    return {
        name: SecretStr(value) if isinstance(value, str) and is_secret_name(name) else value
        for name, value in properties.items()
    }


_Value = str | int | float | bool | SecretStr
_Hidden = BeforeValidator(_hide_secrets)
ClientProperties = Annotated[dict[Annotated[str, AfterValidator(_for_clients)], _Value], _Hidden]
"""Properties for every client; a name that is not allowed is refused with the way out."""
ProducerProperties = Annotated[dict[Annotated[str, AfterValidator(_for_producers)], _Value], _Hidden]
"""Properties for the producer."""
