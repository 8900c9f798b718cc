"""How to reach Kafka and the schema registry."""

import csv
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator

from headrace.config.kafka_java import PROPERTIES_ALONE, SECURITY_KEYS
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.references import is_secret_name
from headrace.config.remote_server import RemoteServer
from headrace.config.section import PositiveSeconds, Section, Url
from headrace.config.spelling import nearest

PROTOCOLS: Final = ("plaintext", "ssl", "sasl_plaintext", "sasl_ssl")
"""What may precede the address of a broker, as in `advertised.listeners`."""
_LAST_PORT: Final = 65_535


class Key(NamedTuple):
    """The setting that replaces a key of Java's clients."""

    light_4j: str
    """Its default in light-4j; empty if the file does not have it."""
    client: str
    """librdkafka's name; empty if it has none."""
    setting: str
    """The setting to use, or `nothing:` and why none is needed."""


def _table(name: str) -> dict[str, Key]:
    with Path(__file__).with_name(name).open(newline="") as file:
        return {row.pop("key"): Key(**row) for row in csv.DictReader(file)}


PRODUCER_KEYS: Final = _table("producer_keys.csv")
"""Producer keys of these files; settings are paths from the top of `headrace.yaml`."""
CONSUMER_KEYS: Final = _table("consumer_keys.csv")
"""Consumer keys of these files; settings are those of a reactive consumer, or sections of `headrace.yaml`."""

with Path(__file__).with_name("client_properties.csv").open(newline="") as _file:
    _PROPERTIES: Final = list(csv.DictReader(_file))
"""Accepted properties with their clients and values, and librdkafka's aliases."""
_VALUES: Final = {row["property"]: row["accepts"] for row in _PROPERTIES if row["accepts"]}
"""A range of whole numbers such as `0..100`, one of any numbers such as `0.0..100.0`, or words such as `true|false`.

The client checks other values.
"""
_OTHER_NAMES: Final = {row["property"]: row["second_name_of"] for row in _PROPERTIES if row["second_name_of"]}


def _accepted_by(clients: str) -> frozenset[str]:
    return frozenset(row["property"] for row in _PROPERTIES if row["clients"] == clients)


CONSUMER_ONLY: Final = _accepted_by("consumer")
"""Allowed for consumers; in a producer the client would log a warning."""
_PRODUCER_ONLY: Final = _accepted_by("producer")
_MEMBER_ONLY: Final = _accepted_by("member")
"""Allowed for one consumer only: two must not share the value, or all members of a group must have the same."""
EVERY_CLIENT: Final = _accepted_by("every")


def _replacement(name: str, tables: tuple[dict[str, Key], ...]) -> str:
    """Return the setting to use instead of a property; empty if the name is in no table."""
    name = _OTHER_NAMES.get(name, name)
    for keys in tables:
        if found := keys.get(name) or next((key for key in keys.values() if key.client == name), None):
            return found.setting
    return ""


def instead_of(name: str, *tables: dict[str, Key]) -> str:
    """Return what to do instead of setting a client property; empty if no table has it (by default: neither)."""
    replacement = _replacement(name, tables or (PRODUCER_KEYS, CONSUMER_KEYS)).replace("`", "")
    _, nothing, why = replacement.partition("nothing: ")
    return replacement and f"is not accepted here: {why if nothing else f'set {replacement}'}"


def _require(name: str, allowed: frozenset[str], of_other: frozenset[str], other_section: str) -> str:
    if name in allowed:
        return name
    if name in of_other:
        raise ValueError(f"is not accepted here: set {other_section}.{name}")
    if name in SECURITY_KEYS:
        setting = f"properties.{name}" if name in PROPERTIES_ALONE else f"security.{SECURITY_KEYS[name]}"
        raise ValueError(f"is not accepted here: set kafka.{setting}, which all clients use")
    text = instead_of(name)
    if text:
        raise ValueError(text)
    near = nearest(name, sorted(allowed | SECURITY_KEYS.keys()))
    raise ValueError(
        f"is not accepted: did you mean {near}?" if near else "is not on the list of allowed client properties"
    )


def _for_clients(name: str) -> str:
    return _require(name, EVERY_CLIENT | CONSUMER_ONLY, _PRODUCER_ONLY, "producer.properties")


def _for_producers(name: str) -> str:
    return _require(name, (EVERY_CLIENT - _OTHER_NAMES.keys()) | _PRODUCER_ONLY, CONSUMER_ONLY, "kafka.properties")


def _for_members(name: str) -> str:
    return _require(name, CONSUMER_ONLY | _MEMBER_ONLY, EVERY_CLIENT, "kafka.properties")


def _check_values(properties: dict[str, Any]) -> dict[str, Any]:
    """Return properties with the values that the table knows as numbers, switches, or text in lower case."""
    return {name: _value_of(name, value) for name, value in properties.items()}


def _value_of(name: str, value: Any) -> Any:
    accepts = _VALUES.get(name, "")
    if ".." in accepts:
        return _number(name, value, accepts)
    if not accepts:
        return value
    words, text = accepts.split("|"), str(value).lower()
    if text not in words:
        raise ValueError(f"{name} is {value}: write one of {', '.join(words)}")
    return {"true": True, "false": False}.get(text, text)


def _number(name: str, value: Any, accepts: str) -> int | float:
    least, _, most = accepts.partition("..")
    try:
        number = float("nan" if isinstance(value, bool) else value)
    except ValueError:
        number = math.nan
    if not float(least) <= number <= float(most):
        raise ValueError(f"{name} is {value}: write a number from {float(least):.0f} to {float(most):.0f}")
    if number.is_integer():
        return int(number)
    if "." not in least:
        raise ValueError(f"{name} is {value}: write a whole number")
    return number


def _hide_secrets(properties: Any) -> Any:
    if not isinstance(properties, dict):
        return properties
    return {
        name: SecretStr(value) if isinstance(value, str) and is_secret_name(name) else value
        for name, value in properties.items()
    }


_Value = str | int | float | bool | SecretStr
_Hidden = BeforeValidator(_hide_secrets)
_Checked = AfterValidator(_check_values)
ClientProperties = Annotated[dict[Annotated[str, AfterValidator(_for_clients)], _Value], _Hidden, _Checked]
"""Properties for every client. A name that is not allowed is rejected, and the error names the setting to use."""
ProducerProperties = Annotated[dict[Annotated[str, AfterValidator(_for_producers)], _Value], _Hidden, _Checked]
MemberProperties = Annotated[dict[Annotated[str, AfterValidator(_for_members)], _Value], _Hidden, _Checked]


def _in_one_string(value: Any) -> Any:
    if isinstance(value, list):
        raise ValueError(f"should be one string, not a list: write {','.join(str(each) for each in value)!r}")
    return value


def check_servers(servers: str) -> str:
    """Return `host:port` of brokers, comma separated, if each is one.

    Raises:
        ValueError: One is not, such as the URL of an HTTP server.
    """
    for server in servers.split(","):
        scheme, _, address = server.strip().rpartition("://")
        plain, _, path = address.partition("/")
        host, colon, port = plain.rpartition(":")
        if path or (scheme and scheme.lower() not in PROTOCOLS):
            raise ValueError(f"has {server.strip()}, and Kafka's brokers have no URL: write host:port, such as {plain}")
        one_colon = colon and (":" not in host or host.endswith("]"))
        if one_colon and not (host and port.isdecimal() and 1 <= int(port) <= _LAST_PORT):
            raise ValueError(f"has {server.strip()}: write host:port, with a port from 1 to {_LAST_PORT}")
    return servers


BootstrapServers = Annotated[
    str, BeforeValidator(_in_one_string), Field(pattern=r"^[^\s,]+(\s*,\s*[^\s,]+)*$"), AfterValidator(check_servers)
]


class KafkaConfig(Section):
    """How to reach Kafka."""

    internal: ClassVar = frozenset(("request_timeout_seconds",))

    bootstrap_servers: BootstrapServers = "localhost:9092"
    """Brokers to connect to first: `host:port`, comma separated."""
    security: KafkaSecurity = KafkaSecurity()
    """TLS and login."""
    properties: ClientProperties = Field(default_factory=dict)
    """Properties of every client, by their librdkafka names; only some are accepted. Those of TLS and login, also by
    the names of Java's clients, are translated into `security`."""
    native: Literal["auto", "off"] = "auto"
    """Whether records pass through the compiled module, if it is installed; `off` uses Kafka's Python client alone."""
    create_topics: bool = True
    """Whether missing internal topics (dead letter topics, result topics) are created."""
    request_timeout_seconds: PositiveSeconds = 10.0
    """Longest wait for one response to an administrative request."""

    def is_at(self, brokers: Sequence[str]) -> bool:
        """Return whether these are its bootstrap servers, in any order; an empty list counts as its own."""
        return not brokers or {each.strip() for each in brokers} == set(re.split(r"\s*,\s*", self.bootstrap_servers))

    @model_validator(mode="after")
    def _one_choice_of_suites(self) -> Self:
        if "ssl.cipher.suites" in self.properties and self.security.tls and self.security.tls.min_version == "1.3":
            raise ValueError(
                "has properties.ssl.cipher.suites, which are for TLS 1.2, and only TLSv1.3 enabled: remove one"
            )
        return self


class SchemaRegistryConfig(RemoteServer):
    """How to reach the schema registry (Confluent's HTTP API)."""

    section: ClassVar[str] = "schema_registry"
    latest_seconds: ClassVar[float] = 30.0
    """How long the latest version of a subject is cached, and that a schema was not found."""

    url: Url = "http://localhost:8081"
    """Base URL; it may have the path of a compatible API."""
    avro_unions: Literal["wrapped", "plain"] = "wrapped"
    """Values of Avro unions in JSON: `wrapped` in an object with the name of the branch, or `plain`."""
