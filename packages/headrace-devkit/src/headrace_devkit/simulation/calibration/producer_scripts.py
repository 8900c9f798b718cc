"""The calibration scripts of a producer: both sides must note the same."""

from typing import Any

from confluent_kafka import TopicCollection

from headrace_devkit.simulation.calibration.client_registry import script
from headrace_devkit.simulation.calibration.client_stages import ClientStage


@script
def keys_choose_partitions(stage: ClientStage) -> None:
    """Records with keys go where the partitioner of Kafka puts them."""
    topic, client = stage.topic(3), stage.producer()
    keys = [b"%d" % number for number in range(12)]
    reports = stage.produce(client, topic, [b"v"] * 12, -1, keys)
    stage.call("flush", lambda: client.flush(20))
    stage.note("reports", reports, len(client))


@script
def a_full_queue_refuses(stage: ClientStage) -> None:
    """A queue that is full refuses records, and takes them again when it is not."""
    topic, client = stage.topic(), stage.producer(queue_buffering_max_messages=3, linger_ms=3000)
    reports = stage.produce(client, topic, [b"v"] * 5)
    stage.note("before", reports, len(client))
    stage.call("flush", lambda: client.flush(20))
    stage.note("after", reports, len(client))
    stage.write("again", client, topic, [b"v"] * 2)


@script
def a_large_record_is_refused(stage: ClientStage) -> None:
    """A record that is too large is refused by the client, or by the broker."""
    small, client = stage.topic(max_message_bytes="2000"), stage.producer(message_max_bytes=5000)
    stage.write("by the client", client, small, [bytes(6000)])
    stage.write("by the broker", client, small, [bytes(3000)])
    stage.write("others continue", client, small, [b"v", b"v"])


@script
def records_without_a_partition_time_out(stage: ClientStage) -> None:
    """Records of a topic or partition that does not exist."""
    topic, client = stage.topic(), stage.producer(delivery_timeout_ms=2000)
    stage.write("no such topic", client, f"{topic}-none", [b"v"])
    stage.write("no such partition yet", client, topic, [b"v"], 7)
    stage.write("known", client, topic, [b"v"])
    stage.write("no such partition", client, topic, [b"v"], 7)


@script
def a_compacted_topic_wants_keys(stage: ClientStage) -> None:
    """One or two records without a key fail their batch in different ways."""
    topic, client = stage.topic(cleanup_policy="compact"), stage.producer(linger_ms=300)
    for keys in ([b"k", None, b"k"], [b"k", None, None]):
        reports = stage.produce(client, topic, [b"v"] * 3, 0, keys)
        client.flush(20)
        stage.note("reports", reports)
    reports = stage.produce(client, topic, [b"v"], 0, [b"k"])
    client.flush(20)
    stage.note("after", reports)


@script
def without_acknowledgements_there_is_no_offset(stage: ClientStage) -> None:
    """With `acks=0` a report has no offset."""
    topic, client = stage.topic(), stage.producer(acks="0", enable_idempotence=False)
    stage.write("records", client, topic, [b"v", b"w"])


@script
def records_time_out_while_the_broker_is_down(stage: ClientStage) -> None:
    """Records that time out, and the next ones, with and without idempotence."""
    topic = stage.topic()
    for is_idempotent in (True, False):
        client = stage.producer(enable_idempotence=is_idempotent)
        stage.write("before", client, topic, [b"a"])
        stage.kill_broker()
        stage.write("down", client, topic, [b"b", b"c"])
        stage.start_broker()
        stage.write("after", client, topic, [b"d"])
    stage.note("log", stage.read(topic))


@script
def a_record_waits_for_a_broker_that_returns(stage: ClientStage) -> None:
    """Records with a long time limit are written when the broker is back."""
    topic, client = stage.topic(), stage.producer(delivery_timeout_ms=60_000)
    stage.write("before", client, topic, [b"a"])
    stage.kill_broker()
    reports = stage.produce(client, topic, [b"b", b"c"])
    stage.call("flush", lambda: client.flush(1))
    stage.start_broker()
    stage.call("flush", lambda: client.flush(60))
    stage.note("after", reports)


@script
def a_purge_reports_each_record(stage: ClientStage) -> None:
    """A purge of what waits, then of what is in flight."""
    topic, client = stage.topic(), stage.producer(linger_ms=3000)
    stage.write("before", client, topic, [b"a"])
    stage.stall_broker()
    sent = stage.produce(client, topic, [b"b"])
    stage.call("flush", lambda: client.flush(0.5))
    waiting = stage.produce(client, topic, [b"c"], 0)
    client.purge(in_flight=False)
    stage.call("flush", lambda: client.flush(0.5))
    stage.note("in queue", sent, waiting)
    client.purge()
    stage.call("flush", lambda: client.flush(0.5))
    stage.note("in flight", sent, len(client))
    stage.unstall_broker()


@script
def a_topic_is_made_again(stage: ClientStage) -> None:
    """A topic that is deleted and created again has another id, and begins at 0."""
    topic, client, admin = stage.topic(), stage.producer(delivery_timeout_ms=20_000), stage.admin()
    stage.write("before", client, topic, [b"a", b"b"])
    ids = [_topic_id(admin, topic)]
    admin.delete_topics([topic])[topic].result(20)
    stage.sleep(2)
    stage.create(topic)
    stage.write("after", client, topic, [b"c"])
    ids.append(_topic_id(admin, topic))
    stage.note("another id", len(set(ids)))
    stage.note("log", stage.read(topic))


@script
def a_deleted_topic_times_out(stage: ClientStage) -> None:
    """A record for a topic that was deleted."""
    topic, client, admin = stage.topic(), stage.producer(delivery_timeout_ms=3000), stage.admin()
    stage.write("before", client, topic, [b"a"])
    admin.delete_topics([topic])[topic].result(20)
    stage.sleep(2)
    stage.write("deleted", client, topic, [b"b"])


def _topic_id(admin: Any, topic: str) -> str:
    return str(admin.describe_topics(TopicCollection([topic]))[topic].result(20).topic_id)
