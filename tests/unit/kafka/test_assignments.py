"""Partitions that begin, begin anew and end: on the consumer's thread, with a client that gets them from tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import confluent_kafka
import pytest

from headrace.config.consumers import BatchConfig, DeliveryConfig, FlowControl
from headrace.config.membership import ConsumerConfig
from headrace.delivery.outcomes import ACK, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.errors import DestinationUnavailable
from headrace.kafka import hanging_consumers
from headrace.kafka.loop_proxy import LoopProxy
from headrace.kafka.positions import ReadPolicy
from headrace.records import Committed, TopicPartition
from headrace.runtime import Deadline
from headrace_devkit.simulation.greenlet_threads import ThreadEvent, sleep
from headrace_devkit.testing import ManualClock
from tests.assigned_consumer import message, refuse, where
from tests.group_member import P0, P1, Member, with_member
from tests.staged import staged

BROKEN = confluent_kafka.KafkaError._BAD_MSG


class Backend:
    """Keeps what was delivered; delivers nothing while it is closed."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.delivered: list[tuple[int, int]] = []
        """Epoch and offset."""

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        await self.open.wait()
        self.delivered += [(delivery.epoch, record.offset) for record in delivery.records]
        return [ACK] * len(delivery.records)


@pytest.mark.parametrize("on_gap", ["stop", "continue"])
def test_a_truncated_log_is_a_gap_and_its_records_are_delivered_once(
    caplog: pytest.LogCaptureFixture, on_gap: Any
) -> None:
    """The client names no offset then; two lanes beside each other would break the order, and leak room for ever."""
    backend = Backend()
    delivery = DeliveryConfig(ordering="partition", batch=BatchConfig(max_records=2))

    async def test(member: Member) -> None:
        pump = member.listener
        pump.connect(member.consumer, member.consumer)
        await pump.start()
        member.cluster.commit("g", {P0: Committed(10)})
        member.append(P0, 30)
        member.assign(P0)
        await member.until(lambda: member.consumer._flow.records == 20, "the records before")
        member.cluster.log(*P0).truncate(20)
        if on_gap == "stop":
            await member.until(
                lambda: "offsets 20 to 29 (10) are no longer" in pump.seeks.member.trouble(P0), "the gap"
            )
        else:
            await member.until(lambda: pump.counts.gap == 10, "the gap")
            backend.open.set()
            await member.until(lambda: len(backend.delivered) == 20, "the records")
            await member.turns()
            assert len({epoch for epoch, _ in backend.delivered}) == 1
            assert [offset for _, offset in backend.delivered] == list(range(20))
            assert (member.consumer._flow.records, len(pump.lanes)) == (0, 1)
        assert "requested offset not available" in caplog.text
        await pump.stop()

    pump = Pump("p", "g", backend, None, delivery=delivery, clock=ManualClock())
    with_member(test, listener=pump, policy=ReadPolicy(on_gap=on_gap), flow=FlowControl(max_records=40))


@staged(with_member, policy=ReadPolicy(member=ConsumerConfig(properties={"partition.assignment.strategy": "range"})))
async def test_an_assignment_without_a_revoke_before_lets_go_of_what_is_there(member: Member, /) -> None:
    """Its room is given back, and a seek that waits is answered."""
    client, heard = member.client, member.listener
    member.append(P0, 10)
    member.assign(P0)
    await member.until(lambda: len(heard.records) == 10, "the records")
    client.async_commits = "unanswered"
    seek = asyncio.ensure_future(member.consumer.seek(P0, heard.epochs[P0], Committed(3)))
    await member.until(lambda: (P0, 3) in client.commits, "the seek's commit")
    member.assign(P0)
    await member.until(lambda: len(heard.assigned) == 2, "the second assignment")
    await member.until(seek.done, "the response of the seek")
    assert (seek.result(), member.consumer._flow.records, client.paused) == (False, 0, set())


@staged(with_member)
async def test_a_batch_that_cannot_be_read_is_read_again_after_what_was_handed_over(member: Member, /) -> None:
    """The client names its first offset, and reads on: records after it must wait, or a commit would pass the batch."""
    client, heard = member.client, member.listener
    consume, together = client.consume, [[message(P0, 2, BROKEN), message(P0, 9)]]
    member.assign(P0)
    member.append(P0, 4)
    await member.until(lambda: len(heard.records) == 4, "the first records")
    client.consume = lambda *wanted: together.pop() if together else consume(*wanted)  # type: ignore[method-assign]
    member.append(P0)
    await member.until(lambda: client.positions.get(P0) == 5 and not together, "the partition to continue")
    member.append(P0)
    await member.until(lambda: heard.records[-1][2] == 5, "the next record")
    assert [offset for _, _, offset in heard.records] == [*range(6)]


def test_a_commit_of_before_a_seek_never_counts_for_the_epoch_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the loop runs between what the thread tells it: the old offset would undo the seek."""
    post = LoopProxy.post

    async def test(member: Member) -> None:
        client, heard = member.client, member.listener

        def commit_of_before() -> None:
            if len(heard.assigned) == 1:
                member.consumer.commit({P0: Committed(7)})

        def post_and_commit(loop: LoopProxy, call: Callable[..., Any], *arguments: Any) -> None:
            post(loop, call, *arguments)
            post(loop, commit_of_before)

        member.append(P0, 7)
        member.assign(P0)
        await member.until(lambda: len(heard.records) == 7, "the records")
        monkeypatch.setattr(LoopProxy, "post", post_and_commit)
        assert await member.consumer.seek(P0, heard.epochs[P0], Committed(2))
        await member.turns()
        assert client.commits[-1] == (P0, 2)

    with_member(test)


@staged(with_member, policy=ReadPolicy("latest"))
async def test_a_partition_whose_leader_is_silent_holds_no_other(member: Member, /) -> None:
    """With `latest` the end of each log is requested. Nor does one whose committed offset the group may not read."""
    client, heard, silent = member.client, member.listener, {P0}
    marks, times, refused = client.get_watermark_offsets, client.offsets_for_times, TopicPartition("u", 0)

    def ask(items: Sequence[Any]) -> None:
        if silent & {where(item) for item in items}:
            raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._TIMED_OUT))

    client.get_watermark_offsets = lambda item, timeout: ask([item]) or marks(item, timeout)  # type: ignore
    client.offsets_for_times = lambda items, timeout: ask(items) or times(items, timeout)  # type: ignore
    member.cluster.brokers.create_topic("u")
    member.cluster.log(*P0).end, member.cluster.log(*P1).end = 5, 7
    refuse(client, refused, confluent_kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED)
    member.assign(P0, P1, refused)
    await member.until(lambda: P1 in heard.epochs, "the partition that answers")
    assert (set(heard.epochs), client.paused, client.positions[P1]) == ({P1}, {P0, refused}, 7)
    assert "t-0: reading its start position failed" in member.consumer.trouble(P0)
    silent.clear()
    await member.until(lambda: P0 in heard.epochs, "the other partition")
    assert (client.positions[P0], client.paused, member.consumer.trouble(P0)) == (5, {refused}, "")


def test_a_loop_that_is_late_drains_only_what_is_left_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread gives up at a moment; a lane that drained longer would deliver beside the next owner's."""
    wait_for = LoopProxy.wait_for
    asked: list[None] = []

    def asking(*arguments: Any) -> Any:
        asked.append(None)
        return wait_for(*arguments)

    async def test(member: Member) -> None:
        left: list[float] = []

        async def on_revoked(partitions: Sequence[TopicPartition], deadline: Deadline) -> Mapping[TopicPartition, Any]:
            left.append(deadline.remaining_seconds)
            return {}

        member.listener.on_revoked = on_revoked
        member.assign(P0)
        await member.until(lambda: member.listener.assigned, "the assignment")
        member.client.move("revoke", P0)
        while not asked:
            sleep(0.001)  # the loop stands still
        sleep(15)
        await member.until(lambda: left, "the drain")
        assert left[0] <= 5

    monkeypatch.setattr(LoopProxy, "wait_for", asking)
    with_member(test)


@pytest.mark.parametrize("ending", ["revoke", "stop"])
def test_what_is_revoked_under_another_member_id_is_lost(ending: str) -> None:
    """Another member may have had the partitions in between, and Kafka would take a commit of the new member."""
    ends = []

    async def test(member: Member) -> None:
        async def on_revoked(partitions: Sequence[TopicPartition], deadline: Deadline) -> Mapping[TopicPartition, Any]:
            return dict.fromkeys(partitions, Committed(7))

        heard, client = member.listener, member.client
        ends.append((heard, client))
        heard.on_revoked = on_revoked
        member.assign(P0)
        await member.until(lambda: heard.assigned, "the assignment")
        client.move("revoke", P0)
        await member.until(lambda: client.commits, "a commit of the same member")
        member.assign(P0)
        await member.until(lambda: len(heard.assigned) == 2, "the next assignment")
        client.do(lambda: setattr(client.member, "member_id", "member-2"))
        member.assign(P1)
        await member.until(lambda: P1 in heard.epochs, "an assignment of the other member")
        if ending == "revoke":
            client.move("revoke", P0, P1)
            await member.until(lambda: heard.lost and not client.positions, "the loss")
            member.assign(P0)
            await member.until(lambda: len(heard.assigned) == 4, "an assignment")
            client.move("revoke", P0)
            await member.until(lambda: len(client.commits) == 2, "a commit of the other member")

    with_member(test)
    ((heard, client),) = ends
    assert {*heard.lost} == {P0, P1}
    assert client.commits == [(P0, 7)] * (2 if ending == "revoke" else 1)


def test_partitions_whose_store_does_not_respond_hold_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 64 are requested at a time. The silent and the refused are requested again, with a new epoch."""
    monkeypatch.setattr("headrace.kafka.consumer._FIRST_STORE_SECONDS", 0.2)
    partitions = [TopicPartition("t", number) for number in range(120)]
    silent, refused = partitions[:40], [partitions[40]]
    asked: dict[TopicPartition, list[int]] = {}
    in_flight: list[TopicPartition] = []

    async def stored(group: str, partition: TopicPartition, epoch: int) -> int | None:
        asked.setdefault(partition, []).append(epoch)
        in_flight.append(partition)
        try:
            assert len(in_flight) <= 64
            await asyncio.sleep(0)
            if partition in silent:
                await asyncio.Event().wait()
            if partition in refused:
                raise DestinationUnavailable("HTTP 503")
        finally:
            in_flight.remove(partition)
        return 7

    async def test(member: Member) -> None:
        client, heard, trouble = member.client, member.listener, member.consumer.trouble
        for partition in partitions:
            member.cluster.log(*partition).end = 7
        member.assign(*partitions)
        await member.until(lambda: len(heard.epochs) >= 79, "the partitions that have a response")
        assert "no response within 0.2 s" in trouble(silent[0])
        await member.until(lambda: "HTTP 503" in trouble(partitions[40]), "the refusal")
        refused.clear()
        silent.clear()
        await member.until(lambda: len(heard.epochs) == 120, "all partitions")
        assert {client.positions[partition] for partition in partitions} == {7}
        assert heard.epochs == {partition: epochs[-1] for partition, epochs in asked.items()}
        assert all(sorted(epochs) == epochs for epochs in asked.values())
        assert {len(asked[partition]) for partition in partitions[41:]} == {1}

    with_member(test, policy=ReadPolicy(stored_offsets=stored))


def test_a_thread_that_does_not_return_from_the_client_hangs() -> None:
    """After the time of a drain and a minute; not while it takes turns, nor while the consumer leaves its group."""

    async def test(member: Member) -> None:
        free, begun = ThreadEvent(), list[float]()

        def hang() -> None:
            begun.append(member.clock.monotonic())
            assert free.wait(600)

        await asyncio.sleep(200)
        assert hanging_consumers() == []
        member.client.do(hang)
        await member.until(hanging_consumers, "a thread that hangs")
        assert hanging_consumers() == ["c"]
        assert 79 < member.clock.monotonic() - begun[0] < 82
        free.set()
        await member.until(lambda: not hanging_consumers(), "the thread to return")

    with_member(test)
    assert hanging_consumers() == []
