"""What a function.yaml says, read as Nuclio reads it, with Headrace's additions among the trigger's attributes.

Source: functions.md sections 1 and 10; defaults where documents and code of the original disagree: decisions.md 20.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import TypeAdapter, ValidationError

from headrace.config.model import DeadLetterConfig, GroupName, RetryConfig, TopicName
from headrace.config.yaml_tree import Problems, read_tree
from headrace.errors import FunctionInvalid
from headrace.functions.fields import Fields

log = logging.getLogger(__name__)

_FORMATS = ("binary", "string", "json", "avro")
_OUTPUT_FORMATS = ("json", "string", "binary")
_KAFKA_KINDS = ("kafka-cluster", "kafka")
_HANDLER = re.compile(r"[\w|-]+(\.[\w|-]+)*:\w+")
_TRIGGER_NAME = re.compile(r"[A-Za-z0-9._-]+")
_MAX_WORKERS = 1000
_topic_name: TypeAdapter[str] = TypeAdapter(TopicName)
_group_name: TypeAdapter[str] = TypeAdapter(GroupName)

_TOP = ("apiVersion", "kind", "metadata", "spec", "status")
_METADATA = ("name", "namespace", "labels", "annotations", "resourceVersion")
_SPEC = (
    *("description", "handler", "runtime", "env", "triggers", "eventTimeout", "readinessTimeoutSeconds"),
    *("volumes", "minReplicas", "maxReplicas", "replicas", "targetCPU", "loggerSinks", "scaleToZero", "resources"),
    *("disableDefaultHTTPTrigger", "disableSensitiveFieldsMasking", "dataBindings", "version", "build", "alias"),
    *("image", "imageHash", "imagePullSecrets", "imagePullPolicy", "publish", "securityContext", "serviceAccount"),
    *("platform", "nodeSelector", "affinity", "tolerations", "priorityClassName", "preemptionPolicy", "avatar"),
    *("envFrom", "runRegistry", "runtimeAttributes", "serviceType", "autoScaleMetrics", "customScalingMetricSpecs"),
    *("waitReadinessTimeoutBeforeFailure", "sidecars", "initContainers", "podAnnotations", "disable"),
)
_TRIGGER_READ = ("kind", "name", "disabled", "numWorkers", "maxWorkers", "workerTerminationTimeout", "explicitAckMode")
_TRIGGER_IGNORED = ("workerAllocatorName", "batch", "waitExplicitAckDuringRebalanceTimeout", "partitions", "paths")
_TRIGGER = (
    *(*_TRIGGER_READ, *_TRIGGER_IGNORED, "url", "attributes", "workerAvailabilityTimeoutMilliseconds"),
    *("class", "username", "password", "secret", "annotations"),
)
_ATTRIBUTES_READ = (
    *("brokers", "topics", "consumerGroup", "initialOffset", "workerAllocationMode", "sessionTimeout"),
    *("heartbeatInterval", "maxWaitTime", "fetchMin", "fetchDefault"),
    *("keyFormat", "valueFormat", "outputTopic", "outputFormat", "deadLetterTopic", "attempts"),
)
_ATTRIBUTES_IGNORED = (
    *("balanceStrategy", "maxProcessingTime", "rebalanceTimeout", "rebalanceRetryMax", "rebalanceRetryBackoff"),
    *("retryBackoff", "maxWaitHandlerDuringRebalance", "fetchMax", "channelBufferSize", "ackWindowSize", "logLevel"),
    *("version", "secretPath", "caCert", "accessKey", "accessCertificate", "tls", "sasl", "partitions"),
    *("adminTimeout", "adminRetryBackoff", "adminRetryMax", "metadataTimeout", "metadataRetryBackoff"),
    *("metadataRetryMax", "netDialTimeout", "netKeepAliveInterval"),
)


@dataclass(frozen=True)
class KafkaTrigger:
    """One Kafka trigger of a function."""

    name: str
    kind: str
    """As written: `kafka-cluster` or `kafka`."""
    topics: tuple[str, ...]
    group: str
    brokers: tuple[str, ...] = ()
    """Brokers the file names; empty means those of headrace.yaml."""
    auto_offset_reset: Literal["earliest", "latest"] = "earliest"
    workers: int = 1
    allocation: Literal["pool", "static"] = "pool"
    """`pool`: the first free worker; `static`: a partition always has the same one."""
    termination_seconds: float = 10.0
    """How long a worker may take to end."""
    client_properties: Mapping[str, int] | None = None
    """Client properties that follow from the attributes, for this trigger's consumer."""
    key_format: str = "binary"
    value_format: str = "binary"
    output_topic: str = ""
    """Where outputs go; empty when they are not wanted."""
    output_format: str = "json"
    retry: RetryConfig = field(default_factory=RetryConfig)
    dead_letter: DeadLetterConfig = field(default_factory=DeadLetterConfig)


@dataclass(frozen=True)
class FunctionSpec:
    """One function file."""

    name: str
    namespace: str
    folder: Path
    """Where the handler's module is found: the file's own folder."""
    handler: str
    """`module.sub:function`."""
    env: Mapping[str, str]
    triggers: tuple[KafkaTrigger, ...]
    description: str = ""
    event_timeout_seconds: float | None = None
    """Longest time for one event; None for no limit."""
    readiness_timeout_seconds: float = 60.0
    """Longest time for loading the handler and `init_context`."""


def load_function(file: Path) -> FunctionSpec:
    """Return what a function file says. Keys nobody knows are logged, as Nuclio ignores them.

    Args:
        file: The file, or the folder that holds a `function.yaml`.

    Raises:
        FunctionInvalid: The file cannot be read or a value is wrong; names file, line, path, and what to write.
    """
    file = (file / "function.yaml" if file.is_dir() else file).absolute()
    try:
        text = file.read_text()
    except OSError as cause:
        raise FunctionInvalid(f"{file}: cannot be read ({cause.strerror}): check the path under functions") from cause
    except UnicodeDecodeError as cause:
        raise FunctionInvalid(f"{file}: is not UTF-8 text (byte {cause.start})") from cause
    problems = Problems()
    tree, places = read_tree(text, str(file), problems)
    if problems.found:
        raise FunctionInvalid("; ".join(problems.found))
    return _function(Fields(tree, (), {(): str(file), **places}), file)


def _function(top: Fields, file: Path) -> FunctionSpec:
    metadata, spec = top.below("metadata"), top.below("spec")
    top.warn_unknown(_TOP)
    metadata.warn_unknown(_METADATA)
    spec.warn_unknown(_SPEC)
    handler = spec.text("handler")
    if not _HANDLER.fullmatch(handler):
        spec.refuse("handler", f"is {handler!r}: write module:function, such as main:handler")
    event_timeout = spec.duration("eventTimeout", 0.0)
    if spec.text("eventTimeout") and event_timeout <= 0:
        spec.refuse("eventTimeout", "must be above 0, such as 30s; leave it out for no limit")
    annotations = metadata.below("annotations").plain()
    return FunctionSpec(
        name=metadata.text("name") or file.parent.name,
        namespace=metadata.text("namespace", "default"),
        folder=file.parent,
        handler=handler,
        env=_env(spec),
        triggers=_triggers(spec, annotations),
        description=spec.text("description"),
        event_timeout_seconds=event_timeout or None,
        readiness_timeout_seconds=spec.number("readinessTimeoutSeconds", 60, 0, 86_400) or 60,
    )


def _env(spec: Fields) -> dict[str, str]:
    env: dict[str, str] = {}
    for entry in spec.mappings("env"):
        name = entry.text("name")
        if not name or "=" in name or "\0" in name:
            entry.refuse("name", "is missing or no name of an environment variable")
        if entry.has("valueFrom"):
            entry.warn_without_effect(["valueFrom"])
        else:
            env[name] = entry.text("value")
    return env


def _triggers(spec: Fields, annotations: Mapping[str, Any]) -> tuple[KafkaTrigger, ...]:
    found = []
    for name, trigger in spec.below("triggers").items():
        kind = trigger.text("kind")
        if trigger.switch("disabled", False):
            continue
        if kind not in _KAFKA_KINDS:
            log.warning("trigger %s is of kind %r: Headrace runs %s", name, kind, " and ".join(_KAFKA_KINDS))
        elif not _TRIGGER_NAME.fullmatch(name):
            spec.below("triggers").refuse(name, "is no usable name: write letters, digits, dot, dash and underscore")
        else:
            found.append(_trigger(name, kind, trigger, annotations))
    if not found:
        spec.refuse("triggers", "has no Kafka trigger: add one of kind kafka-cluster with topics and consumerGroup")
    return tuple(found)


def _trigger(name: str, kind: str, trigger: Fields, annotations: Mapping[str, Any]) -> KafkaTrigger:
    attributes = trigger.below("attributes", annotations)
    trigger.warn_unknown(_TRIGGER)
    trigger.warn_without_effect(_TRIGGER_IGNORED)
    attributes.warn_unknown((*_ATTRIBUTES_READ, *_ATTRIBUTES_IGNORED))
    attributes.warn_without_effect(_ATTRIBUTES_IGNORED)
    _refuse_explicit_ack(trigger, annotations)
    topics = attributes.texts("topics")
    if not topics:
        attributes.refuse("topics", "is empty: write the topics to consume, such as [orders]")
    group = attributes.text("consumerGroup")
    _check(attributes, "topics", _topic_name, topics, "is no topic name")
    _check(attributes, "consumerGroup", _group_name, (group,), "is no group name: write the consumer group")
    reset = attributes.choice("initialOffset", ("earliest", "latest"), "earliest")
    mode = attributes.choice("workerAllocationMode", ("pool", "static"), "pool", "kafka-worker-allocation-mode")
    url = trigger.text("url")
    return KafkaTrigger(
        name=name,
        kind=kind,
        topics=topics,
        group=group,
        brokers=attributes.texts("brokers") or ((url,) if url else ()),
        auto_offset_reset=cast(Literal["earliest", "latest"], reset),
        workers=trigger.number("numWorkers", 0, 0, _MAX_WORKERS)
        or trigger.number("maxWorkers", 1, 0, _MAX_WORKERS)
        or 1,
        allocation=cast(Literal["pool", "static"], mode),
        termination_seconds=trigger.duration("workerTerminationTimeout", 10.0),
        client_properties=_client_properties(attributes),
        key_format=attributes.choice("keyFormat", _FORMATS, "binary"),
        value_format=attributes.choice("valueFormat", _FORMATS, "binary"),
        output_format=attributes.choice("outputFormat", _OUTPUT_FORMATS, "json"),
        output_topic=_output_topic(attributes, topics),
        retry=RetryConfig(attempts=attributes.number("attempts", RetryConfig().attempts, 1, 1_000_000)),
        dead_letter=_dead_letter(attributes, topics),
    )


def _refuse_explicit_ack(trigger: Fields, annotations: Mapping[str, Any]) -> None:
    modes = ("disable", "enable", "explicitOnly")
    written = trigger.choice("explicitAckMode", modes, "disable")
    noted = str(annotations.get("nuclio.io/kafka-explicit-ack-mode", ""))
    if written != "disable" or noted in modes[1:]:
        # Acknowledging by the handler's return would commit records which the handler has not acknowledged.
        trigger.refuse("explicitAckMode", "asks for explicit acknowledgement, which is not supported: write disable")


def _client_properties(attributes: Fields) -> dict[str, int]:
    session = attributes.duration("sessionTimeout", 10.0, "kafka-session-timeout", 0.01)
    heartbeat = attributes.duration("heartbeatInterval", 3.0, "kafka-heartbeat-interval", 0.001)
    if heartbeat >= session:
        attributes.refuse(
            "heartbeatInterval", f"is {heartbeat:g}s, and sessionTimeout {session:g}s: write less than it"
        )
    wait = attributes.duration("maxWaitTime", 0.25, "kafka-max-wait-time", 0.001)
    properties = {
        "fetch.wait.max.ms": int(wait * 1000),
        "fetch.min.bytes": attributes.number("fetchMin", 1, 0, 100_000_000, "kafka-fetch-min") or 1,
        "max.partition.fetch.bytes": attributes.number("fetchDefault", 0, 0, 1_000_000_000, "kafka-fetch-default")
        or 1_048_576,
    }
    # Only when asked for: with the newer group protocol the broker owns the session, and the client refuses these two.
    if attributes.has("sessionTimeout", "kafka-session-timeout"):
        properties["session.timeout.ms"] = int(session * 1000)
    if attributes.has("heartbeatInterval", "kafka-heartbeat-interval"):
        properties["heartbeat.interval.ms"] = int(heartbeat * 1000)
    return properties


def _output_topic(attributes: Fields, topics: tuple[str, ...]) -> str:
    topic = attributes.text("outputTopic")
    if topic:
        _check(attributes, "outputTopic", _topic_name, (topic,), "is no topic name")
    if topic.startswith("__"):
        attributes.refuse("outputTopic", f"is {topic}, an internal topic of Kafka: write a topic of yours")
    if topic in topics:
        attributes.refuse(
            "outputTopic", f"is {topic}, which this trigger consumes: its outputs would come back for ever"
        )
    return topic


def _dead_letter(attributes: Fields, topics: tuple[str, ...]) -> DeadLetterConfig:
    topic = attributes.text("deadLetterTopic") or DeadLetterConfig().topic
    try:
        config = DeadLetterConfig(topic=topic)
    except ValidationError:
        attributes.refuse("deadLetterTopic", f"is {topic!r}: write a topic name; {{topic}} stands for the record's own")
    if any(topic.replace("{topic}", name) in topics for name in topics):
        attributes.refuse("deadLetterTopic", f"is {topic}, which this trigger consumes: write another topic")
    return config


def _check(fields: Fields, name: str, check: TypeAdapter[str], values: tuple[str, ...], sentence: str) -> None:
    for value in values:
        try:
            check.validate_python(value)
        except ValidationError:
            fields.refuse(name, f"has {value!r}, which {sentence}")
