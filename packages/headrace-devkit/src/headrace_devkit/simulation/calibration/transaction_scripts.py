"""The calibration scripts of transactions: both sides must note the same."""

import functools
from collections.abc import Callable
from typing import Any

from confluent_kafka import IsolationLevel, TopicPartition
from confluent_kafka.admin import OffsetSpec

from headrace_devkit.simulation.calibration.client_registry import CLIENT_SCRIPTS, DELAYING, script
from headrace_devkit.simulation.calibration.client_stages import ClientStage, outcome_of


@script
def transactions_are_seen_whole(stage: ClientStage) -> None:
    """What each kind of reader sees of an open, a committed and an aborted transaction."""
    topic, client = stage.topic(), stage.transactional("x")
    stage.call("init", lambda: client.init_transactions(20))
    client.begin_transaction()
    stage.write("first", client, topic, [b"a", b"b"])
    _ends(stage, topic)
    stage.call("commit", lambda: client.commit_transaction(20))
    client.begin_transaction()
    stage.write("second", client, topic, [b"c"])
    stage.call("abort", lambda: client.abort_transaction(20))
    client.begin_transaction()
    stage.write("third", client, topic, [b"d"])
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.sleep(1)
    _ends(stage, topic)
    stage.note("committed", stage.read(topic))
    stage.note("all", stage.read(topic, "read_uncommitted"))


def _ends(stage: ClientStage, topic: str) -> None:
    partition = TopicPartition(topic, 0)
    levels = IsolationLevel.READ_COMMITTED, IsolationLevel.READ_UNCOMMITTED
    found = [
        stage.admin().list_offsets({partition: OffsetSpec.latest()}, isolation_level=level)[partition].result(20).offset  # type: ignore[no-untyped-call]
        for level in levels
    ]
    stage.note("ends", *found)


@script
def calls_out_of_order_are_refused(stage: ClientStage) -> None:
    """Each call in a state in which it is not valid."""
    topic, client = stage.topic(), stage.transactional("x")
    stage.call("begin before init", client.begin_transaction)
    stage.call("init", lambda: client.init_transactions(20))
    stage.call("init again", lambda: client.init_transactions(20))
    stage.call("commit before begin", lambda: client.commit_transaction(20))
    stage.call("abort before begin", lambda: client.abort_transaction(20))
    stage.note("produce before begin", stage.produce(client, topic, [b"v"]))
    stage.call("begin", client.begin_transaction)
    stage.call("begin again", client.begin_transaction)
    stage.call("commit without records", lambda: client.commit_transaction(20))
    stage.call("begin", client.begin_transaction)
    stage.call("abort without records", lambda: client.abort_transaction(20))
    stage.call("no transactional id", stage.producer().begin_transaction)


@script
def a_second_producer_fences_the_first(stage: ClientStage) -> None:
    """A producer with the same name fences one with an open transaction."""
    topic, first, second = stage.topic(), stage.transactional("x"), stage.transactional("x")
    first.init_transactions(20)
    first.begin_transaction()
    stage.write("first", first, topic, [b"a"])
    stage.call("second", lambda: second.init_transactions(20))
    stage.call("commit", lambda: first.commit_transaction(20))
    stage.call("abort", lambda: first.abort_transaction(20))
    stage.call("begin", first.begin_transaction)
    stage.note("produce", stage.produce(first, topic, [b"b"]))
    second.begin_transaction()
    stage.write("second", second, topic, [b"c"])
    stage.call("commit", lambda: second.commit_transaction(20))
    stage.note("log", stage.read(topic))


@script
def a_fenced_producer_learns_it_from_a_record(stage: ClientStage) -> None:
    """The leader refuses a record of a fenced producer."""
    topic, first, second = stage.topic(), stage.transactional("x"), stage.transactional("x")
    first.init_transactions(20)
    first.begin_transaction()
    stage.write("first", first, topic, [b"a"])
    second.init_transactions(20)
    reports = stage.produce(first, topic, [b"b"])
    stage.sleep(2)
    stage.note("before the poll", reports)
    stage.note("poll raises", outcome_of(lambda: _drain(first)) != "ok")
    stage.note("reports", reports)
    stage.call("commit", lambda: first.commit_transaction(20))


def _drain(client: Any) -> None:
    for _ in range(20):
        client.poll(0.1)


@script
def an_idle_producer_is_fenced_at_its_next_transaction(stage: ClientStage) -> None:
    """The coordinator refuses the partitions of a fenced producer."""
    topic, first, second = stage.topic(), stage.transactional("x"), stage.transactional("x")
    first.init_transactions(20)
    second.init_transactions(20)
    stage.call("begin", first.begin_transaction)
    reports = stage.produce(first, topic, [b"a"])
    stage.sleep(2)
    stage.call("commit", lambda: first.commit_transaction(20))
    _note_quietly(stage, "flush", lambda: first.flush(1))
    stage.note("reports", reports)


def _note_quietly(stage: ClientStage, what: str, call: Callable[[], Any]) -> None:
    """Note how a call ended, where the library may raise its fatal error or have raised it before."""
    ended = outcome_of(call)
    stage.note(what, ended if "FENCED" not in ended else "0")


@script
def a_transaction_times_out(stage: ClientStage) -> None:
    """A transaction past its time limit is aborted, and its producer fenced."""
    topic = stage.topic()
    client = stage.producer(transactional_id=f"x-{stage.unique}", transaction_timeout_ms=4000)
    client.init_transactions(20)
    client.begin_transaction()
    stage.write("first", client, topic, [b"a"])
    stage.sleep(8)
    _ends(stage, topic)
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.call("abort", lambda: client.abort_transaction(20))


@script
def a_refused_record_fails_its_transaction(stage: ClientStage) -> None:
    """A refused record fails its transaction, and by a gap in the numbers the next one."""
    topic, client = stage.topic(max_message_bytes="2000"), stage.transactional("x")
    client.init_transactions(20)
    client.begin_transaction()
    stage.write("first", client, topic, [b"a"])
    stage.write("large", client, topic, [bytes(3000)])
    stage.note("produce", stage.produce(client, topic, [b"b"]))
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.call("abort", lambda: client.abort_transaction(20))
    client.begin_transaction()
    stage.write("next", client, topic, [b"c"])
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.note("log", stage.read(topic))


@script
def a_transaction_fails_while_the_broker_is_down(stage: ClientStage) -> None:
    """A record of a transaction times out."""
    topic, client = stage.topic(), stage.transactional("x", delivery_timeout_ms=3000)
    client.init_transactions(20)
    client.begin_transaction()
    stage.write("first", client, topic, [b"a"])
    stage.kill_broker()
    stage.write("down", client, topic, [b"b"])
    stage.call("commit", lambda: client.commit_transaction(2))
    stage.call("abort", lambda: client.abort_transaction(1))
    stage.start_broker()
    stage.call("abort", lambda: client.abort_transaction(60))
    client.begin_transaction()
    stage.write("next", client, topic, [b"c"])
    stage.call("commit", lambda: client.commit_transaction(60))
    stage.note("log", stage.read(topic))


@script
def a_commit_waits_for_the_coordinator(stage: ClientStage) -> None:
    """A commit that takes longer than its call allows, which is then called again."""
    topic, client = stage.topic(), stage.transactional("x")
    client.init_transactions(20)
    client.begin_transaction()
    stage.write("first", client, topic, [b"a"])
    stage.stall_broker()
    stage.call("commit", lambda: client.commit_transaction(2))
    stage.call("abort", lambda: client.abort_transaction(1))
    stage.unstall_broker()
    stage.call("commit", lambda: client.commit_transaction(60))
    stage.call("begin", client.begin_transaction)
    stage.call("abort", lambda: client.abort_transaction(60))
    stage.note("log", stage.read(topic))


@script
def an_unreachable_coordinator_times_out(stage: ClientStage) -> None:
    """A producer that cannot be opened in time, and then is."""
    stage.topic()
    client = stage.transactional("x")
    stage.kill_broker()
    stage.call("init", lambda: client.init_transactions(2))
    stage.start_broker()
    stage.call("init", lambda: client.init_transactions(60))


@script
def offsets_are_committed_with_a_transaction(stage: ClientStage) -> None:
    """Offsets of a group count if their transaction is committed."""
    topic, client = stage.topic(), stage.transactional("x")
    group = f"g-{stage.unique}"
    member = stage.consumer(group_id=group, enable_auto_commit=False)
    client.init_transactions(20)
    for offset, ends in ((1, "commit"), (2, "abort"), (3, "commit")):
        client.begin_transaction()
        stage.write(ends, client, topic, [b"v"])
        partition = TopicPartition(topic, 0, offset)
        metadata = member.consumer_group_metadata()
        stage.call("offsets", functools.partial(client.send_offsets_to_transaction, [partition], metadata, 20))
        end = client.commit_transaction if ends == "commit" else client.abort_transaction
        stage.call(ends, functools.partial(end, 20))
        stage.sleep(0.5)
        stage.note("committed", member.committed([TopicPartition(topic, 0)], 20)[0].offset)
    member.close()


@script
def offsets_of_a_member_that_is_gone_fail_the_transaction(stage: ClientStage) -> None:
    """Offsets of a member that has left the group."""
    topic, client, group = stage.topic(), stage.transactional("x"), f"g-{stage.unique}"
    member = stage.consumer(group_id=group, auto_offset_reset="earliest", session_timeout_ms=6000)
    member.subscribe([topic])
    end = stage.now() + 20
    while not member.assignment() and stage.now() < end:
        member.poll(0.2)
    metadata = member.consumer_group_metadata()
    partition = TopicPartition(topic, 0, 1)
    client.init_transactions(20)
    client.begin_transaction()
    stage.call("of the member", lambda: client.send_offsets_to_transaction([partition], metadata, 20))
    stage.call("commit", lambda: client.commit_transaction(20))
    member.close()
    client.begin_transaction()
    stage.write("record", client, topic, [b"a"])
    stage.call("of a member that is gone", lambda: client.send_offsets_to_transaction([partition], metadata, 20))
    stage.note("produce", stage.produce(client, topic, [b"b"]))
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.call("abort", lambda: client.abort_transaction(20))
    client.begin_transaction()
    stage.write("next", client, topic, [b"c"])
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.note("log", stage.read(topic))


@script
def an_abort_drops_what_waits(stage: ClientStage) -> None:
    """An abort drops records that were not sent, which leaves a gap in the numbers."""
    topic, client = stage.topic(), stage.transactional("x", linger_ms=2000)
    client.init_transactions(20)
    client.begin_transaction()
    stage.write("sent", client, topic, [b"a"])
    waiting = stage.produce(client, topic, [b"b"])
    stage.call("abort", lambda: client.abort_transaction(20))
    stage.note("waiting", waiting)
    client.begin_transaction()
    stage.write("next", client, topic, [b"c"])
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.call("abort", lambda: client.abort_transaction(20))
    client.begin_transaction()
    stage.write("last", client, topic, [b"d"])
    stage.call("commit", lambda: client.commit_transaction(20))
    stage.note("log", stage.read(topic))


@script
def a_purged_record_leaves_no_gap_for_long(stage: ClientStage) -> None:
    """After a gap, a producer without transactions gets another epoch."""
    topic, client = stage.topic(), stage.producer(linger_ms=2000)
    stage.write("before", client, topic, [b"a"])
    waiting = stage.produce(client, topic, [b"b"])
    client.purge()
    stage.sleep(0.5)  # the call does not wait, whatever `blocking` is: what follows at once may be dropped, too
    stage.write("after", client, topic, [b"c", b"d"])
    stage.note("waiting", waiting)
    stage.note("log", stage.read(topic))


def _late(stage: ClientStage, kind: str, ends: str) -> None:
    """Have a request of the second transaction arrive in the third, which then ends."""
    topic, client, group = stage.topic(), stage.transactional("x"), f"g-{stage.unique}"
    member = stage.consumer(group_id=group, enable_auto_commit=False)
    client.init_transactions(20)
    for number in (1, 2, 3):
        client.begin_transaction()
        if number == 2:
            stage.delay(kind)
        stage.write(f"record {number}", client, topic, [b"%d" % number])
        # Once the connection of a leader was closed, which is the group's coordinator too, the client waits for ever in
        # this call, whatever its limit. Source: librdkafka, issues 5456 and 5511.
        if kind != "Produce" or number < 2:
            partition = TopicPartition(topic, 0, number)
            metadata = member.consumer_group_metadata()
            stage.call("offsets", functools.partial(client.send_offsets_to_transaction, [partition], metadata, 20))
        if number < 3:
            stage.call("commit", lambda: client.commit_transaction(20))
    stage.deliver()
    end = client.commit_transaction if ends == "commit" else client.abort_transaction
    stage.call(ends, lambda: end(20))
    stage.sleep(1)
    stage.note("log", stage.read(topic))
    stage.note("committed", member.committed([TopicPartition(topic, 0)], 20)[0].offset)
    member.close()


for _request in ("EndTxn", "TxnOffsetCommit", "Produce"):
    for _how in ("commit", "abort"):
        _name = f"a_late_{_request}_before_{_how}"
        CLIENT_SCRIPTS[_name] = functools.partial(_late, kind=_request, ends=_how)
        DELAYING.add(_name)
