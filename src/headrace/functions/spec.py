"""The model of a function.yaml: Nuclio's keys, with Headrace's own among the attributes of a trigger.

Unknown keys are warnings, because Nuclio ignores them and unmodified files must load; wrong values are errors.
Where Nuclio's documentation and code disagree, the documented default counts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from headrace.config.consumers import (
    OTHER_ERRORS,
    Action,
    DeadLetterConfig,
    DeliveryConfig,
    Ordering,
    RetryConfig,
    fit_retry_topics,
)
from headrace.config.internal_topics import external_topic
from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.membership import ConsumerConfig
from headrace.config.section import FormatName, GroupName, Number, TopicName

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_WHOLE = re.compile(rf"([+-]?)(0|(?:{_PART})+)", re.ASCII)


def parse_duration(text: str) -> float:
    """Return the seconds of a duration as Go writes it: `10s`, `1m30s`, `250ms`.

    Raises:
        ValueError: The text is no duration; a bare number other than 0 is none.

    Source: Go's time.ParseDuration.
    """
    whole = _WHOLE.fullmatch(text)
    if not whole:
        raise ValueError(f"{text!r} is no duration: write a number with a unit, such as 10s, 1m30s or 250ms")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, whole[2]))
    return -seconds if whole[1] == "-" else seconds


def parse_size(value: Any) -> Any:
    """Return the bytes of a size as Kubernetes writes it: `512Mi`, `1G`, or a number of bytes.

    Raises:
        ValueError: The text is no size.
    """
    whole = re.fullmatch(r"(\d+)([KMGT]i?|k)?", str(value))
    if not whole:
        raise ValueError(f"is {value!r}, which is no size: write bytes, or a number with a unit such as 512Mi or 1Gi")
    unit = whole[2] or ""
    return int(whole[1]) * (1024 if unit.endswith("i") else 1000) ** ("KMGT".find(unit[:1].upper()) + 1 if unit else 0)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _handler(text: str) -> str:
    if not re.fullmatch(r"[\w|-]+(\.[\w|-]+)*:\w+", text):
        raise ValueError(f"is {text!r}: write module:function, such as main:handler")
    return text


def _no_explicit_ack(mode: str) -> str:
    if mode != "disable":
        # Acknowledging by the handler's return would commit records which the handler has not acknowledged.
        raise ValueError("asks for explicit acknowledgement, which is not supported: write disable")
    return mode


Duration = BeforeValidator(lambda value: parse_duration(str(value)))
AnyCase = BeforeValidator(_lower)
OnFailure = BeforeValidator(lambda value: {"deadletter": "deadLetter"}.get(_lower(value), _lower(value)))
_ACTIONS: Mapping[str, Action] = {"deadLetter": "dead_letter", "handled": "skip"}
"""What `onFailure` means for errors without a line of their own."""
Workers = Annotated[int, Field(ge=0, le=1000), Number]


class _Part(BaseModel):
    """Part of the file; fields are found by the file's own names."""

    model_config = ConfigDict(
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        hide_input_in_errors=True,  # it may be a secret
    )


class KafkaAttributes(_Part):
    """The Kafka part of a trigger: what it reads, and as which member of which group."""

    topics: Annotated[list[TopicName], Field(min_length=1)]
    group: Annotated[GroupName, Field(alias="consumerGroup")]
    brokers: list[str] = []
    """Brokers the file names; empty means those of headrace.yaml."""
    security: KafkaSecurity | None = None
    """TLS and login of its own; None for those of headrace.yaml, or plain text on brokers of its own."""
    auto_offset_reset: Annotated[Literal["earliest", "latest"], Field(alias="initialOffset"), AnyCase] = "earliest"
    session_timeout: Annotated[float, Field(ge=0.01), Duration] = 10.0
    heartbeat_interval: Annotated[float, Field(ge=0.001), Duration] = 3.0
    max_wait_time: Annotated[float, Field(ge=0.001), Duration] = 0.25
    fetch_min: Annotated[int, Field(ge=0, le=100_000_000), Number] = 1
    fetch_default: Annotated[int, Field(ge=0, le=1_000_000_000), Number] = 0
    consumer: ConsumerConfig = ConsumerConfig()
    """Settings of the consumer that Nuclio has no name for, as in a reactive consumer."""

    @model_validator(mode="after")
    def _consistent(self) -> KafkaAttributes:
        if self.heartbeat_interval >= self.session_timeout:
            times = f"is {self.heartbeat_interval:g}s, and sessionTimeout {self.session_timeout:g}s"
            raise ValueError(f"heartbeatInterval {times}: write less than it")
        return self

    def cluster(self, kafka: KafkaConfig) -> KafkaConfig:
        """Return how to reach what the trigger reads: `kafka` itself, if it has neither brokers nor a login."""
        if kafka.is_at(self.brokers):
            return kafka.model_copy(update={"security": self.security}) if self.security else kafka
        own = {"bootstrap_servers": ",".join(self.brokers), "security": self.security or KafkaSecurity()}
        return kafka.model_copy(update=own)

    @property
    def member(self) -> ConsumerConfig:
        """Group membership and fetching of this trigger's consumer."""
        settings: dict[str, Any] = {
            "fetch_wait_seconds": self.max_wait_time,
            "fetch_min_bytes": self.fetch_min or 1,
            "partition_fetch_bytes": self.fetch_default or 1_048_576,
        }
        # Only if the file has them: with the newer group protocol the broker owns the session.
        if "session_timeout" in self.model_fields_set:
            settings["session_timeout_seconds"] = self.session_timeout
        if "heartbeat_interval" in self.model_fields_set:
            settings["heartbeat_seconds"] = self.heartbeat_interval
        return ConsumerConfig(**settings, **self.consumer.model_dump(exclude_unset=True, exclude=set(settings)))


class Trigger(_Part):
    """The settings of triggers of every kind: workers, formats, output, and the policy for failed events."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    kind: str
    """As in the file."""
    disabled: Literal[False] = False
    num_workers: Workers = 0
    max_workers: Workers = 0
    allocator_name: Annotated[str, Field(alias="workerAllocatorName", pattern=r"^[A-Za-z0-9._-]*$")] = ""
    """Triggers with the same name share their workers; empty for workers of its own."""
    allocation: Annotated[Literal["pool", "static", "key"], Field(alias="workerAllocationMode"), AnyCase] = "pool"
    """`pool`: the first free worker; `static`: a partition always has the same one; `key`: a key has."""
    termination_seconds: Annotated[float, Field(ge=0, alias="workerTerminationTimeout"), Duration] = 10.0
    """The longest time that a worker may take to end."""
    memory_limit_bytes: Annotated[int, Field(ge=0, alias="workerMemoryLimit"), BeforeValidator(parse_size)] = 0
    """Resident memory of a worker, above which it is replaced; 0 for no limit. A setting of Headrace."""
    on_failure: Annotated[Literal["retry", "deadLetter", "handled", "stop"], OnFailure] = "retry"
    """What happens to a record whose handler fails; a setting of Headrace. `retry`: called again, as `retry` sets it,
    then a dead letter. `deadLetter`: a dead letter at once. `handled`: it has ended, as in Nuclio, and counts as
    failed. `stop`: its partition stops after the last attempt."""
    explicit_ack_mode: Annotated[str, AnyCase, AfterValidator(_no_explicit_ack)] = "disable"
    ordering: Annotated[Ordering, AnyCase] = "partition"
    """The records that wait for each other; a setting of Headrace, as the following."""
    key_format: Annotated[FormatName, AnyCase] = "binary"
    value_format: Annotated[FormatName, AnyCase] = "binary"
    output_topic: Annotated[TopicName, AfterValidator(external_topic)] | Literal[""] = ""
    """Topic of the outputs; empty when there are none."""
    output_format: Annotated[Literal["json", "string", "binary"], AnyCase] = "json"
    dead_letter: Annotated[
        DeadLetterConfig, Field(alias="deadLetterTopic"), BeforeValidator(lambda topic: {"topic": topic})
    ] = DeadLetterConfig()
    attempts: Annotated[int | None, Field(ge=1), Number] = None
    """Short for `retry: {attempts: ...}`."""
    retry_settings: Annotated[RetryConfig, Field(alias="retry")] = RetryConfig()
    """The policy for failed records, as in a reactive consumer."""

    @property
    def retry(self) -> RetryConfig:
        """The policy for failed records."""
        settings: dict[str, Any] = {"attempts": self.attempts} if self.attempts else {}
        if action := _ACTIONS.get(self.on_failure):
            settings["errors"] = {OTHER_ERRORS: action, **self.retry_settings.errors}
        return self.retry_settings.model_copy(update=settings)

    @property
    def dead_letters(self) -> DeadLetterConfig:
        """Where dead letters go, and whether there are any."""
        return self.dead_letter.model_copy(update={"enabled": self.on_failure != "stop"})

    @property
    def workers(self) -> int:
        """Worker processes."""
        return self.num_workers or self.max_workers or 1


class KafkaTrigger(Trigger):
    """A trigger of kind `kafka-cluster` or `kafka`: events are records of topics."""

    kafka: KafkaAttributes

    @property
    def topics(self) -> list[str]:
        """Topics it reads."""
        return self.kafka.topics

    @property
    def group(self) -> str:
        """The group it reads in."""
        return self.kafka.group

    @model_validator(mode="after")
    def _consistent(self) -> KafkaTrigger:
        if self.allocation == "key" and "ordering" not in self.model_fields_set:
            self.__dict__["ordering"] = "key"
        fit_retry_topics(DeliveryConfig(ordering=self.ordering, retry=self.retry), self.group, self.topics)
        for name, topic in {"outputTopic": self.output_topic, "deadLetterTopic": self.dead_letter.topic}.items():
            if any(topic.replace("{topic}", origin) in self.topics for origin in self.topics):
                raise ValueError(f"{name} is {topic}, which this trigger consumes: write another topic")
        return self


AnyTrigger = KafkaTrigger
"""A trigger of one of the kinds that Headrace runs; a further kind joins this union."""


class Variable(_Part):
    """One environment variable."""

    name: Annotated[str, Field(pattern=r"^[^=\x00]+$")]
    value: str = ""
    value_from: Any = None
    """A reference into the platform Nuclio runs on; such a variable is left out."""


class FunctionSpec(_Part):
    """One function file."""

    name: str
    namespace: str = "default"
    description: str = ""
    handler: Annotated[str, AfterValidator(_handler)]
    """`module.sub:function`."""
    variables: Annotated[list[Variable], Field(alias="env")] = []
    event_timeout_seconds: Annotated[Annotated[float, Field(gt=0), Duration] | None, Field(alias="eventTimeout")] = None
    """Longest time for one event; None for no limit."""
    readiness_timeout_seconds: Annotated[int, Field(ge=0, le=86_400), Number, AfterValidator(lambda n: n or 60)] = 60
    """Longest time for loading the handler and `init_context`; 0 in the file means the default."""
    folder: Path
    """The folder of the file, which holds the handler's module."""
    triggers: list[AnyTrigger]

    @property
    def worker_pools(self) -> list[list[AnyTrigger]]:
        """The triggers, those together that share their workers."""
        pools: dict[tuple[str, str], list[AnyTrigger]] = {}
        for trigger in self.triggers:
            pools.setdefault((trigger.allocator_name, "" if trigger.allocator_name else trigger.name), []).append(
                trigger
            )
        return [*pools.values()]

    @property
    def env(self) -> Mapping[str, str]:
        """Environment of the workers, added to this process's own."""
        return {variable.name: variable.value for variable in self.variables if variable.value_from is None}


def triggers_of(functions: Iterable[FunctionSpec]) -> list[KafkaTrigger]:
    """Return every trigger of these functions."""
    return [trigger for function in functions for trigger in function.triggers]
