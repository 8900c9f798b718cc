"""The calibration scripts of limits and of what is gone: both sides must note the same."""

import functools
from collections.abc import Callable
from typing import Any

from confluent_kafka import ConsumerGroupTopicPartitions, KafkaError, TopicCollection, TopicPartition
from confluent_kafka.admin import NewPartitions, OffsetSpec

from headrace_devkit.simulation.calibration.client_registry import script
from headrace_devkit.simulation.calibration.client_stages import ClientStage, name_of

_PROTOCOL = {"auto_offset_reset": "earliest", "enable_auto_commit": False, "enable_partition_eof": True}


def _reader(stage: ClientStage, **config: Any) -> Any:
    return stage.consumer(group_id=f"g-{stage.unique}", **{**_PROTOCOL, **config})


def _taken(stage: ClientStage, reader: Any, seconds: float, ends: int = 1) -> list[str]:
    """Return what a reader gets until it has reported the end of a partition this many times, or the time is over."""
    found: list[str] = []
    end = stage.now() + seconds
    while ends and stage.now() < end:
        message = reader.poll(0.2)
        if message is None:
            continue
        if error := message.error():
            is_end = error.code() == KafkaError._PARTITION_EOF
            ends -= is_end
            found.append(f"end {message.offset()}" if is_end else name_of(error))
        else:
            found.append(f"{message.offset()}={message.value().decode()}")
    return found


@script
def metadata_of_a_commit_is_limited(stage: ClientStage) -> None:
    """The coordinator takes fewer than 4,096 characters of metadata with an offset."""
    topic, reader = stage.topic(2), _reader(stage)
    for size in (4095, 4096):
        first = TopicPartition(topic, 0, size, "m" * size)
        second = TopicPartition(topic, 1, size, "small")
        commit = functools.partial(reader.commit, offsets=[first, second], asynchronous=False)
        stage.call(f"{size}", functools.partial(_results_of, commit))
        found = reader.committed([TopicPartition(topic, number) for number in range(2)], 20)
        stage.note("committed", [(one.offset, len(one.metadata or "")) for one in found])
    wide = TopicPartition(topic, 0, 9, "é" * 4095)
    commit = functools.partial(reader.commit, offsets=[wide], asynchronous=False)
    stage.call("two bytes each", functools.partial(_results_of, commit))
    reader.close()


def _results_of(call: Callable[[], Any]) -> list[str]:
    return [f"{one.offset} {name_of(one.error)}" for one in call()]


@script
def metadata_of_a_transaction_is_limited(stage: ClientStage) -> None:
    """So does a transaction."""
    topic, client, reader = stage.topic(), stage.transactional("x"), _reader(stage)
    client.init_transactions(20)
    client.begin_transaction()
    metadata = reader.consumer_group_metadata()
    offset = TopicPartition(topic, 0, 1, "m" * 4096)
    stage.call("offsets", lambda: client.send_offsets_to_transaction([offset], metadata, 20))
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.call("abort", lambda: client.abort_transaction(20))
    reader.close()


@script
def a_topic_has_fewer_replicas_than_it_wants(stage: ClientStage) -> None:
    """A topic that wants more replicas than it has: all that it has are enough."""
    topic = stage.topic(min_insync_replicas="2")
    stage.write("all", stage.producer(delivery_timeout_ms=2000), topic, [b"a"])
    client = stage.transactional("x", delivery_timeout_ms=2000)
    client.init_transactions(20)
    client.begin_transaction()
    stage.write("transaction", client, topic, [b"c"])
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.call("abort", lambda: client.abort_transaction(20))
    stage.note("log", stage.read(topic))


@script
def a_topic_is_made_again_while_it_is_read(stage: ClientStage) -> None:
    """The reader is beyond the end of the new one."""
    _made_again(stage, 5, 2)


@script
def a_topic_is_made_again_with_more_records(stage: ClientStage) -> None:
    """The reader's position is in the new one."""
    _made_again(stage, 2, 5)


def _made_again(stage: ClientStage, before: int, after: int) -> None:
    topic, client, admin = stage.topic(), stage.producer(delivery_timeout_ms=30_000), stage.admin()
    stage.write("before", client, topic, [b"a"] * before)
    reader = _reader(stage, topic_metadata_refresh_interval_ms=1000)
    reader.assign([TopicPartition(topic, 0, 0)])
    stage.note("read", _taken(stage, reader, 20))
    reader.commit(offsets=[TopicPartition(topic, 0, before)], asynchronous=False)
    admin.delete_topics([topic])[topic].result(20)
    stage.sleep(2)
    stage.create(topic)
    stage.write("after", stage.producer(), topic, [b"b"] * after)
    stage.note("read", _taken(stage, reader, 10))
    found = reader.committed([TopicPartition(topic, 0)], 20)
    stage.note("committed", [one.offset for one in found])
    reader.close()


@script
def an_administrator_waits_for_a_broker(stage: ClientStage) -> None:
    """Requests while no broker is there."""
    topic, admin, group = stage.topic(), stage.admin(), f"g-{stage.unique}"
    request = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 5)])
    stage.call("alter", lambda: len(_first(admin.alter_consumer_group_offsets([request])).topic_partitions))
    stage.kill_broker()
    stage.sleep(1)
    latest = {TopicPartition(topic, 0): OffsetSpec.latest()}  # type: ignore[no-untyped-call]
    names, limit = TopicCollection([topic]), {"request_timeout": 2}
    calls = {
        "topics": lambda: admin.list_topics(topic, timeout=2) and None,
        "describe": lambda: _first(admin.describe_topics(names, **limit)) and None,
        "delete": lambda: _first(admin.delete_topics([topic], operation_timeout=1, **limit)),
        "partitions": lambda: _first(admin.create_partitions([NewPartitions(topic, 2)], **limit)),
        "offsets": lambda: _first(admin.list_offsets(latest, **limit)) and None,
        "records": lambda: _first(admin.delete_records([TopicPartition(topic, 0, 0)], **limit)) and None,
        "group": lambda: _first(admin.describe_consumer_groups([group], **limit)) and None,
        "alter": lambda: _first(admin.alter_consumer_group_offsets([request], **limit)) and None,
        "groups": lambda: _listed(admin.list_consumer_groups(**limit).result(20)),
        "cluster": lambda: admin.describe_cluster(**limit).result(20) and None,
    }
    for name, call in calls.items():
        stage.call(name, call)
    stage.start_broker()
    # A client that has not reached a coordinator does not reach it again: another one does.
    stage.call("the same", lambda: _first(admin.describe_consumer_groups([group], request_timeout=5)).state.name)
    stage.sleep(5)
    another = stage.administrator()
    stage.call("another", lambda: _first(another.describe_consumer_groups([group])).state.name)


def _listed(found: Any) -> str:
    return f"{len(found.valid)} {[name_of(one) for one in found.errors]}"


@script
def a_long_transaction_is_refused(stage: ClientStage) -> None:
    """A time limit above that of the broker."""
    client = stage.producer(transactional_id=f"x-{stage.unique}", transaction_timeout_ms=1_000_000)
    stage.call("init", lambda: client.init_transactions(20))


@script
def a_topic_is_deleted_in_a_transaction(stage: ClientStage) -> None:
    """Its other topic gets the marker."""
    kept, gone, admin = stage.topic(), stage.topic(), stage.admin()
    client = stage.transactional("x")
    client.init_transactions(20)
    client.begin_transaction()
    stage.write("kept", client, kept, [b"a"])
    stage.write("gone", client, gone, [b"b"])
    admin.delete_topics([gone])[gone].result(20)
    stage.sleep(2)
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.note("log", stage.read(kept))
    client.begin_transaction()
    stage.write("next", client, kept, [b"c"])
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.note("log", stage.read(kept))


@script
def committed_offsets_of_an_open_transaction_time_out(stage: ClientStage) -> None:
    """A reader of stable offsets waits, and its time limit is over."""
    topic, client, reader, admin = stage.topic(), stage.transactional("x"), _reader(stage), stage.admin()
    reader.commit(offsets=[TopicPartition(topic, 0, 1)], asynchronous=False)
    client.init_transactions(20)
    client.begin_transaction()
    metadata = reader.consumer_group_metadata()
    client.send_offsets_to_transaction([TopicPartition(topic, 0, 7)], metadata, 20)
    stage.call("committed", lambda: [one.offset for one in reader.committed([TopicPartition(topic, 0)], 2)])
    other = _reader(stage, isolation_level="read_uncommitted")
    stage.call("uncommitted", lambda: [one.offset for one in other.committed([TopicPartition(topic, 0)], 2)])
    request = ConsumerGroupTopicPartitions(f"g-{stage.unique}", [TopicPartition(topic, 0)])
    for stable in (False, True):
        limits = {"require_stable": stable, "request_timeout": 2}
        find = functools.partial(admin.list_consumer_group_offsets, [request], **limits)
        stage.call(f"stable {stable}", functools.partial(_results_of, functools.partial(_offsets_of, find)))
    stage.call("abort", lambda: client.abort_transaction(20))
    stage.call("committed", lambda: [one.offset for one in reader.committed([TopicPartition(topic, 0)], 20)])
    reader.close()
    other.close()


def _offsets_of(call: Callable[[], dict[Any, Any]]) -> Any:
    return _first(call()).topic_partitions


@script
def a_producer_learns_of_new_partitions(stage: ClientStage) -> None:
    """A partition that was added after the producer had seen the topic."""
    topic, admin = stage.topic(), stage.admin()
    client = stage.producer(topic_metadata_refresh_interval_ms=1000)
    stage.write("before", client, topic, [b"a"])
    stage.write("too early", client, topic, [b"b"], 1)
    _first(admin.create_partitions([NewPartitions(topic, 2)]))
    stage.sleep(3)
    stage.write("after", client, topic, [b"c"], 1)
    stage.note("log", stage.read(topic, partition=1))


@script
def a_fenced_static_member_ends(stage: ClientStage) -> None:
    """What its client says afterwards."""
    topic = stage.topic()
    first, second = (_reader(stage, group_instance_id="one", session_timeout_ms=6000) for _ in range(2))
    for one in (first, second):
        one.subscribe([topic])
        stage.note("assigned", _joined(stage, one))
    end, errors = stage.now() + 20, list[str]()
    while not errors and stage.now() < end:
        message = first.poll(0.2)
        if message is not None and message.error() and message.error().code() != KafkaError._PARTITION_EOF:
            errors.append(name_of(message.error()))
    stage.note("poll", errors)
    offset = [TopicPartition(topic, 0, 1)]
    stage.call("commit", lambda: first.commit(offsets=offset, asynchronous=False) and None)
    stage.call("committed", lambda: [one.offset for one in first.committed(offset, 10)])
    stage.call("subscribe", lambda: first.subscribe([topic]))
    stage.call("assign", lambda: first.assign(offset))
    stage.note("assignment", len(first.assignment()))
    stage.call("close", first.close)
    stage.call("of the other", lambda: second.commit(offsets=offset, asynchronous=False) and None)
    second.close()


def _joined(stage: ClientStage, reader: Any) -> int:
    end = stage.now() + 30
    while not reader.assignment() and stage.now() < end:
        reader.poll(0.2)
    return len(reader.assignment())


def _first(futures: dict[Any, Any]) -> Any:
    (future,) = futures.values()
    return future.result(20)
