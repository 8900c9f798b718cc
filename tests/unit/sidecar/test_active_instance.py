"""One instance on a group in memory: what it delivers, commits and refuses while the group and its clients move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import confluent_kafka
import pytest
from active_world import P0, P1, World, read, run_virtual, spec_of

from headrace.errors import (
    CommitRefused,
    HeadraceError,
    InstanceNotFound,
    KafkaError,
    KafkaTimeout,
    KafkaUnavailable,
    ReadFailed,
)
from headrace.lifecycle import Deadline
from headrace.records import Committed
from headrace.sidecar.active.instance import ActiveInstance
from headrace.sidecar.active.instances import ActiveInstances
from headrace.sidecar.active.spec import Topics

Test = Callable[[World, ActiveInstances, ActiveInstance], Coroutine[Any, Any, None]]
DOWN = confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._TIMED_OUT))


def with_instance(patch: pytest.MonkeyPatch, test: Test, **given: Any) -> None:
    """Run a test with an instance that has two partitions with ten records each."""

    async def main() -> None:
        world = World(patch)
        instances = world.instances()
        await instances.start()
        instance = await instances.create(spec_of(**given))
        for partition in (P0, P1):
            world.append(partition, *[10] * 10)
        await instance.subscribe(Topics(["t"]))
        await world.turns()
        world.clients[-1].rebalance("on_assign", P0, P1)
        await world.turns()
        assert instance.assigned == [P0, P1]
        await test(world, instances, instance)
        await instances.stop()
        assert world.clients == []

    run_virtual(main())


async def delivered(world: World, instance: ActiveInstance, **limits: int) -> dict[Any, list[int]]:
    """Read, and deliver all of it."""
    found = await read(world, instance, **limits)
    found.end(len(found.records))
    offsets: dict[Any, list[int]] = {}
    for record in found.records:
        offsets.setdefault(record.topic_partition, []).append(record.offset)
    return offsets


def test_a_question_that_kafka_does_not_answer_leaves_the_instance_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The committed offsets are asked for on the polling thread, which must survive the error."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        world.failure = DOWN
        with pytest.raises(KafkaError):
            await world.run(instance.committed([P0]))
        world.failure = None
        assert await world.run(instance.committed([P0])) == {}
        assert len((await delivered(world, instance))[P0]) == 10

    with_instance(monkeypatch, test)


@pytest.mark.parametrize("call", ["seek", "commit", "committed"])
def test_a_call_ends_when_the_instance_is_deleted_meanwhile(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The thread that should answer is gone."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        await delivered(world, instance)
        calls = {
            "seek": lambda: instance.seek({P0: 3}),
            "commit": lambda: instance.commit(),
            "committed": lambda: instance.committed([P0]),
        }
        waiting = asyncio.ensure_future(calls[call]())
        await world.clock.settle()
        await instances.delete(instance)
        with pytest.raises(HeadraceError) as caught:
            async with asyncio.timeout(1):
                await waiting
        assert isinstance(caught.value, (KafkaUnavailable, CommitRefused))

    with_instance(monkeypatch, test)


def test_a_seek_does_not_drop_a_commit_that_is_not_sent_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of an asynchronous commit has promised it."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        assert len((await delivered(world, instance))[P0]) == 10
        await instance.commit(wait=False)
        await world.run(instance.seek({P0: 0}))
        await world.turns()
        assert world.committed == {P0: Committed(10), P1: Committed(10)}

    with_instance(monkeypatch, test)


@pytest.mark.parametrize("ends", ["delete", "unsubscribe", "drain"])
def test_a_waiting_read_ends_with_what_its_instance_reads(monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    """At once, with nothing; a wait of half an hour would be in vain."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        await delivered(world, instance)
        began = asyncio.get_running_loop().time()
        waiting = asyncio.ensure_future(instance.read(max_bytes=1, max_records=1, wait_seconds=1800))
        await world.clock.settle()
        calls = {
            "delete": lambda: instances.delete(instance),
            "unsubscribe": instance.unsubscribe,
            "drain": lambda: instances.drain(Deadline(world.clock, 5)),
        }
        await calls[ends]()
        assert (await waiting).records == []
        assert asyncio.get_running_loop().time() - began < 1

    with_instance(monkeypatch, test)


def test_a_subscription_that_is_late_opens_nothing_in_a_deleted_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the one before, and would leave a thread or a task that nothing ends."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        late = [
            asyncio.ensure_future(work)
            for work in (
                instance.subscribe(Topics(["t"])),
                instance.subscribe(Topics(matches=lambda name: True)),
                instance.committed([P0]),
            )
        ]
        await asyncio.sleep(0)
        await instances.delete(instance)
        for each in late:
            with pytest.raises((InstanceNotFound, KafkaUnavailable)):
                await each
        await world.clock.settle()
        assert (world.clients, {t.get_name() for t in asyncio.all_tasks() if "topics" in t.get_name()}) == ([], set())

    with_instance(monkeypatch, test)


def test_two_subscriptions_at_a_time_leave_the_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them would otherwise look at topics for ever, and take the other's away."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        both = asyncio.gather(
            instance.subscribe(Topics(matches=lambda name: True)), instance.subscribe(Topics(["other"]))
        )
        await world.run(both)
        await world.clock.advance(20)
        await world.turns()
        assert (list(instance.topics), world.clients[-1].topics) == (["other"], ["other"])

    with_instance(monkeypatch, test)


def test_records_that_are_delivered_during_the_revoke_are_refused_at_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their client must learn that nothing of them is committed; once, and the other partition is committed."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        found = await read(world, instance)
        world.clients[-1].rebalance("on_revoke", P1)
        await world.turns()
        found.end(len(found.records))
        with pytest.raises(CommitRefused, match="t-1"):
            await world.run(instance.commit())
        assert world.committed == {P0: Committed(10)}
        assert await world.run(instance.commit()) == {}

    with_instance(monkeypatch, test)


def test_a_refusal_is_not_lost_with_the_answer_of_kafka(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit of the partitions that are left takes too long; the next one names those that are gone."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        await delivered(world, instance)
        world.clients[-1].rebalance("on_revoke", P1)
        await world.turns()
        with pytest.raises(KafkaTimeout):
            await instance.commit()  # the thread takes no turn
        with pytest.raises(CommitRefused, match="t-1"):
            await world.run(instance.commit())

    with_instance(monkeypatch, test)


def test_what_a_lost_assignment_did_not_commit_is_committed_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """With auto commit, also if the same offset was handed over before."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        for _ in range(2):
            await delivered(world, instance)
            await delivered(world, instance)
            await world.clock.advance(5)
            world.clients[-1].rebalance("on_lost", P0)  # before the thread takes its commands
            world.clients[-1].rebalance("on_assign", P0)
            world.clients[-1].loses_commits = True
            await world.turns()
            world.clients[-1].loses_commits = False
        await delivered(world, instance)
        await delivered(world, instance)
        await world.clock.advance(5)
        await world.turns()
        assert world.committed[P0] == Committed(10)

    with_instance(monkeypatch, test, auto_commit_seconds=5.0)


def test_an_instance_whose_consumer_died_says_so_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing will arrive, however long a read waits."""

    async def test(world: World, instances: ActiveInstances, instance: ActiveInstance) -> None:
        await delivered(world, instance)
        world.clients[-1].poll = lambda seconds: 1 / 0  # type: ignore[method-assign,assignment]
        await world.turns()
        began = asyncio.get_running_loop().time()
        with pytest.raises(ReadFailed, match="create it again"):
            await read(world, instance, wait_seconds=30)
        with pytest.raises(KafkaUnavailable):
            await world.run(instance.seek({P0: 1}))
        assert asyncio.get_running_loop().time() - began < 1

    with_instance(monkeypatch, test)
