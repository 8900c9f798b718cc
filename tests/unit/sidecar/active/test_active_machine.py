"""Two members of a group, in random sequences: partitions are revoked and come back, and responses are lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from active_harness import P0, P1, ActiveHarness, run_virtual, spec_of
from headrace.client import RetryPolicy
from headrace.client.exchange import ClientRequest, HttpReply, NewRecord, ResponseLost
from headrace.client.operations import ClientOperations
from headrace.errors import CommitRefused, HeadraceError, ReadFailed
from headrace.records import Committed, TopicPartition
from headrace.sidecar.active.instance import ActiveInstance
from headrace.sidecar.active.requests import CommitRequest, Partitions, Position, SeekPositions
from headrace.sidecar.active.spec import Topics
from headrace.sidecar.produce.transactions import ConsumerOffsets
from headrace.sidecar.record_json import join_array
from headrace_devkit.simulation.offsets import CommittedOffset, OffsetsOfGroups, Partition
from headrace_devkit.testing import ManualClock

RECORDS = 6


class Lost(Exception):
    """The client has no response, and has given up."""


class Member:
    """An instance, and its client: `headrace.client`, or one that knows only the documented bodies of light-4j."""

    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name, self.dice = group, name, group.dice
        self.client = ClientOperations(RetryPolicy(3, 0.0, 0.0))
        self.consumer = self.client.instance("g", ["t"], name=name, autoOffsetReset="earliest")
        self.consumer.id = name
        self.instance: ActiveInstance
        self.kafka: Any
        self.batch: list[tuple[TopicPartition, int]] = []
        self.last: dict[TopicPartition, int] = {}

    async def run(self, work: Any, loses: float = 0.0) -> Any:
        """Carry out an operation of the client; some responses are lost."""
        try:
            step = next(work)
            while True:
                if not isinstance(step, ClientRequest):
                    step = next(work)
                    continue
                try:
                    reply = HttpReply(200, msgspec.json.encode(await self.serve(step)), {})
                except HeadraceError as error:
                    reply = HttpReply(error.status, msgspec.json.encode(error.body()), {})
                lost = self.dice.random() < loses
                step = work.throw(ResponseLost(Lost(), sent=True)) if lost else work.send(reply)
        except StopIteration as end:
            return end.value

    async def serve(self, request: ClientRequest) -> Any:
        """Respond as the service does."""
        harness, one, body = self.group.harness, self.instance, msgspec.json.encode(request.body)
        match request.method, request.path.rpartition("/")[2].partition("?")[0]:
            case "GET", "records":
                return await self.read()
            case "GET", "assignments":
                return {"partitions": [partition._asdict() for partition in one.assigned]}
            case "PUT", "offsets":
                found = await harness.run(one.membership.committed(msgspec.json.decode(body, type=Partitions).all))
                return {
                    "offsets": [
                        Position(partition.topic, partition.partition, at.offset) for partition, at in found.items()
                    ]
                }
            case "POST", "offsets":
                found = msgspec.json.decode(body, type=CommitRequest).offsets or []
                await harness.run(one.commit([each.processed() for each in found]))
            case "POST", "positions":
                named = [each.processed(0) for each in msgspec.json.decode(body, type=SeekPositions).offsets]
                targets = {each.partition: each.at.offset for each in named}
                await harness.run(one.seek(targets, [each for each in named if each.assignment]))
            case "POST", "first":
                await harness.run(one.seek(dict.fromkeys(msgspec.json.decode(body, type=Partitions).all, 0)))
            case "POST", "transactions":
                if "consumer" in request.body:
                    offsets = msgspec.convert(request.body["consumer"], ConsumerOffsets).offsets
                    found, committed = await harness.run(one.for_transaction([each.processed() for each in offsets]))
                    assert found.member() is not None
                    harness.cluster.commit("g", found.offsets)
                    committed()
                self.group.outputs.update(map(tuple, (each.value for each in request.body["topics"][0]["records"])))
                return {"topics": []}
        return []

    async def read(self, stream: object = None) -> list[Any]:
        """Read as the route does; the client gets the response whole, in part, or not at all."""
        work = self.instance.read(max_bytes=200_000, max_records=2, wait_seconds=0.01, stream=stream)
        found = await self.group.harness.run(work)
        for before, record in itertools.pairwise(itertools.chain.from_iterable(found.batches)):
            assert before.topic_partition != record.topic_partition or before.offset + 1 == record.offset
        await self.instance.entries.load(found.batches)
        entries = json.loads(join_array(self.instance.entries.write(found.batches, found.assignments)))
        received = stream is None and self.dice.random() < 0.7

        async def proof() -> bool:
            return received

        found.end(len(entries), proof if stream is None else None)
        return entries[: received * len(entries) if stream is None else self.dice.randrange(3)]

    def got(self, *places: tuple[TopicPartition, int]) -> None:
        self.group.got.update(places)
        self.batch += places
        self.last |= dict(places)


class CheckedOffsets(OffsetsOfGroups):
    """The committed offsets of the group; each is checked."""

    def __init__(self, check: Callable[[TopicPartition, int], None]) -> None:
        super().__init__()
        self.check = check

    def commit(self, group: str, offsets: Mapping[Partition, CommittedOffset]) -> None:
        for partition, at in offsets.items():
            self.check(TopicPartition(*partition), at.offset)
        super().commit(group, offsets)


class Group:
    """The members, what they have got, and what was made of it."""

    def __init__(self, patch: pytest.MonkeyPatch, kind: str, seed: int) -> None:
        self.kind, self.dice, self.harness = kind, random.Random(seed), ActiveHarness(patch, seed)
        self.got: set[tuple[TopicPartition, int]] = set()
        self.outputs: Counter[tuple[int, int]] = Counter()
        self.wrong: list[str] = []
        self.owner: dict[TopicPartition, Member] = {}
        self.harness.cluster.offsets = self.harness.kafka.groups.offsets = CheckedOffsets(self.check_commit)
        for partition in (P0, P1):
            self.harness.append(partition, *[4] * RECORDS)
        self.members = [Member(self, "a"), Member(self, "b")]

    def check_commit(self, partition: TopicPartition, at: int) -> None:
        """No committed offset passes a record that no client got, and none goes back."""
        before = self.harness.committed.get(partition, Committed(0)).offset
        if before > at or not {(partition, offset) for offset in range(at)} <= self.got:
            self.wrong.append(f"{partition}: {before} to {at}")  # an error would only end the consumer

    async def open(self) -> None:
        await self.harness.instances.start()
        for one in self.members:
            one.instance = await self.harness.instances.create(spec_of(one.name))
            await one.instance.membership.subscribe(Topics(["t"]))
            await self.harness.turns()
            one.kafka = self.harness.clients[-1]
        for partition in (P0, P1):
            await self.move(partition, self.members[0])

    async def move(self, partition: TopicPartition, to: Member) -> None:
        if partition in self.owner:
            self.owner[partition].kafka.move(self.dice.choice(["revoke", "lost"]), partition)
            await self.harness.rebalanced()
        to.kafka.move("assign", partition)
        await self.harness.rebalanced()
        self.owner[partition] = to

    async def step(self, one: Member, loses: float = 0.3) -> None:
        """Let one client do something."""
        try:
            if self.kind == "light":
                await self.light(one)
            elif self.dice.random() < 0.6:
                found = await one.run(one.consumer.read(0.1), loses)
                one.got(*((TopicPartition(each.topic, each.partition), each.offset) for each in found))
            elif self.kind == "commits":
                await one.run(one.consumer.commit(), loses)
            elif one.batch:
                outputs = [NewRecord((partition.partition, offset)) for partition, offset in one.batch]
                await one.run(one.client.transaction({"out": outputs}, SimpleNamespace(operations=one.consumer)))
                one.batch.clear()
        except CommitRefused:
            one.batch.clear()
        except (Lost, ReadFailed):
            pass
        except HeadraceError as error:
            assert error.code == "ERR40066" and self.kind == "light", error
        assert self.wrong == []

    async def light(self, one: Member) -> None:
        """Read or stream, and commit with offsets or without a body, but without assignments."""
        choice = self.dice.randrange(4)
        if choice < 2:
            if choice:
                with one.instance.turn.stream() as token:
                    await self.harness.run(one.instance.resume([]))
                    found = await one.read(token)
            else:
                found = await one.read()
            one.got(*((TopicPartition(each["topic"], each["partition"]), each["offset"]) for each in found))
        elif choice == 2:
            await self.harness.run(one.instance.commit())
        else:
            last, one.last = one.last, {}
            body = [Position(*partition, offset).processed() for partition, offset in last.items()]
            await self.harness.run(one.instance.commit(body))

    async def check(self) -> None:
        await self.open()
        for _ in range(12):
            if self.dice.random() < 0.25:
                await self.move(self.dice.choice([P0, P1]), self.dice.choice(self.members))
            await self.step(self.dice.choice(self.members))
        await self.harness.clock.advance(1)
        every = {(partition, n) for partition in (P0, P1) for n in range(RECORDS)}
        while self.harness.committed != {P0: Committed(RECORDS), P1: Committed(RECORDS)}:
            for one in self.members:
                await self.step(one, loses=0.0)
        assert self.got == every
        assert self.kind != "transactions" or self.outputs == Counter((p.partition, n) for p, n in every)
        await self.harness.instances.stop()


async def settle(clock: ManualClock) -> None:
    for _ in range(6):
        await asyncio.sleep(0)


@pytest.mark.parametrize("kind", ["transactions", "commits", "light"])
def test_each_record_is_processed_and_no_commit_goes_back(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """180 random sequences of each kind of client."""
    monkeypatch.setattr(ManualClock, "settle", settle)  # faster, and enough here
    for seed in range(180):
        with monkeypatch.context() as patch:
            group = Group(patch, kind, seed)
            try:
                run_virtual(group.check())
            except BaseException as cause:
                cause.add_note(f"seed {seed}")
                raise
