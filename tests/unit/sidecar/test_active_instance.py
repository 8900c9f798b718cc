"""One instance on a group in memory: what it delivers, commits and refuses while the group and its clients move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import confluent_kafka
import pytest
from active_world import P0, P1, World, read, run_virtual, spec_of

from headrace.errors import CommitRefused, HeadraceError, KafkaError, KafkaUnavailable
from headrace.records import Committed
from headrace.sidecar.active.instance import ActiveInstance, Topics
from headrace.sidecar.active.instances import ActiveInstances

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
