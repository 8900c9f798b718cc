"""What the controller does with topics, and what a leader says of the offsets in its log."""

from collections.abc import Mapping
from typing import Any, Final, NoReturn

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigSource, ResourceType

from headrace_devkit.simulation.cluster_topics import ClusterTopics
from headrace_devkit.simulation.offsets import OffsetsOfGroups
from headrace_devkit.simulation.partition_log import PartitionLog

_TOPIC_CONFIGS: Final[Mapping[str, str]] = {
    "cleanup.policy": "delete",
    "compression.type": "producer",
    "delete.retention.ms": "86400000",
    "max.message.bytes": "1048588",
    "message.timestamp.type": "CreateTime",
    "min.compaction.lag.ms": "0",
    "min.insync.replicas": "1",
    "retention.bytes": "-1",
    "retention.ms": "604800000",
    "segment.bytes": "1073741824",
    "segment.ms": "604800000",
}
"""Kafka's defaults, of the configurations that Headrace reads."""
_BROKER_CONFIGS: Final[Mapping[str, str]] = {
    "auto.create.topics.enable": "false",
    "group.max.session.timeout.ms": "1800000",
    "group.min.session.timeout.ms": "6000",
    "message.max.bytes": "1048588",
    "offsets.retention.minutes": "10080",
    "transaction.max.timeout.ms": "900000",
}
_MOST_TIMESTAMP, _LATEST, _EARLIEST = -3, -1, -2
"""The numbers of `OffsetSpec`, as in Kafka's protocol."""


class SimulatedController:
    """Changes topics; each call gets whether it is only a check."""

    def __init__(self, brokers: ClusterTopics, offsets: OffsetsOfGroups) -> None:
        self._brokers = brokers
        self._offsets = offsets

    def create(self, topic: Any, is_check: bool) -> None:
        if topic.topic in self._brokers.topics:
            _refuse(KafkaError.TOPIC_ALREADY_EXISTS, f"Topic '{topic.topic}' already exists.")
        count = 1 if topic.num_partitions == -1 else topic.num_partitions
        if count < 1:
            _refuse(KafkaError.INVALID_PARTITIONS, "Number of partitions was set to an invalid non-positive value.")
        if topic.replication_factor > len(self._brokers.ids):
            _refuse(KafkaError.INVALID_REPLICATION_FACTOR, "Unable to replicate the partition")
        _check_names(topic.config or {})
        if not is_check:
            self._brokers.create_topic(topic.topic, count, dict(topic.config or {}))

    def add_partitions(self, change: Any, is_check: bool) -> None:
        topic = self._topic(change.topic)
        present = len(topic.partitions)
        if change.new_total_count <= present:
            text = f"Topic currently has {present} partitions, which is not less than {change.new_total_count}."
            _refuse(KafkaError.INVALID_PARTITIONS, text)
        if not is_check:
            self._brokers.add_partitions(change.topic, change.new_total_count)

    def delete(self, name: str, _is_check: bool) -> None:
        self._topic(name)
        self._brokers.delete_topic(name)
        self._offsets.forget_topic(name)

    def configs(self, resource: Any, _is_check: bool) -> dict[str, ConfigEntry]:
        """Return each configuration of a topic or a broker."""
        is_topic = resource.restype == ResourceType.TOPIC
        own = self._topic(resource.name).configs if is_topic else {}
        defaults = _TOPIC_CONFIGS if is_topic else _BROKER_CONFIGS
        return {
            name: ConfigEntry(
                name,
                value,
                ConfigSource.DYNAMIC_TOPIC_CONFIG if name in own else ConfigSource.DEFAULT_CONFIG,
                is_default=name not in own,
            )
            for name, value in {**defaults, **own}.items()
        }

    def alter(self, resource: Any, is_check: bool) -> None:
        configs = self._topic(resource.name).configs
        _check_names([entry.name for entry in resource.incremental_configs])
        for entry in () if is_check else resource.incremental_configs:
            if entry.incremental_operation == AlterConfigOpType.DELETE:
                configs.pop(entry.name, None)
            else:
                configs[entry.name] = entry.value

    def _topic(self, name: str) -> Any:
        found = self._brokers.topics.get(name)
        if found is None:
            _refuse(KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART).str())
        return found


def offset_at(log: PartitionLog, spec: int, *, committed_only: bool) -> tuple[int, int]:
    """Return the offset that a number of `OffsetSpec` names, and the timestamp of its record; -1 for none."""
    end = log.end_for(committed_only=committed_only)
    if spec in (_EARLIEST, _LATEST):
        return (log.start if spec == _EARLIEST else end), -1
    records = [record for record in log.records if not record.is_control]
    if spec == _MOST_TIMESTAMP:
        found = max(records, key=lambda record: (record.timestamp_ms, -record.offset), default=None)
    else:
        found = next((one for one in records if one.timestamp_ms >= spec and one.offset < end), None)
    return (found.offset, found.timestamp_ms) if found else (-1, -1)


def _check_names(names: Any) -> None:
    unknown = [name for name in names if name not in _TOPIC_CONFIGS and name not in _MORE_CONFIGS]
    if unknown:
        _refuse(KafkaError.INVALID_CONFIG, f"Unknown topic config name: {unknown[0]}")


_MORE_CONFIGS: Final = (
    "file.delete.delay.ms",
    "flush.messages",
    "flush.ms",
    "index.interval.bytes",
    "max.compaction.lag.ms",
    "message.timestamp.after.max.ms",
    "message.timestamp.before.max.ms",
    "min.cleanable.dirty.ratio",
    "preallocate",
    "segment.index.bytes",
    "segment.jitter.ms",
    "unclean.leader.election.enable",
)


def _refuse(code: int, text: str) -> NoReturn:
    raise KafkaException(KafkaError(code, text))
