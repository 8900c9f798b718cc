"""The model of a function.yaml: Nuclio's keys, with Headrace's own among the attributes of a trigger.

Unknown keys are warnings, because Nuclio ignores them and unmodified files must load; wrong values are errors.
Where Nuclio's documentation and code disagree, the documented default counts.
"""

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
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
from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSecurity
from headrace.config.membership import ConsumerConfig
from headrace.config.section import FormatName, GroupName, Number, PlainFormatName, TopicName
from headrace.config.topic_names import external_topic
from headrace.functions import protocol
from headrace.functions.libraries import Libraries

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_WHOLE = re.compile(rf"([+-]?)(0|(?:{_PART})+)", re.ASCII)
_CAMEL = {"explicitonly": "explicitOnly", "upto": "upTo", "deadletter": "deadLetter", "warn": "warning"}
"""Words of the file that are not written in lower case, or have a second name."""


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


def _any_case(value: Any) -> Any:
    return _CAMEL.get(value.lower(), value.lower()) if isinstance(value, str) else value


def _handler(text: str) -> str:
    if not re.fullmatch(r"[\w|-]+(\.[\w|-]+)*:\w+", text):
        raise ValueError(f"is {text!r}: write module:function, such as main:handler")
    return text


def _is_list(value: Any) -> Any:
    if isinstance(value, str):
        raise ValueError(f"is the text {value!r}: write a list, such as [{value}]")
    return value


def _broker(text: str) -> str:
    if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", text):
        raise ValueError(f"is {text!r}, which is no broker: write host:port, and several as a list under brokers")
    return text


def _no_partitions(found: Any) -> Any:
    if found:
        raise ValueError("names partitions, and the members of a group share all of them: remove it")
    return found


def _version(text: str) -> str:
    numbers = re.fullmatch(r"0\.(\d+)\.\d+\.\d+|[1-9]\d*\.\d+\.\d+", text)
    if not numbers:
        raise ValueError(f"is {text!r}, which is no version of Kafka: write one such as 3.5.2, or remove it")
    if numbers[1] and int(numbers[1]) < 11:
        raise ValueError(f"is {text}, where records have no headers yet: write 0.11.0.0 or later, or remove it")
    return text


Duration = BeforeValidator(lambda value: parse_duration(str(value)))
AnyCase = BeforeValidator(_any_case)
_ACTIONS: Mapping[str, Action] = {"deadLetter": "dead_letter", "handled": "skip"}
"""What `onFailure` means for errors without a line of their own."""
Workers = Annotated[int, Field(ge=0, le=1000), Number]
Whole = Annotated[int, Field(ge=0), Number]
Pause = Annotated[float, Field(ge=0), Duration]
Limit = Annotated[float, Field(gt=0), Duration]
NoPartitions = Annotated[list[Any], BeforeValidator(_no_partitions)]

_LEVELS: Final = ("debug", "info", "warning", "error")
_MEMBER: Final = {
    "session_timeout": "session_timeout_seconds",
    "heartbeat_interval": "heartbeat_seconds",
    "retry_backoff": "fetch_retry_seconds",
    "rebalance_timeout": "max_poll_interval_seconds",
    "max_wait_time": "fetch_wait_seconds",
    "fetch_min": "fetch_min_bytes",
    "fetch_default": "partition_fetch_bytes",
}
"""Attributes, and the settings of the consumer that they are."""
_DEFAULTS: Final = {"rebalance_timeout": 60.0, "max_wait_time": 0.25, "fetch_min": 1, "fetch_default": 1_048_576}
"""Those of Nuclio that are not the client's; 0 means them too."""


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

    topics: Annotated[list[TopicName], Field(min_length=1), BeforeValidator(_is_list)]
    group: Annotated[GroupName, Field(alias="consumerGroup")]
    brokers: Annotated[list[Annotated[str, AfterValidator(_broker)]], BeforeValidator(_is_list)] = []
    """Brokers the file names; empty means those of headrace.yaml."""
    security: KafkaSecurity | None = None
    """TLS and login of its own; None for those of headrace.yaml, or plain text on brokers of its own."""
    auto_offset_reset: Annotated[Literal["earliest", "latest"], Field(alias="initialOffset"), AnyCase] = "earliest"
    balance_strategy: Annotated[Literal["sticky", "range", "roundrobin"], AnyCase] = "sticky"
    session_timeout: Annotated[float, Field(ge=0.01, le=3600), Duration] = 10.0
    heartbeat_interval: Annotated[float, Field(ge=0.001, le=3600), Duration] = 3.0
    max_processing_time: Limit = 300.0
    """The longest time in which no record of a partition ends while the partition is still fetched."""
    rebalance_timeout: Annotated[float, Field(ge=0.001, le=86_400), Duration] = _DEFAULTS["rebalance_timeout"]
    max_wait_handler: Annotated[Limit, Field(alias="maxWaitHandlerDuringRebalance")] = 5.0
    """The longest wait for records in flight before a partition is given up."""
    rebalance_retry_max: Whole = 4
    rebalance_retry_backoff: Pause = 2.0
    retry_backoff: Annotated[float, Field(ge=0, le=300), Duration] | None = None
    max_wait_time: Annotated[float, Field(ge=0.001, le=50), Duration] = _DEFAULTS["max_wait_time"]
    fetch_min: Annotated[int, Field(ge=0, le=100_000_000), Number] = 1
    fetch_default: Annotated[int, Field(ge=0, le=1_000_000_000), Number] = 1_048_576
    fetch_max: Whole = 0
    """Bytes of the largest record that a worker gets; 0 for no limit."""
    channel_buffer_size: Annotated[int, Field(ge=0, le=256), Number] = 256
    ack_window_size: Whole = 0
    """Records by which the committed offset stays behind what has ended."""
    commit_interval: Annotated[float, Field(ge=0.01, le=3600), Duration] = 1.0
    """Time from one commit to the next. A setting of Headrace; Nuclio's is 1s too."""
    log_level: Annotated[int, Number] = 0
    version: Annotated[str, AfterValidator(_version)] = "3.5.2"
    admin_timeout: Limit | None = None
    admin_retry_backoff: Pause = 2.0
    admin_retry_max: Whole = 10
    metadata_timeout: Limit = 15.0
    metadata_retry_backoff: Pause = 2.0
    metadata_retry_max: Whole = 10
    net_dial_timeout: Annotated[float, Field(gt=0, le=86_400), Duration] | None = None
    net_keep_alive_interval: Pause | None = None
    partitions: NoPartitions = []
    consumer: ConsumerConfig = ConsumerConfig()
    """Settings of the consumer that Nuclio has no name for, as in a reactive consumer."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        pairs = (("heartbeat_interval", "session_timeout"), ("max_wait_handler", "rebalance_timeout"))
        for shorter, longer in pairs:
            if getattr(self, shorter) >= getattr(self, longer):
                times = f"is {getattr(self, shorter):g}s, and {to_camel(longer)} {getattr(self, longer):g}s"
                name = type(self).model_fields[shorter].alias or to_camel(shorter)
                raise ValueError(f"{name} {times}: write a shorter {name}, or a longer {to_camel(longer)}")
        try:
            self.member  # noqa: B018 its model is the check
        except ValidationError as cause:
            text = cause.errors()[0]["msg"].removeprefix("Value error, ")
            for field, setting in {**_MEMBER, "balance_strategy": "assignors"}.items():
                text = text.replace(setting, to_camel(field)) if field in self.model_fields_set else text
            raise ValueError(text) from None
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
        settings, written = self.consumer.model_dump(exclude_unset=True), self.model_fields_set
        for field, setting in _MEMBER.items():
            # The others only if the file has them: with the newer group protocol the broker owns the session.
            if field in written or (field in _DEFAULTS and setting not in settings):
                settings[setting] = getattr(self, field) or _DEFAULTS.get(field, 0)
        longest = max(settings["max_poll_interval_seconds"], settings.get("session_timeout_seconds", 10.0), 1.0)
        settings["max_poll_interval_seconds"] = longest  # the client refuses less than the session
        settings["partition_fetch_bytes"] = min(settings["partition_fetch_bytes"], self.fetch_max or math.inf)
        if "balance_strategy" in written:
            sticky = self.balance_strategy == "sticky"
            settings["assignors"] = ["cooperative-sticky" if sticky else self.balance_strategy]
        return ConsumerConfig(**settings)


class HandlerBatch(_Part):
    """How many events one call of a batch handler gets."""

    mode: Annotated[Literal["disable", "enable"], AnyCase] = "disable"
    batch_size: Annotated[int, Field(ge=1, le=100_000), Number] = 10
    timeout: Limit = 1.0
    """The longest wait for a full batch."""


class Trigger(_Part):
    """The settings of triggers of every kind: workers, formats, output, and the policy for failed events."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    kind: str
    """As in the file."""
    disabled: Annotated[bool, Field(strict=True)] = False
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
    on_failure: Annotated[Literal["retry", "deadLetter", "handled", "stop"], AnyCase] = "retry"
    """What happens to a record whose handler fails; a setting of Headrace. `retry`: called again, as `retry` sets it,
    then a dead letter. `deadLetter`: a dead letter at once. `handled`: it has ended, as in Nuclio, and counts as
    failed. `stop`: its partition stops after the last attempt."""
    explicit_ack_mode: Annotated[Literal["disable", "enable", "explicitOnly"], AnyCase] = "disable"
    """Whether a record ends with its handler, with an explicit acknowledgement, or with either."""
    explicit_ack_wait: Annotated[Pause, Field(alias="waitExplicitAckDuringRebalanceTimeout")] = 0.1
    """The longest wait for acknowledgements before a partition is given up."""
    explicit_ack_ends: Annotated[Literal["upTo", "one"], AnyCase] = "upTo"
    """What an explicit acknowledgement ends: its record and those before it, as in Nuclio, or its record. A setting
    of Headrace."""
    batch: HandlerBatch = HandlerBatch()
    delivery: Annotated[Literal["at_least_once", "exactly_once"], AnyCase] = "at_least_once"
    """Whether outputs and offsets are committed in one transaction."""
    ordering: Annotated[Ordering, AnyCase] = "partition"
    """The records that wait for each other; a setting of Headrace, as the following."""
    key_format: Annotated[FormatName, AnyCase] = "binary"
    value_format: Annotated[FormatName, AnyCase] = "binary"
    output_topic: Annotated[TopicName, AfterValidator(external_topic)] | Literal[""] = ""
    """Topic of the outputs; empty when there are none."""
    output_format: Annotated[PlainFormatName, AnyCase] = "json"
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
    def _consistent(self) -> Self:
        if self.allocation == "key":  # with upTo, an acknowledgement would end records that other workers keep
            own = {"ordering": "key", "explicit_ack_ends": "one"}
            self.__dict__.update({name: own[name] for name in own.keys() - self.model_fields_set})
        fit_retry_topics(DeliveryConfig(ordering=self.ordering, retry=self.retry), self.group, self.topics)
        for name, topic in {"outputTopic": self.output_topic, "deadLetterTopic": self.dead_letter.topic}.items():
            if any(topic.replace("{topic}", origin) in self.topics for origin in self.topics):
                raise ValueError(f"{name} is {topic}, which this trigger consumes: write another topic")
        longest = self.kafka.max_processing_time  # without an end of a record the partition is not fetched any more
        if self.batch.mode == "enable" and self.batch.timeout >= longest:
            text = f"batch.timeout is {self.batch.timeout:g}s, and maxProcessingTime {longest:g}s"
            raise ValueError(f"{text}: write less than it")
        if self.explicit_ack_mode != "disable" and self.allocation == "pool":
            raise ValueError(
                f"explicitAckMode is {self.explicit_ack_mode}, and workerAllocationMode pool: write static or key, "
                "so that the worker that acknowledges a record is the one that has it"
            )
        if self.explicit_ack_mode != "disable" and self.retry.tiers:
            raise ValueError(
                f"explicitAckMode is {self.explicit_ack_mode}, and retry.tiers are set: a record in a retry topic has "
                "left the topic by whose offset it is acknowledged: remove tiers"
            )
        mode, window, isolation = self.explicit_ack_mode, self.kafka.ack_window_size, self.kafka.member.isolation_level
        apart = {
            f"explicitAckMode {mode}, which commits apart from the outputs: write disable": mode != "disable",
            f"ackWindowSize {window}, by which offsets are committed after the outputs: remove it": window > 0,
            "retry.tiers, which commit apart from the outputs: remove them": bool(self.retry.tiers),
            "isolation_level read_uncommitted, which reads aborted records: remove it": isolation == "read_uncommitted",
        }
        if self.delivery == "exactly_once" and (why := next((text for text, found in apart.items() if found), "")):
            raise ValueError(f"delivery is exactly_once, and {why}, or write delivery: at_least_once")
        return self


class HttpTrigger(Trigger):
    """A trigger of kind `http`: events are requests."""

    port: Annotated[int, Field(ge=0, le=65_535), Number] = 8080
    max_body_bytes: Annotated[int, Field(ge=0, le=1 << 28, alias="maxRequestBodySize"), Number] = 4_194_304
    worker_wait_ms: Annotated[int, Field(alias="workerAvailabilityTimeoutMilliseconds"), Number] = 10_000
    """The longest wait for a worker; below 0 means the default."""
    value_format: Literal["json"] = "json"


AnyTrigger = KafkaTrigger | HttpTrigger
"""A trigger of one of the kinds that Headrace runs."""


class Variable(_Part):
    """One environment variable."""

    name: Annotated[str, Field(pattern=r"^[^=\x00]+$")]
    value: str = ""
    value_from: Any = None
    """A reference into the platform Nuclio runs on, or to an optional secret; such a variable is left out."""


class LoggerSink(_Part):
    """One destination of log lines; Headrace has one log."""

    level: Annotated[Literal["debug", "info", "warning", "error"], AnyCase] = "debug"


class FunctionSpec(_Part):
    """One function file."""

    name: str
    namespace: str = "default"
    description: str = ""
    version: Annotated[int, Number] = 0
    handler: Annotated[str, AfterValidator(_handler)]
    """`module.sub:function`."""
    variables: Annotated[list[Variable], Field(alias="env")] = []
    event_timeout_seconds: Annotated[Annotated[float, Field(gt=0), Duration] | None, Field(alias="eventTimeout")] = None
    """Longest time for one event; None for no limit."""
    readiness_timeout_seconds: Annotated[int, Field(ge=0, le=86_400), Number, AfterValidator(lambda n: n or 60)] = 60
    """Longest time for loading the handler and `init_context`; 0 in the file means the default."""
    logger_sinks: list[LoggerSink] = []
    replicas: Annotated[int | None, Number] = None
    min_replicas: Whole | None = None
    max_replicas: Whole | None = None
    disable_default_http_trigger: Annotated[bool, Field(alias="disableDefaultHTTPTrigger")] = True
    folder: Path
    """The folder of the file, which holds the handler's module."""
    libraries: Libraries | None = None
    """Libraries of its own; None for those of Headrace alone."""
    triggers: list[KafkaTrigger]
    http: HttpTrigger | None = None
    """Its trigger of kind `http`."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        least, most = self.replica_bounds
        if least > most:
            raise ValueError(f"minReplicas is {least}, and maxReplicas {most}: write them the other way around")
        if self.http and any(trigger.batch.mode == "enable" for trigger in self.all_triggers):
            text = "of kind http, whose calls have one event, and batch, whose calls have a list"
            remedy = "write batch: {mode: disable}, or move one to a function of its own"
            raise ValueError(f"triggers have {self.http.name} {text}: {remedy}")
        acknowledging = [trigger for trigger in self.triggers if trigger.explicit_ack_mode != "disable"]
        topics = [topic for trigger in acknowledging for topic in trigger.topics]
        if twice := next((topic for topic in topics if topics.count(topic) > 1), ""):
            raise ValueError(
                f"triggers has two with explicitAckMode that read {twice}, and an acknowledgement names no trigger: "
                "move one of them to a function of its own"
            )
        return self

    @property
    def replica_bounds(self) -> tuple[int, int]:
        """The fewest and the most processes that may run this function."""
        if self.replicas is not None:
            return max(0, self.replicas), max(0, self.replicas)
        written = [number for number in (self.min_replicas, self.max_replicas) if number is not None] or [1]
        return written[0], written[-1]

    @property
    def all_triggers(self) -> list[AnyTrigger]:
        """The triggers of every kind."""
        return [*self.triggers, *filter(None, [self.http])]

    @property
    def log_level(self) -> str:
        """The least level of the function's log lines; empty for that of the process."""
        return min((sink.level for sink in self.logger_sinks), key=_LEVELS.index, default="")

    @property
    def worker_pools(self) -> list[list[AnyTrigger]]:
        """The triggers, those together that share their workers."""
        pools: dict[tuple[str, str], list[AnyTrigger]] = {}
        for trigger in self.all_triggers:
            shared = trigger.allocator_name
            pools.setdefault((shared, "" if shared else trigger.name), []).append(trigger)
        return [*pools.values()]

    def setup(self, triggers: Iterable[AnyTrigger], worker_id: str, log_level: str) -> protocol.Setup:
        """Return the settings of a worker of these triggers."""
        settings = []
        for one in triggers:
            formats = one.key_format, one.value_format, one.output_format
            batch_size = one.batch.batch_size if one.batch.mode == "enable" else 0
            settings.append(protocol.TriggerSetup(one.kind, one.name, *formats, one.output_topic, batch_size))
        about = {"NAME": self.name, "DESCRIPTION": self.description, "VERSION": str(self.version)}
        about["HANDLER"] = self.handler
        return protocol.Setup(
            handler=self.handler,
            folder=str(self.folder),
            libraries=str(self.libraries.folder) if self.libraries else "",
            worker_id=worker_id,
            triggers=settings,
            namespace=self.namespace,
            log_level=log_level,
            env={**{f"NUCLIO_FUNCTION_{name}": text for name, text in about.items()}, **self.env},
        )

    @property
    def env(self) -> Mapping[str, str]:
        """Environment of the workers, added to this process's own without the settings of Headrace."""
        return {variable.name: variable.value for variable in self.variables if variable.value_from is None}


def triggers_of(functions: Iterable[FunctionSpec]) -> list[KafkaTrigger]:
    """Return every trigger of these functions."""
    return [trigger for function in functions for trigger in function.triggers]
