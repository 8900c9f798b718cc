"""One instance on a group in memory: what it delivers, commits and refuses while the group and its clients move."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import confluent_kafka
import pytest
from active_world import P0, P1, P2, World, read, run_virtual, spec_of, work_of

from headrace.errors import (
    CommitRefused,
    HeadraceError,
    IdempotencyKeyReused,
    InstanceBusy,
    InstanceNotFound,
    InstanceState,
    KafkaError,
    KafkaTimeout,
    KafkaUnavailable,
    ReadFailed,
    TooManyRequests,
)
from headrace.kafka.positions import ReadPolicy
from headrace.records import Committed, TopicPartition
from headrace.runtime import Deadline
from headrace.runtime.gauge_registry import GaugeKey, gauges
from headrace.sidecar.active import read_stream
from headrace.sidecar.active.partition_positions import Processed
from headrace.sidecar.active.spec import Topics
from tests.staged import staged

DOWN = confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._TIMED_OUT))


def with_instance(patch: pytest.MonkeyPatch, test: Callable[[World], Coroutine[Any, Any, None]], **given: Any) -> None:
    """Run a test with an instance that has two partitions with ten records each."""

    async def main() -> None:
        world = World(patch)
        await world.instances.start()
        world.instance = instance = await world.instances.create(spec_of(**given))
        for partition in (P0, P1):
            world.append(partition, *[10] * 10)
        await instance.membership.subscribe(Topics(["t"]))
        await world.turns()
        world.clients[-1].rebalance("on_assign", P0, P1)
        await world.turns()
        assert instance.assigned == [P0, P1]
        await test(world)
        await world.instances.stop()
        assert world.clients == []

    run_virtual(main())


def said(partition: TopicPartition, offset: int, assignment: str = "") -> Processed:
    return Processed(partition, Committed(offset), assignment)


with_reader = staged(with_instance, fixtures=("monkeypatch",))


async def delivered(world: World, **limits: int) -> dict[Any, list[int]]:
    """Read, and deliver all of it."""
    found = await read(world, **limits)
    found.end(len(found.records))
    offsets: dict[Any, list[int]] = {}
    for record in found.records:
        offsets.setdefault(record.topic_partition, []).append(record.offset)
    return offsets


@with_reader
async def test_a_question_that_kafka_does_not_response_leaves_the_instance_alive(world: World, /) -> None:
    """The committed offsets are asked for on the polling thread, which must survive the error."""
    world.failure = DOWN
    with pytest.raises(KafkaError):
        await world.run(world.instance.membership.committed([P0]))
    world.failure = None
    assert await world.run(world.instance.membership.committed([P0])) == {}
    assert len((await delivered(world))[P0]) == 10


@pytest.mark.parametrize("call", ["seek", "commit", "committed"])
@with_reader
async def test_a_call_ends_when_the_instance_is_deleted_meanwhile(world: World, /, call: str) -> None:
    """The thread that should answer is gone."""
    await delivered(world)
    calls = {
        "seek": lambda: world.instance.seek({P0: 3}),
        "commit": lambda: world.instance.commit(),
        "committed": lambda: world.instance.membership.committed([P0]),
    }
    waiting = asyncio.ensure_future(calls[call]())
    await world.clock.settle()
    await world.instances.delete(world.instance)
    with pytest.raises(HeadraceError) as caught:
        async with asyncio.timeout(1):
            await waiting
    assert isinstance(caught.value, (KafkaUnavailable, CommitRefused))


@with_reader
async def test_a_seek_moves_all_partitions_or_none(world: World, /) -> None:
    """One of them is not assigned."""
    await delivered(world)
    with pytest.raises(InstanceState, match="no position has changed: t-2;"):
        await world.run(world.instance.seek({P0: 3, P2: 0, P1: 3}))
    assert await delivered(world) == {}
    await world.run(world.instance.seek({P0: 3, P1: 4}))
    assert await delivered(world) == {P0: [*range(3, 10)], P1: [*range(4, 10)]}


@with_reader
async def test_the_work_of_a_request_grows_with_its_partitions_and_no_faster(world: World, /) -> None:
    """Comparing all with all takes 2,000 comparisons for each."""
    assert await work_of(world, 2000) < 2000 * 50


@with_reader
async def test_lags_stay_known_while_kafka_is_asked(world: World, /) -> None:
    """Until the response: the new ones, or none after an error."""
    await delivered(world)
    world.append(P0, 10)
    [status] = await world.instances.monitor.statuses()
    assert (status.lag, status.lags) == (1, {str(P0): 1, str(P1): 0})
    world.responses.clear()
    asked = asyncio.ensure_future(world.instances.monitor.statuses())
    await world.clock.settle()
    assert [lag for _, _, lag in world.instances.monitor.lags()] == [1, 0]
    world.failure = DOWN
    world.responses.set()
    assert (await asked)[0].lag is None and [*world.instances.monitor.lags()] == []
    world.failure = None


@pytest.mark.parametrize("ends", ["delete", "unsubscribe", "drain"])
@with_reader
async def test_a_waiting_read_ends_with_what_its_instance_reads(world: World, /, ends: str) -> None:
    """At once, with nothing; a wait of half an hour would be in vain."""
    await delivered(world)
    began = asyncio.get_running_loop().time()
    waiting = asyncio.ensure_future(world.instance.read(max_bytes=1, max_records=1, wait_seconds=1800))
    await world.clock.settle()
    calls = {
        "delete": lambda: world.instances.delete(world.instance),
        "unsubscribe": world.instance.unsubscribe,
        "drain": lambda: world.instances.drain(Deadline(world.clock, 5)),
    }
    await calls[ends]()
    assert (await waiting).records == []
    assert asyncio.get_running_loop().time() - began < 1


@with_reader
async def test_a_subscription_that_is_late_opens_nothing_in_a_deleted_instance(world: World, /) -> None:
    """It waited for the one before, and would leave a thread or a task that nothing ends."""
    late = [
        asyncio.ensure_future(work)
        for work in (
            world.instance.membership.subscribe(Topics(["t"])),
            world.instance.membership.subscribe(Topics(matches=lambda name: True)),
            world.instance.membership.committed([P0]),
        )
    ]
    await asyncio.sleep(0)
    await world.instances.delete(world.instance)
    for each in late:
        with pytest.raises((InstanceNotFound, KafkaUnavailable)):
            await each
    await world.clock.settle()
    assert (world.clients, {t.get_name() for t in asyncio.all_tasks() if "topics" in t.get_name()}) == ([], set())


@with_reader
async def test_two_subscriptions_at_a_time_leave_the_later_one(world: World, /) -> None:
    """One of them would otherwise look at topics for ever, and take the other's away."""
    both = asyncio.gather(
        world.instance.membership.subscribe(Topics(matches=lambda name: True)),
        world.instance.membership.subscribe(Topics(["other"])),
    )
    await world.run(both)
    await world.clock.advance(20)
    await world.turns()
    assert (list(world.instance.membership.topics), world.clients[-1].topics) == (["other"], ["other"])


@with_reader
async def test_a_refusal_is_not_lost_with_the_response_of_kafka(world: World, /) -> None:
    """The commit of the partitions that are left takes too long; the next one names those that are gone."""
    await delivered(world)
    world.clients[-1].rebalance("on_revoke", P1)
    await world.turns()
    with pytest.raises(KafkaTimeout):
        await world.instance.commit()  # the thread takes no turn
    with pytest.raises(CommitRefused, match="t-1"):
        await world.run(world.instance.commit())


@with_reader
async def test_an_instance_whose_consumer_died_says_so_at_once(world: World, /) -> None:
    """Nothing will arrive, however long a read waits."""
    await delivered(world)
    world.clients[-1].poll = lambda seconds: 1 / 0  # type: ignore[method-assign,assignment]
    await world.turns()
    began = asyncio.get_running_loop().time()
    with pytest.raises(ReadFailed, match="create it again"):
        await read(world, wait_seconds=30)
    with pytest.raises(KafkaUnavailable):
        await world.run(world.instance.seek({P0: 1}))
    assert asyncio.get_running_loop().time() - began < 1


@with_reader
async def test_a_second_read_waits_for_a_cancelled_one(world: World, /) -> None:
    """Its client has left, and the server takes a moment to notice; a read that lasts refuses the second."""
    await delivered(world)
    first = asyncio.ensure_future(world.instance.read(max_bytes=1, max_records=1, wait_seconds=1800))
    await world.clock.settle()
    with pytest.raises(InstanceBusy):
        await world.instance.read(max_bytes=1, max_records=1, wait_seconds=0)
    second = asyncio.ensure_future(world.instance.read(max_bytes=1, max_records=1, wait_seconds=0))
    await world.clock.settle()
    first.cancel()
    (await second).end(0)


@pytest.mark.parametrize(("linger", "least", "count"), [(0.0, -1, 1), (60.0, -1, 3), (0.0, 25, 3)])
def test_a_read_waits_for_more_if_its_instance_says_so(
    monkeypatch: pytest.MonkeyPatch, linger: float, least: int, count: int
) -> None:
    """Until its limits are reached, or as many bytes are there as it waits for."""

    async def test(world: World) -> None:
        await delivered(world)
        reading = asyncio.ensure_future(world.instance.read(max_bytes=1000, max_records=3, wait_seconds=1800))
        for _ in range(3):
            world.append(P0, 10)
            await world.turns(1)
        found = await reading
        assert len(found.records) == count
        found.end(count)

    with_instance(monkeypatch, test, linger_seconds=linger, min_bytes=least)


def test_a_creation_with_a_key_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that were made up differ in each attempt; other settings are another request; some groups are taken."""

    async def main() -> None:
        instances = World(monkeypatch).process()
        first = await instances.create(spec_of("a", key="k"), is_named=False)
        assert await instances.create(spec_of("b", key="k"), is_named=False) is first
        for other in (spec_of("c", key="k", value_format="string"), spec_of("d", key="k", linger_seconds=1.0)):
            with pytest.raises(IdempotencyKeyReused):
                await instances.create(other, is_named=False)
        assert await instances.create(spec_of("e", key="k", owner="other"), is_named=False) is not first
        await instances.delete(first)
        assert (await instances.create(spec_of("f", key="k"), is_named=False)).spec.name == "f"
        instances.own_groups = lambda: {"g"}
        with pytest.raises(InstanceState, match="group g cannot be joined: a consumer, function or pipeline"):
            await instances.create(spec_of("g"))
        await instances.stop()

    run_virtual(main())


def test_the_responses_that_are_not_taken_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """One alone may be larger than the bound; one more is refused while it is written."""
    instances = World(monkeypatch).process(total_bytes=1_048_576)
    with instances.answering(2_000_000), pytest.raises(TooManyRequests), instances.answering(1):
        raise AssertionError
    with instances.answering(1_000_000), instances.answering(48_576):
        pass


def test_the_buffers_of_all_instances_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred fit, the last ones with less; what is above is refused and counted until one is deleted."""

    async def main() -> None:
        instances = World(monkeypatch).process(max_instances=1000)
        await instances.start()
        made = [await instances.create(spec_of(f"n{number}", buffer_bytes=2_097_152)) for number in range(100)]
        assert made[0].spec.buffer_bytes == 2_097_152
        with pytest.raises(TooManyRequests, match=r"active_consumers\.total_bytes"):
            for number in range(1000):
                made.append(await instances.create(spec_of(f"m{number}", buffer_bytes=2_097_152)))
        assert gauges()[GaugeKey("headrace_active_refused_creations_total")] == 1
        assert sum(one.spec.buffer_bytes for one in made) <= 67_108_864
        await instances.delete(made[0])
        await instances.create(spec_of("last"))
        await instances.stop()

    run_virtual(main())


@pytest.mark.parametrize(("limit", "starts"), [(5, False), (30, True)])
def test_an_id_of_an_event_has_a_limit(monkeypatch: pytest.MonkeyPatch, limit: int, starts: bool) -> None:
    """A stream of more partitions is refused or ends with an error, and what was not sent stays undelivered."""
    monkeypatch.setattr(read_stream, "_MOST_ID_BYTES", limit)

    async def test(world: World) -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        if not starts:
            await delivered(world)
        before = dict(world.instance.positions)
        streaming = read_stream.stream_records(
            world.instance, world.instance.entries, {"state": {}}, send, events=True, until=time.time() + 60
        )
        if starts:
            await world.run(streaming)
            assert b"2 partitions are more than the 30 bytes" in sent[-1] and sent[-1].startswith(b"event: error")
        else:
            with pytest.raises(InstanceState, match="let more instances share"):
                await streaming
            assert sent == []
        assert world.instance.positions == before and not world.instance.turn.is_taken

    with_instance(monkeypatch, test)


@with_reader
async def test_a_seek_does_not_drop_a_commit_that_is_not_sent_yet(world: World, /) -> None:
    """The response of an asynchronous commit has promised it."""
    assert len((await delivered(world))[P0]) == 10
    await world.instance.commit(wait=False)
    await world.run(world.instance.seek({P0: 0}))
    await world.turns()
    assert world.committed == {P0: Committed(10), P1: Committed(10)}


@pytest.mark.parametrize("ends", ["delete", "unsubscribe"])
@with_reader
async def test_an_asynchronous_commit_survives_the_end_of_its_instance(world: World, /, ends: str) -> None:
    """The consumer is closed before the commit has begun; the response has promised it."""
    await delivered(world)
    await world.instance.commit(wait=False)
    await (world.instances.delete(world.instance) if ends == "delete" else world.instance.unsubscribe())
    await world.turns()
    assert world.instance.death is None
    assert world.committed == {P0: Committed(10), P1: Committed(10)}


@with_reader
async def test_records_that_are_delivered_during_the_revoke_are_refused_at_commit(world: World, /) -> None:
    """Their client must learn that nothing of them is committed; once, and the other partition is committed."""
    found = await read(world)
    world.clients[-1].rebalance("on_revoke", P1)
    await world.turns()
    found.end(len(found.records))
    with pytest.raises(CommitRefused, match="t-1"):
        await world.run(world.instance.commit())
    assert world.committed == {P0: Committed(10)}
    assert await world.run(world.instance.commit()) == {}


@staged(with_instance, auto_commit_seconds=5.0, fixtures=("monkeypatch",))
async def test_what_a_lost_assignment_did_not_commit_is_committed_by_the_next(world: World, /) -> None:
    """With auto commit, also if the same offset was handed over before."""
    for _ in range(2):
        await delivered(world)
        await delivered(world)
        await world.clock.advance(5)
        world.clients[-1].rebalance("on_lost", P0)  # before the thread takes its commands
        world.clients[-1].rebalance("on_assign", P0)
        world.clients[-1].loses_commits = True
        await world.turns()
        world.clients[-1].loses_commits = False
    await delivered(world)
    await delivered(world)
    await world.clock.advance(5)
    await world.turns()
    assert world.committed[P0] == Committed(10)


@with_reader
async def test_a_commit_that_was_answered_early_is_kept_by_a_revoke(world: World, /) -> None:
    """Kafka refuses commits for a while; then the partition moves."""
    await delivered(world)
    world.clients[-1].loses_commits = True
    await world.instance.commit([said(P0, 4)], wait=False)
    await world.turns()
    world.clients[-1].loses_commits = False
    world.clients[-1].rebalance("on_revoke", P0)
    await world.turns()
    assert world.committed == {P0: Committed(4)}


@with_reader
async def test_a_commit_that_was_answered_early_and_is_lost_is_said_by_the_next(world: World, /) -> None:
    """The partition was lost, so nothing could be committed."""
    await delivered(world)
    world.clients[-1].loses_commits = True
    await world.instance.commit(wait=False)
    await world.turns()
    world.clients[-1].loses_commits = False
    world.clients[-1].rebalance("on_lost", P0)
    await world.turns()
    with pytest.raises(CommitRefused) as raised:
        await world.run(world.instance.commit())
    assert raised.value.parameters["refused"] == [P0._asdict()]


@with_reader
async def test_offsets_go_into_no_transaction_while_the_member_is_unknown(world: World, /) -> None:
    """Kafka checks nothing without a generation, and the thread has not been told yet."""
    await delivered(world)
    assert (await world.run(world.instance.for_transaction([said(P0, 1)])))[0].member()
    world.clients[-1].generation = -1
    with pytest.raises(CommitRefused):
        await world.run(world.instance.for_transaction([said(P0, 1)]))


@pytest.mark.parametrize("reads", [False, True])
@with_reader
async def test_a_client_that_names_no_assignment_is_refused_once(world: World, /, reads: bool) -> None:
    """After its partition came back, unless it has read records of it since."""
    await delivered(world)
    world.clients[-1].rebalance("on_revoke", P0)
    world.clients[-1].rebalance("on_assign", P0)
    await world.turns()
    if reads:
        await delivered(world)
    else:
        with pytest.raises(CommitRefused, match="revoked since it was read: t-0"):
            await world.run(world.instance.commit([said(P0, 4)]))
    await world.run(world.instance.commit([said(P0, 5)]))
    with pytest.raises(CommitRefused, match="seek to go back: t-0"):
        await world.run(world.instance.commit([said(P0, 3)]))
    await world.run(world.instance.seek({P0: 2}))
    await world.run(world.instance.commit([said(P0, 3)]))
    assert world.committed == {P0: Committed(3)}


@with_reader
async def test_what_was_not_delivered_is_read_again(world: World, /) -> None:
    """Its client has left in the middle of the response."""
    found = await read(world)
    found.end(4)
    assert await delivered(world) == {P0: [*range(4, 10)], P1: [*range(10)]}


@with_reader
async def test_what_was_not_delivered_before_a_revoke_does_not_come_back(world: World, /) -> None:
    """One partition has another member by then, and the other begins anew."""
    found = await read(world)
    world.clients[-1].rebalance("on_revoke", P0, P1)
    world.clients[-1].rebalance("on_assign", P0)
    await world.turns()
    found.end(4)
    assert await delivered(world) == {P0: [*range(10)]}


@with_reader
async def test_a_commit_that_is_acknowledged_leaves_a_newer_one_to_the_revoke(world: World, /) -> None:
    """Both were answered early; Kafka has taken the first only when the partition moves."""
    await delivered(world)
    await world.instance.commit([said(P0, 4)], wait=False)
    await world.clock.settle()
    world.turn()
    await world.instance.commit([said(P0, 6)], wait=False)
    world.clients[-1].loses_commits = True
    await world.turns()
    world.clients[-1].loses_commits = False
    world.clients[-1].rebalance("on_revoke", P0)
    await world.turns()
    assert world.committed == {P0: Committed(6)}


def test_a_store_that_is_silent_about_a_partition_holds_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One question is asked at a time, and those that are repeated wait for each other only."""
    monkeypatch.setattr("headrace.kafka.consumer._STORE_REQUESTS", 1)
    asked: list[TopicPartition] = []

    async def stored(group: str, partition: TopicPartition, epoch: int) -> int:
        asked.append(partition)
        if partition == P2:
            await asyncio.Event().wait()
        return 0

    async def test(world: World) -> None:
        world.clients[-1].rebalance("on_assign", P2)
        while asked.count(P2) < 2:
            await world.turns(1)
            await world.clock.advance(1)
            await asyncio.sleep(1)
        world.clients[-1].rebalance("on_revoke", P1)
        world.clients[-1].rebalance("on_assign", P1)
        await world.turns()
        assert world.instance.assigned == [P0, P1]

    with_instance(monkeypatch, test, policy=ReadPolicy("earliest", stored_offsets=stored))
