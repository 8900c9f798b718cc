"""A trigger whose events are records of topics: its settings, and how they are read from the file."""

import math
import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from headrace.config.consumers import DeliveryConfig, Where, fit_condition, fit_retry_topics
from headrace.config.explain import explain
from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity, warnings_of
from headrace.config.membership import ConsumerConfig
from headrace.config.section import GroupName, Number, TopicName
from headrace.config.yaml_tree import dotted
from headrace.functions.file_values import AnyCase, Duration, FilePart, Limit, Pause, Whole, is_list
from headrace.functions.function_keys import ANNOTATED, LOGIN
from headrace.functions.sections import FileReader, FileSection
from headrace.functions.triggers.trigger import S, Trigger, TriggerParts
from headrace.functions.triggers.trigger_security import SecurityReader, Written, cluster_problem, in_nuclio_names


def _broker(text: str) -> str:
    if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", text):
        raise ValueError(
            f"is {text!r}, which is not a valid broker: write host:port, and several as a list under brokers"
        )
    return text


_MEMBER: Final = {
    "session_timeout": "session.timeout.ms",
    "heartbeat_interval": "heartbeat.interval.ms",
    "retry_backoff": "fetch.error.backoff.ms",
    "rebalance_timeout": "max.poll.interval.ms",
    "max_wait_time": "fetch.wait.max.ms",
    "fetch_min": "fetch.min.bytes",
    "fetch_default": "max.partition.fetch.bytes",
}
"""Attributes, and the properties of the consumer that they are."""
_DEFAULTS: Final = {"rebalance_timeout": 60.0, "max_wait_time": 0.25, "fetch_min": 1, "fetch_default": 1_048_576}
"""Those of Nuclio that are not the client's; 0 means them too."""
_SPARE: Final = 1.2
"""The least time limit of a rebalance, in relation to the wait for records in flight."""


class KafkaAttributes(FilePart):
    """The Kafka part of a trigger: what it reads, and as which member of which group."""

    topics: Annotated[list[TopicName], Field(min_length=1), BeforeValidator(is_list)]
    group: Annotated[GroupName, Field(alias="consumerGroup")]
    brokers: Annotated[list[Annotated[str, AfterValidator(_broker)]], BeforeValidator(is_list)] = []
    """Brokers the file names; empty means those of headrace.yaml."""
    partitions: Annotated[list[Annotated[int, Field(ge=0), Number]], BeforeValidator(is_list)] = []
    """Numbers of the partitions of each topic that are read, without membership in the group; empty for its share."""
    security: KafkaSecurity | None = None
    """Its TLS and login; None for those of headrace.yaml, or for plain text if the file names brokers."""
    auto_offset_reset: Annotated[Literal["earliest", "latest"], Field(alias="initialOffset"), AnyCase] = "earliest"
    balance_strategy: Annotated[Literal["sticky", "range", "roundrobin"], AnyCase] = "sticky"
    session_timeout: Annotated[float, Field(ge=0.01, le=3600), Duration] = 10.0
    heartbeat_interval: Annotated[float, Field(ge=0.001, le=3600), Duration] = 3.0
    max_processing_time: Limit = 300.0
    """After this time without a completed record, a partition is not fetched until one completes."""
    rebalance_timeout: Annotated[float, Field(ge=0.001, le=86_400), Duration] = _DEFAULTS["rebalance_timeout"]
    max_wait_handler: Annotated[float, Field(gt=0, le=72_000, alias="maxWaitHandlerDuringRebalance"), Duration] = 5.0
    """The longest wait for records in flight before a partition is released."""
    retry_backoff: Annotated[float, Field(ge=0, le=300), Duration] | None = None
    max_wait_time: Annotated[float, Field(ge=0.001, le=50), Duration] = _DEFAULTS["max_wait_time"]
    fetch_min: Annotated[int, Field(ge=0, le=100_000_000), Number] = 1
    fetch_default: Annotated[int, Field(ge=0, le=1_000_000_000), Number] = 1_048_576
    fetch_max: Whole = 0
    """Bytes of the largest record that a worker gets; 0 for no limit."""
    where: Where = ""
    max_age: Limit | None = None
    """Seconds from which a record is too old for a delivery; None for no limit."""
    ack_window_size: Whole = 0
    """Records by which the committed offset stays behind the completed ones."""
    admin_timeout: Limit | None = None
    net_dial_timeout: Annotated[float, Field(gt=0, le=86_400), Duration] | None = None
    net_keep_alive_interval: Pause | None = None
    consumer: ConsumerConfig = ConsumerConfig()
    """Settings of the consumer that Nuclio has no name for, as in a reactive consumer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heartbeat_interval >= self.session_timeout:
            times = f"is {self.heartbeat_interval:g}s, and sessionTimeout {self.session_timeout:g}s"
            raise ValueError(
                f"heartbeatInterval {times}: write a shorter heartbeatInterval, or a longer sessionTimeout"
            )
        try:
            self.member  # noqa: B018 its model is the check
        except ValidationError as cause:
            text = cause.errors()[0]["msg"].removeprefix("Value error, ")
            settings = {**_MEMBER, "balance_strategy": "partition.assignment.strategy"}
            written = [name for name in settings if name in self.model_fields_set]
            names = ", ".join(f"{to_camel(name)} becomes {settings[name]}" for name in written)
            raise ValueError(f"{names}: {text}" if names else text) from None
        return self

    def cluster(self, kafka: KafkaConfig) -> KafkaConfig:
        """Return how to reach what the trigger reads: `kafka` itself, if nothing of it is the trigger's own."""
        own: dict[str, Any] = {"security": self.security} if self.security else {}
        if not kafka.is_at(self.brokers):
            own = {"bootstrap_servers": ",".join(self.brokers), "security": self.security or KafkaSecurity()}
        properties: dict[str, Any] = {}
        if self.net_dial_timeout:
            properties["socket.connection.setup.timeout.ms"] = max(1000, round(self.net_dial_timeout * 1000))
        if self.net_keep_alive_interval is not None:
            properties["socket.keepalive.enable"] = self.net_keep_alive_interval > 0
        if properties:
            own["properties"] = {**kafka.properties, **properties}
        if self.admin_timeout:
            own["request_timeout_seconds"] = self.admin_timeout
        return kafka.model_copy(update=own) if own else kafka

    @property
    def member(self) -> ConsumerConfig:
        """Group membership and fetching of this trigger's consumer; Nuclio's names win where both are written."""
        settings: dict[str, Any] = {**self.consumer.properties}
        written = self.model_fields_set
        for field, setting in _MEMBER.items():
            # The others only if the file has them: with the newer group protocol the broker owns the session.
            if field in written or (field in _DEFAULTS and setting not in settings):
                value = getattr(self, field) or _DEFAULTS.get(field, 0)
                settings[setting] = round(value * 1000) if setting.endswith(".ms") else value
        longest = max(settings["max.poll.interval.ms"], settings.get("session.timeout.ms", 10_000), 1000)
        # The client refuses less than the session, and a member that waits longer is late for the rebalance.
        settings["max.poll.interval.ms"] = max(longest, round(_SPARE * self.max_wait_handler * 1000))
        settings["max.partition.fetch.bytes"] = min(settings["max.partition.fetch.bytes"], self.fetch_max or math.inf)
        if "balance_strategy" in written:
            sticky = self.balance_strategy == "sticky"
            settings["partition.assignment.strategy"] = "cooperative-sticky" if sticky else self.balance_strategy
        return ConsumerConfig(properties=settings)


class KafkaTrigger(Trigger):
    """A trigger of kind `kafka-cluster` or `kafka`: events are records of topics."""

    kinds: ClassVar[tuple[str, ...]] = ("kafka-cluster", "kafka")
    mapping: ClassVar[str] = "attributes"

    kafka: KafkaAttributes

    @property
    def topics(self) -> list[str]:
        return self.kafka.topics

    @property
    def group(self) -> str:
        return self.kafka.group

    @classmethod
    def models(cls) -> list[type[BaseModel]]:
        return [KafkaAttributes, cls]

    def serve(self, parts: TriggerParts[S]) -> Sequence[S]:
        """Let a consumer deliver records."""
        return parts.consume(self)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.allocation == "key" and "ordering" not in self.model_fields_set:
            return self.model_copy(update={"ordering": "key"})._checked()
        return self._checked()

    def _checked(self) -> Self:
        """Return these settings if they fit each other."""
        fit_retry_topics(DeliveryConfig(ordering=self.ordering, retry=self.retry), self.group, self.topics)
        for name, topic in {"outputTopic": self.output_topic, "deadLetterTopic": self.dead_letter.topic}.items():
            if any(topic.replace("{topic}", origin) in self.topics for origin in self.topics):
                raise ValueError(f"{name} is {topic}, which this trigger consumes: write another topic")
        fit_condition(self.kafka.where, self.value_format)
        longest = self.kafka.max_processing_time  # without a completed record the partition is not fetched any more
        if self.batch.mode == "enable" and self.batch.timeout >= longest:
            text = f"batch.timeout is {self.batch.timeout:g}s, and maxProcessingTime {longest:g}s"
            raise ValueError(f"{text}: write less than it")
        if self.explicit_ack_mode != "disable" and self.allocation == "pool":
            raise ValueError(
                f"explicitAckMode is {self.explicit_ack_mode}, and workerAllocationMode pool: write static or key, "
                "so that the worker that acknowledges a record is the one that has it"
            )
        if self.explicit_ack_mode != "disable" and self.retry.topics:
            raise ValueError(
                f"explicitAckMode is {self.explicit_ack_mode}, and retry.topics are set: a record in a retry topic has "
                "left the topic by whose offset it is acknowledged: remove retry.topics"
            )
        if self.kafka.partitions and self.retry.topics:
            raise ValueError(
                "partitions are set, and retry.topics, whose records the processes of a group share: remove "
                "retry.topics, or raise retry.max_delay_seconds"
            )
        mode, window = self.explicit_ack_mode, self.kafka.ack_window_size
        isolation = self.kafka.member.properties.get("isolation.level")
        apart = {
            f"explicitAckMode {mode}, which commits apart from the outputs: write disable": mode != "disable",
            f"ackWindowSize {window}, by which offsets are committed after the outputs: remove it": window > 0,
            "retry.topics, which commit apart from the outputs: remove them": bool(self.retry.topics),
            "isolation.level read_uncommitted, which reads aborted records: remove it": isolation == "read_uncommitted",
            "partitions, from which Kafka cannot fence another process: remove them": bool(self.kafka.partitions),
        }
        if self.delivery == "exactly_once" and (why := next((text for text, found in apart.items() if found), "")):
            raise ValueError(f"delivery is exactly_once, and {why}, or write delivery: at_least_once")
        return self

    @classmethod
    def read(cls, file: FileReader, own: FileSection, attributes: FileSection) -> Self | None:
        """Return the trigger, with the annotations of what its attributes do not have."""
        if "topic" in attributes.values and "topics" in attributes.values:
            file.wrong(attributes.paths["topic"], "is written as well as topics: keep topics")
        elif "topic" in attributes.values:
            attributes.take("topics", attributes, "topic")
            attributes.values["topics"] = [attributes.values["topics"]]
        if "url" in own.values and not attributes.values.get("brokers"):
            attributes.values["brokers"], attributes.paths["brokers"] = [own.values["url"]], own.paths["url"]
        for key in ANNOTATED:
            if key.annotation in file.annotations.values and key.key not in attributes.values:
                attributes.take(key.key, file.annotations, key.annotation)
        names = (field.alias or name for name, field in KafkaAttributes.model_fields.items())
        kafka = {key: attributes.values[key] for key in names if key in attributes.values and key != "security"}
        made = file.model(cls, attributes, kafka=kafka | {"security": _security(file, attributes)})
        if made is None:
            return None
        other_cluster = file.config and not file.config.kafka.is_at(made.kafka.brokers)
        if made.delivery == "exactly_once" and other_cluster:
            text = "is exactly_once, and outputs go to the brokers of headrace.yaml: a transaction has one cluster"
            file.wrong(attributes.path_of("delivery"), f"{text}; write at_least_once, or remove brokers")
        return made


def _security(file: FileReader, attributes: FileSection) -> KafkaSecurity | None:
    """Return the TLS and login of a trigger: its attributes, and the annotations of what they do not have."""
    sections = {"": attributes, "tls": file.below(attributes, "tls"), "sasl": file.below(attributes, "sasl")}
    sections["sasl.oauth"] = file.below(sections["sasl"], "oauth")
    written: dict[str, Written] = {}
    for name, setting in LOGIN.items():
        section, _, key = name.rpartition(".")
        source, key = (
            (sections[section], key) if key in sections[section].values else (file.annotations, setting.annotation)
        )
        if key in source.values:
            written[name] = Written(source.values[key], source.paths[key])
    reader = SecurityReader(written, attributes.path, file)
    before = len(file.problems.found)
    try:
        security = reader.read()
    except ValidationError as cause:
        explain(reader.explained(cause), file.tree, file.problems)
        return None
    if len(file.problems.found) > before:
        return None
    for sentence in warnings_of(security, dotted(attributes.path)) if security else ():
        file.warn((), in_nuclio_names(sentence))
    kafka, brokers = file.config and file.config.kafka, attributes.values.get("brokers") or []
    if kafka and isinstance(brokers, list) and (why := cluster_problem(security, brokers, kafka)):
        used = (one.path for name, one in written.items() if name != "secretPath")
        path = next(used, attributes.path_of("brokers"))
        file.wrong(path, why)
    plain_anyway = kafka and security == KafkaSecurity(protocol="plaintext") and kafka.is_at(brokers)
    return None if plain_anyway else security
