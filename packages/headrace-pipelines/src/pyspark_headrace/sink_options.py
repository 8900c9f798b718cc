"""The options of `headrace-kafka`: those of Spark's Kafka sink, as the settings of Headrace's client."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import TypeAdapter, ValidationError

from headrace.config.kafka import EVERY_CLIENT, KafkaConfig
from headrace.config.kafka_java import SECURITY_KEYS, translated
from headrace.config.kafka_security import file_problems
from headrace.config.producer_config import ProducerConfig
from headrace.config.section import GroupName, TopicName
from headrace.config.spelling import nearest
from headrace.config.yaml_tree import KeyPath, dotted
from headrace.errors import ConfigError

FORMAT: Final = "headrace-kafka"
ACCEPT: Final = "acceptUnknownBatch"
_PREFIX: Final = "kafka."
_SERVERS: Final = "bootstrap.servers"
_TIMEOUT: Final = "transaction.timeout.ms"
_TIMEOUT_MS: Final = 60_000
_PRODUCER: Final = {
    **{name: name for name in ("batch.size", "compression.type", "linger.ms")},
    "max.request.size": "message.max.bytes",
}
"""Properties of Java's producer that a user may set, with librdkafka's names."""
_FIXED: Final = {"acks": ("all", "-1"), "enable.idempotence": ("true",)}
"""Properties whose values a transaction needs."""


class SinkOptions(NamedTuple):
    """The options, checked."""

    name: str
    """Name of the group that counts the micro-batches; those of the tasks begin with it."""
    topic: str
    """Topic of all rows; empty if the column `topic` has it."""
    accepts: bool
    """Whether a micro-batch in doubt is written, perhaps a second time."""
    kafka: KafkaConfig
    timeout_seconds: float
    producer: Mapping[str, Any]
    """Properties of the producer."""


def options_of(written: Mapping[str, str]) -> SinkOptions:
    """Return the options; their names are in lower case, as Spark gives them.

    Raises:
        ConfigError: One or more are not usable. The text names each, and what to do.
    """
    properties = {name.removeprefix(_PREFIX): value for name, value in written.items() if name.startswith(_PREFIX)}
    problems: list[str] = []

    def checked(option: str, read: Callable[[Any], Any], value: Any) -> Any:
        try:
            return read(value)
        except (ValidationError, ValueError) as cause:
            problems.extend(f"{option}: {text}" for text in _sentences(cause))
            return None

    name, topic = written.get("name", ""), written.get("topic", "")
    if not name:
        problems.append("name is missing: set a name for the producers and the group, which no other query has")
    checked("name", TypeAdapter(GroupName).validate_python, name or "missing")
    checked("topic", TypeAdapter(TopicName).validate_python, topic or "missing")
    accepts = checked(ACCEPT, TypeAdapter(bool).validate_python, written.get(ACCEPT.lower(), "false"))
    if not properties.get(_SERVERS):
        problems.append("kafka.bootstrap.servers is missing: set it to host:port of brokers")
    problems += _refusals(properties)
    timeout = checked(_PREFIX + _TIMEOUT, int, properties.get(_TIMEOUT, str(_TIMEOUT_MS)))
    security = checked("kafka", _security, properties)
    own = {name: value for name, value in properties.items() if name in EVERY_CLIENT}
    section = {"bootstrap_servers": properties.get(_SERVERS), "security": security or {}, "properties": own}
    kafka = checked("kafka", KafkaConfig.model_validate, section) if not problems else None
    chosen = {_PRODUCER[name]: value for name, value in properties.items() if name in _PRODUCER}
    producer = checked("kafka", ProducerConfig.model_validate, {"properties": chosen})
    if kafka:
        kafka = kafka.model_copy(update={"security": kafka.security.read_from(Path.cwd(), {})})
        problems += [f"{_option_of(each.path, properties)} {each.sentence}" for each in file_problems(kafka.security)]
    if problems:
        raise ConfigError(f"options of {FORMAT}: " + "; ".join(problems))
    assert kafka
    return SinkOptions(name, topic, accepts, kafka, timeout / 1000, producer.properties)


def _refusals(properties: Mapping[str, str]) -> Iterator[str]:
    """Yield why properties cannot be translated."""
    known = {_SERVERS, _TIMEOUT, *_PRODUCER, *_FIXED, *EVERY_CLIENT, *SECURITY_KEYS}
    for name, value in properties.items():
        if name in _FIXED and value.lower() not in _FIXED[name]:
            yield f"kafka.{name} is {value}, and a transaction needs {_FIXED[name][0]}: remove it"
        elif name not in known:
            near = nearest(name, known, 0.8)
            yield f"kafka.{name} is not supported: {f'did you mean kafka.{near}?' if near else 'remove it'}"


def _security(properties: Mapping[str, str]) -> dict[str, Any]:
    """Return the section `security` that options of TLS and login stand for."""
    tree: dict[str, Any] = {}
    for name in properties.keys() & SECURITY_KEYS.keys():
        for _, path, value in translated(name, properties):
            *sections, last = path
            node = tree
            for section in sections:
                node = node.setdefault(str(section), {})
            node[str(last)] = value
    return tree


def _option_of(setting: KeyPath, properties: Mapping[str, str]) -> str:
    """Return the option that a setting of TLS is from."""
    names = (name for name, of in SECURITY_KEYS.items() if of == dotted(setting) and name in properties)
    return _PREFIX + next(names, dotted(setting))


def _sentences(cause: ValueError) -> list[str]:
    if not isinstance(cause, ValidationError):
        return [str(cause)]
    return [
        f"{'.'.join(map(str, each['loc']))} {each['msg'].removeprefix('Value error, ')}".strip()
        for each in cause.errors(include_input=False, include_url=False)
    ]
