"""One instance on a group in memory: what it delivers, commits and refuses while the group and its clients move."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from active_harness import P0, P1, ActiveHarness, read, run_virtual, spec_of
from headrace.errors import (
    CommitRefused,
    HeadraceError,
    IdempotencyKeyReused,
    InstanceState,
    KafkaError,
    KafkaTimeout,
    KafkaUnavailable,
    ReadFailed,
    TooManyRequests,
)
from headrace.records import Committed, TopicPartition
from headrace.runtime import Deadline
from headrace.sidecar.active import read_stream
from headrace.sidecar.active.partition_positions import Processed
from headrace.sidecar.active.routes import load_read
from headrace.sidecar.active.spec import Topics
from tests.staged import staged

DOWN = KafkaUnavailable("no broker answers")


def with_instance(
    patch: pytest.MonkeyPatch, test: Callable[[ActiveHarness], Coroutine[Any, Any, None]], **given: Any
) -> None:
    """Run a test with an instance that has two partitions with ten records each."""

    async def main() -> None:
        harness = ActiveHarness(patch)
        await harness.instances.start()
        harness.instance = instance = await harness.instances.create(spec_of(**given))
        for partition in (P0, P1):
            harness.append(partition, *[10] * 10)
        await instance.membership.subscribe(Topics(["t"]))
        await harness.turns()
        harness.clients[-1].move("assign", P0, P1)
        await harness.turns(6)
        assert instance.assigned == [P0, P1]
        await test(harness)
        await harness.instances.stop()
        assert harness.clients == []

    run_virtual(main())


def processed(partition: TopicPartition, offset: int, assignment: str = "") -> Processed:
    return Processed(partition, Committed(offset), assignment)


with_reader = staged(with_instance, fixtures=("monkeypatch",))


async def delivered(harness: ActiveHarness, **limits: int) -> dict[Any, list[int]]:
    """Read, and deliver all of it."""
    found = await read(harness, **limits)
    found.end(sum(map(len, found.batches)))
    offsets: dict[Any, list[int]] = {}
    for batch in found.batches:
        offsets.setdefault(batch.topic_partition, []).extend(batch.offsets)
    return offsets


async def end(harness: ActiveHarness, how: str) -> None:
    """End what an instance reads."""
    calls: dict[str, Callable[[], Any]] = {
        "delete": lambda: harness.instances.delete(harness.instance),
        "unsubscribe": harness.instance.unsubscribe,
        "drain": lambda: harness.instances.drain(Deadline(harness.clock, 5)),
        "seek": lambda: harness.run(harness.instance.seek({P0: 0})),
    }
    await calls[how]()


@with_reader
async def test_a_request_that_kafka_does_not_answer_leaves_the_instance_alive(harness: ActiveHarness, /) -> None:
    """The committed offsets are requested on the polling thread, which must survive the error."""
    harness.kafka.brokers.kill(1)
    with pytest.raises(KafkaError):
        await harness.run(harness.instance.membership.committed([P0]))
    harness.kafka.brokers.start(1)
    assert await harness.run(harness.instance.membership.committed([P0])) == {}
    assert len((await delivered(harness))[P0]) == 10


@pytest.mark.parametrize(("call", "given"), [("seek", [{P0: 3}]), ("commit", []), ("committed", [[P0]])])
@with_reader
async def test_a_call_ends_when_its_instance_is_deleted(harness: ActiveHarness, /, call: str, given: Any) -> None:
    """The thread that should answer is gone."""
    await delivered(harness)
    waiting = asyncio.ensure_future(getattr(harness.instance, call, harness.instance.membership.committed)(*given))
    await harness.clock.settle()
    await harness.instances.delete(harness.instance)
    with pytest.raises(HeadraceError) as caught:
        async with asyncio.timeout(1):
            await waiting
    assert isinstance(caught.value, (KafkaUnavailable, CommitRefused))


@pytest.mark.parametrize("ends", ["delete", "unsubscribe", "drain"])
@with_reader
async def test_a_waiting_read_ends_with_what_its_instance_reads(harness: ActiveHarness, /, ends: str) -> None:
    """At once and without records, though its wait is half an hour."""
    await delivered(harness)
    began = asyncio.get_running_loop().time()
    waiting = asyncio.ensure_future(harness.instance.read(max_bytes=1, max_records=1, wait_seconds=1800))
    await harness.clock.settle()
    await end(harness, ends)
    assert (await waiting).batches == []
    assert asyncio.get_running_loop().time() - began < 1


@with_reader
async def test_a_refusal_is_not_lost_with_the_response_of_kafka(harness: ActiveHarness, /) -> None:
    """The commit of the partitions that are left takes too long; the next one names those that are gone."""
    await delivered(harness)
    harness.clients[-1].move("revoke", P1)
    await harness.turns()
    with pytest.raises(KafkaTimeout):
        await harness.instance.commit()  # the thread takes no turn
    with pytest.raises(CommitRefused, match="t-1"):
        await harness.run(harness.instance.commit())


@with_reader
async def test_an_instance_whose_consumer_died_says_so_at_once(harness: ActiveHarness, /) -> None:
    """Nothing will arrive, however long a read waits."""
    await delivered(harness)
    harness.clients[-1].poll = lambda seconds: 1 / 0  # type: ignore[method-assign,assignment]
    await harness.turns()
    began = asyncio.get_running_loop().time()
    with pytest.raises(ReadFailed, match="create it again"):
        await read(harness, wait_seconds=30)
    with pytest.raises(KafkaUnavailable):
        await harness.run(harness.instance.seek({P0: 1}))
    assert asyncio.get_running_loop().time() - began < 1


def test_a_creation_with_a_key_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that were made up differ in each attempt; other settings are another request; some groups are taken."""

    async def main() -> None:
        instances = ActiveHarness(monkeypatch).process()
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
    instances = ActiveHarness(monkeypatch).process(total_bytes=1_048_576)
    with instances.answering(2_000_000), pytest.raises(TooManyRequests), instances.answering(1):
        raise AssertionError
    with instances.answering(1_000_000), instances.answering(48_576):
        pass


def test_the_buffers_of_all_instances_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred fit, the last ones with less; what is above is refused and counted until one is deleted."""

    async def main() -> None:
        instances = ActiveHarness(monkeypatch).process(max_instances=1000)
        await instances.start()
        made = [await instances.create(spec_of(f"n{number}", buffer_bytes=2_097_152)) for number in range(100)]
        assert made[0].spec.buffer_bytes == 2_097_152
        with pytest.raises(TooManyRequests, match=r"active_consumers\.total_bytes"):
            for number in range(1000):
                made.append(await instances.create(spec_of(f"m{number}", buffer_bytes=2_097_152)))
        assert sum(one.spec.buffer_bytes for one in made) <= 67_108_864
        await instances.delete(made[0])
        await instances.create(spec_of("last"))
        await instances.stop()

    run_virtual(main())


@pytest.mark.parametrize(("limit", "starts"), [(5, False), (30, True)])
def test_an_id_of_an_event_has_a_limit(monkeypatch: pytest.MonkeyPatch, limit: int, starts: bool) -> None:
    """A stream of more partitions is refused or ends with an error, and what was not sent stays undelivered."""
    monkeypatch.setattr(read_stream, "_MOST_ID_BYTES", limit)

    async def test(harness: ActiveHarness) -> None:
        sent: list[Any] = []

        async def send(*parts: Any) -> Any:
            sent.append(parts)

        if not starts:
            await delivered(harness)
        before = dict(harness.instance.positions)
        response = SimpleNamespace(start=send, write=send, written=send)
        request: Any = SimpleNamespace(response=response)
        streaming = read_stream.stream_records(harness.instance, harness.instance.entries, request, events=True)
        with pytest.raises(InstanceState, match="let more instances share"):
            await (harness.run(streaming) if starts else streaming)
        assert bool(sent) == starts
        assert harness.instance.positions == before and not harness.instance.turn.is_taken

    with_instance(monkeypatch, test)


@pytest.mark.parametrize("then", ["seek", "delete", "unsubscribe"])
@with_reader
async def test_an_asynchronous_commit_is_made_whatever_follows(harness: ActiveHarness, /, then: str) -> None:
    """A seek, or the end of the instance, before the commit has begun; its response has promised it."""
    await delivered(harness)
    await harness.instance.commit(wait=False)
    await end(harness, then)
    await harness.turns()
    assert harness.instance.death is None
    assert harness.committed == {P0: Committed(10), P1: Committed(10)}


@with_reader
async def test_a_commit_that_was_answered_early_and_is_lost_is_said_by_the_next(harness: ActiveHarness, /) -> None:
    """The partition was lost, so nothing could be committed."""
    await delivered(harness)
    harness.clients[-1].async_commits = "lost"
    await harness.instance.commit(wait=False)
    await harness.turns()
    harness.clients[-1].async_commits = "acknowledged"
    harness.clients[-1].move("lost", P0)
    await harness.turns()
    with pytest.raises(CommitRefused) as raised:
        await harness.run(harness.instance.commit())
    assert raised.value.parameters["refused"] == [P0._asdict()]


@with_reader
async def test_offsets_go_into_no_transaction_while_the_member_is_unknown(harness: ActiveHarness, /) -> None:
    """Kafka checks nothing without a generation."""
    await delivered(harness)
    assert (await harness.run(harness.instance.for_transaction([processed(P0, 1)])))[0].member()
    harness.clients[-1].generation = -1
    with pytest.raises(CommitRefused):
        await harness.run(harness.instance.for_transaction([processed(P0, 1)]))


@with_reader
async def test_a_transaction_names_only_the_partitions_that_are_revoked_meanwhile(harness: ActiveHarness, /) -> None:
    """A client reads the others again from where it was, and would lose what is named for no reason."""
    await delivered(harness)
    consumer: Any = harness.instance.membership.consumer
    for_transaction = consumer.for_transaction

    async def after_revoke(offsets: Any) -> Any:
        harness.clients[-1].move("revoke", P0)
        await harness.rebalanced()
        return await for_transaction(offsets)

    consumer.for_transaction = after_revoke
    with pytest.raises(CommitRefused) as raised:
        await harness.run(harness.instance.for_transaction([processed(P0, 10), processed(P1, 10)]))
    assert raised.value.parameters["refused"] == [P0._asdict()]


@pytest.mark.parametrize("how", ["commit", "transaction"])
@with_reader
async def test_what_is_committed_while_it_waits_to_be_sent_again_is_not_sent(
    harness: ActiveHarness, /, how: str
) -> None:
    """The client has the records of a response that Headrace takes for lost, and commits them by name."""

    async def lost() -> bool:
        return False

    found = await read(harness)
    found.end(20, lost)
    (await read(harness)).end(0)
    offsets = [processed(P0, 4), processed(P1, 10)]
    if how == "commit":
        await harness.run(harness.instance.commit(offsets))
    else:
        _, committed = await harness.run(harness.instance.for_transaction(offsets))
        committed()
    assert await delivered(harness) == {P0: [4, 5, 6, 7, 8, 9]}
    await harness.run(harness.instance.seek({P1: 8}))
    assert await delivered(harness) == {P1: [8, 9]}


@pytest.mark.parametrize("in_doubt", ["the request is cancelled", "the client leaves"])
async def test_a_read_that_nobody_takes_returns_its_records(in_doubt: str) -> None:
    """As its records arrive in the turn in which its client leaves; else the instance would be busy for ever."""
    ended: list[int] = []
    arrived, left = asyncio.Event(), asyncio.Event()

    async def read(**_: Any) -> Any:
        await arrived.wait()
        return SimpleNamespace(batches=[], end=ended.append)

    instance = SimpleNamespace(read=read, spec=SimpleNamespace(group="g"))
    request = SimpleNamespace(body=SimpleNamespace(closed=left.wait))
    entries = SimpleNamespace(needs_schemas=False)
    loading = asyncio.ensure_future(
        load_read(instance, entries, request, max_bytes=1, max_records=1, wait_seconds=1)  # type: ignore[arg-type]
    )
    for _ in range(3):
        await asyncio.sleep(0)  # both wait now
    arrived.set()
    if in_doubt == "the client leaves":
        left.set()
        (await loading).end(0)
    else:
        await asyncio.sleep(0)  # the read has returned, and who waits for it does not know yet
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
    assert ended == [0]
