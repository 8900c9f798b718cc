"""The calibration scripts of administration: both sides must note the same."""

import functools
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from headrace_devkit.simulation.calibration.client_registry import script
from headrace_devkit.simulation.calibration.client_stages import ClientStage


@script
def topics_are_administered(stage: ClientStage) -> None:
    """Topics are created, described, extended and deleted, or are not there."""
    topic, admin = stage.topic(2), stage.admin()
    none = f"{topic}-none"
    for name, count, factor in ((topic, 1, 1), (f"{topic}-0", 0, 1), (f"{topic}-9", 1, 9)):
        stage.call("create", functools.partial(_create, admin, NewTopic(name, count, factor)))
    bad = NewTopic(f"{topic}-bad", 1, 1, config={"no.such.config": "1"})
    stage.call("create with a bad config", lambda: _first(admin.create_topics([bad])))
    stage.call("check", lambda: _first(admin.create_topics([NewTopic(none, 1, 1)], validate_only=True)))
    stage.call("describe", lambda: len(_first(admin.describe_topics(TopicCollection([topic]))).partitions))
    stage.call("describe none", lambda: _first(admin.describe_topics(TopicCollection([none]))))
    stage.call("delete none", lambda: _first(admin.delete_topics([none])))
    for total in (1, 2, 3):
        stage.call("partitions", functools.partial(_extend, admin, topic, total))
    stage.call("partitions of none", functools.partial(_extend, admin, none, 2))
    stage.sleep(1)
    found = admin.list_topics(topic, timeout=20).topics[topic]
    stage.note("listed", sorted(found.partitions), found.error)
    missing = admin.list_topics(none, timeout=20).topics[none]
    stage.note("listed none", sorted(missing.partitions), missing.error and missing.error.name())


@script
def configurations_are_administered(stage: ClientStage) -> None:
    """Configurations of a topic are read, set and restored."""
    topic, admin = stage.topic(retention_ms="5000"), stage.admin()

    def value(name: str) -> str:
        entry = _first(admin.describe_configs([ConfigResource(ResourceType.TOPIC, topic)]))[name]
        return f"{entry.value} {entry.is_default}"

    def alter(name: str, to: str | None) -> None:
        kind = AlterConfigOpType.DELETE if to is None else AlterConfigOpType.SET
        entries = [ConfigEntry(name, to, incremental_operation=kind)]
        _first(
            admin.incremental_alter_configs([ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)])
        )

    stage.note("before", value("retention.ms"), value("max.message.bytes"))
    stage.call("set", lambda: alter("max.message.bytes", "2000"))
    stage.call("restore", lambda: alter("retention.ms", None))
    stage.call("unknown", lambda: alter("no.such.config", "1"))
    stage.sleep(1)
    stage.note("after", value("retention.ms"), value("max.message.bytes"))
    none = ConfigResource(ResourceType.TOPIC, f"{topic}-none")
    stage.call("none", lambda: _first(admin.describe_configs([none])))


@script
def offsets_of_a_log_are_listed(stage: ClientStage) -> None:
    """Offsets by position and time, before and after records are deleted."""
    topic, admin, client = stage.topic(2), stage.admin(), stage.producer()
    for at in (1000, 3000, 2000):
        client.produce(topic, b"v", partition=0, timestamp=at)
        client.flush(20)
    specs = {
        "earliest": OffsetSpec.earliest(),  # type: ignore[no-untyped-call]
        "latest": OffsetSpec.latest(),  # type: ignore[no-untyped-call]
        "greatest": OffsetSpec.max_timestamp(),  # type: ignore[no-untyped-call]
        **{f"since {at}": OffsetSpec.for_timestamp(at) for at in (0, 1001, 2500, 3001)},
    }

    def look(partition: Any) -> None:
        for name, spec in specs.items():
            stage.call(name, functools.partial(_offset, admin, partition, spec))

    look(TopicPartition(topic, 0))
    look(TopicPartition(topic, 1))
    for partition in (TopicPartition(topic, 9), TopicPartition(f"{topic}-none", 0)):
        stage.call("none", functools.partial(_offset, admin, partition, specs["latest"]))
    for offset in (2, 9, 1, -1):
        cut = [TopicPartition(topic, 0, offset)]
        stage.call(f"delete before {offset}", functools.partial(_cut, admin, cut))
        stage.call("earliest", functools.partial(_offset, admin, TopicPartition(topic, 0), specs["earliest"]))


def _offset(admin: Any, partition: Any, spec: Any) -> str:
    found = _first(admin.list_offsets({partition: spec}))
    return f"{found.offset} {found.timestamp}"


def _cut(admin: Any, partitions: Any) -> int:
    return int(_first(admin.delete_records(partitions)).low_watermark)


def _extend(admin: Any, topic: str, total: int) -> None:
    _first(admin.create_partitions([NewPartitions(topic, total)]))


@script
def groups_are_administered(stage: ClientStage) -> None:
    """A group without members: described, its offsets set, and deleted."""
    topic, admin, group = stage.topic(2), stage.admin(), f"g-{stage.unique}"

    def describe() -> str:
        found = _first(admin.describe_consumer_groups([group]))
        return f"{found.state.name} {len(found.members)} {found.type.name}"

    def alter(*partitions: Any) -> list[str]:
        request = ConsumerGroupTopicPartitions(group, list(partitions))
        entries = _first(admin.alter_consumer_group_offsets([request])).topic_partitions
        return [f"{one.partition} {one.error.name() if one.error else 'ok'}" for one in entries]

    def committed() -> list[int]:
        reader = stage.consumer(group_id=group)
        found = reader.committed([TopicPartition(topic, number) for number in range(2)], 20)
        reader.close()
        return [one.offset for one in found]

    stage.call("describe none", describe)
    stage.note("committed of none", committed())
    stage.call("alter", lambda: alter(TopicPartition(topic, 0, 5)))
    stage.call("alter what is not there", lambda: alter(TopicPartition(topic, 1, 3), TopicPartition(topic, 9, 3)))
    stage.note("committed", committed())
    stage.call("describe", describe)
    stage.note("listed", group in [one.group_id for one in admin.list_consumer_groups().result(20).valid])
    stage.call("delete", lambda: _first(admin.delete_consumer_groups([group])))
    stage.call("delete again", lambda: _first(admin.delete_consumer_groups([group])))
    stage.note("committed of none", committed())


@script
def a_group_with_members_is_described(stage: ClientStage) -> None:
    """A group with a member."""
    topic, admin, group = stage.topic(2), stage.admin(), f"g-{stage.unique}"
    member = stage.consumer(group_id=group, client_id="someone", auto_offset_reset="earliest", session_timeout_ms=6000)
    member.subscribe([topic])
    end = stage.now() + 20
    while not member.assignment() and stage.now() < end:
        member.poll(0.2)
    found = _first(admin.describe_consumer_groups([group]))
    (one,) = found.members
    partitions = sorted(
        (partition.topic == topic, partition.partition) for partition in one.assignment.topic_partitions
    )
    stage.note("described", found.state.name, one.client_id, partitions, one.member_id.startswith("someone-"))
    request = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 1)])
    entry = _first(admin.alter_consumer_group_offsets([request])).topic_partitions[0]
    stage.note("alter", entry.error and entry.error.name())
    stage.call("delete", lambda: _first(admin.delete_consumer_groups([group])))
    member.close()
    stage.note("left", _first(admin.describe_consumer_groups([group])).state.name)


def _create(admin: Any, topic: Any) -> None:
    _first(admin.create_topics([topic]))


def _first(futures: dict[Any, Any]) -> Any:
    (future,) = futures.values()
    return future.result(20)
