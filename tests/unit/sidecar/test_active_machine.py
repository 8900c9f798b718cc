"""Instances of a group in memory against the plainest model of a log: what is delivered, and what is committed.

Records arrive, are read, and their answers fail in part. Clients seek, commit and change what they read. The group
assigns, revokes and loses partitions. Other members commit meanwhile, and commits fail. Instances expire and are
created again. Everything runs through the real instance, consumer and commits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from active_world import P0, P1, P2, VirtualLoop, World, spec_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.errors import CommitRefused, InstanceBusy, InstanceNotFound, InstanceState
from headrace.records import Committed, TopicPartition
from headrace.sidecar.active.instance import ActiveInstance
from headrace.sidecar.active.spec import Topics

T = TypeVar("T")

PARTITIONS = [P0, P1, P2]
SUBSETS = st.sets(st.sampled_from(PARTITIONS), min_size=1)
BUFFER_BYTES = 3000
MOST_BYTES = 400
"""Of a record."""
IDLE_SECONDS = 300.0


class ActiveMachine(RuleBasedStateMachine):
    """One instance at a time; the model knows nothing of buffers, epochs or threads."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.patch = pytest.MonkeyPatch()
        self.instance: ActiveInstance | None = None
        self.wrong: list[str] = []

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end."""
        return self.runner.run(self.world.run(work))

    @initialize(auto=st.booleans())
    def begin(self, auto: bool) -> None:
        self.auto = auto
        self.world = World(self.patch)
        self.world.on_commit = self.check_commit
        self.instances = self.world.process(idle_seconds=IDLE_SECONDS)
        self.do(self.instances.start())
        self.created = 0
        self.reset()

    def reset(self) -> None:
        """Forget what an instance that is gone has read."""
        self.instance = None
        self.position: dict[TopicPartition, int] = {}
        """Of assigned partitions: the next offset that the client must get."""
        self.delivered: dict[TopicPartition, int] = {}
        """Offsets after what was delivered in this assignment."""
        self.last: dict[TopicPartition, int] = {}
        """Offsets that were committed last, or confirmed by a read, in this assignment."""
        self.assignments: dict[TopicPartition, int] = {}
        """Number of the present assignment or seek of each partition."""
        self.late: set[TopicPartition] = set()
        """Revoked before what was delivered of them was committed."""
        self.may_commit: dict[TopicPartition, set[int]] = {p: set() for p in PARTITIONS}
        self.requested: dict[TopicPartition, int] = {}
        """Offsets whose commit was promised."""
        self.reading: tuple[Any, dict[TopicPartition, int]] | None = None
        self.by_hand = False

    def check_commit(self, partition: TopicPartition, at: Committed) -> None:
        if at.offset not in self.may_commit[partition]:
            self.wrong.append(f"{partition}: {at.offset} is committed, allowed are {self.may_commit[partition]}")

    def begins(self, partition: TopicPartition, offset: int) -> None:
        """Begin an assignment, or a seek, at an offset."""
        self.position[partition] = offset
        self.delivered.pop(partition, None)
        self.last.pop(partition, None)
        self.assignments[partition] = self.assignments.get(partition, 0) + 1

    def ends(self, partitions: set[TopicPartition], *, refused: bool = True) -> None:
        """End assignments."""
        uncommitted = self.uncommitted()
        for partition in partitions & self.position.keys():
            if refused and not self.auto and not self.by_hand and partition in uncommitted:
                self.late.add(partition)
            del self.position[partition]
            self.delivered.pop(partition, None)
            self.last.pop(partition, None)
            self.requested.pop(partition, None)
            self.may_commit[partition].clear()
            self.assignments[partition] += 1

    def uncommitted(self) -> dict[TopicPartition, int]:
        """Return what a commit without a list commits."""
        return {p: at for p, at in self.delivered.items() if self.last.get(p, -1) < at}

    @property
    def client(self) -> Any:
        return self.world.clients[-1]

    def started(self, partition: TopicPartition) -> int:
        committed = self.world.committed.get(partition)
        return committed.offset if committed else 0

    # What the instance is -------------------------------------------------------------------------------------------

    @precondition(lambda self: self.instance is None)
    @rule(min_bytes=st.sampled_from([-1, 1, 500]))
    def create(self, min_bytes: int) -> None:
        self.created += 1
        seconds = 5.0 if self.auto else None
        spec = spec_of("one", auto_commit_seconds=seconds, buffer_bytes=BUFFER_BYTES, min_bytes=min_bytes)
        self.instance = self.do(self.instances.create(spec))

    @precondition(lambda self: self.instance)
    @rule()
    def subscribe(self) -> None:
        assert self.instance
        if self.by_hand:
            with pytest.raises(InstanceState):
                self.do(self.instance.subscribe(Topics(["t"])))
        else:
            self.do(self.instance.subscribe(Topics(["t"])))
            self.runner.run(self.world.turns())

    @precondition(lambda self: self.instance)
    @rule(partitions=SUBSETS)
    def assign(self, partitions: set[TopicPartition]) -> None:
        assert self.instance
        topics = Topics(partitions=sorted(partitions))
        if self.instance.reads and not self.by_hand:
            with pytest.raises(InstanceState):
                self.do(self.instance.subscribe(topics))
            return
        self.do(self.instance.subscribe(topics))
        self.by_hand = True
        self.ends(self.position.keys() - partitions)
        self.runner.run(self.world.turns())
        for partition in partitions - self.position.keys():
            self.begins(partition, self.started(partition))

    @precondition(lambda self: self.instance)
    @rule(how=st.sampled_from(["unsubscribe", "delete", "expire"]))
    def leave(self, how: str) -> None:
        assert self.instance
        if how == "unsubscribe":
            self.do(self.instance.unsubscribe())
            self.ends(set(PARTITIONS), refused=False)
            self.late.clear()
            self.by_hand = False
            return
        if how == "delete":
            self.do(self.instances.delete(self.instance))
        elif self.instance.is_reading:
            self.runner.run(self.world.clock.advance(IDLE_SECONDS + 5))
            assert self.instances.find("g", "one", "") is self.instance
            return
        else:
            self.runner.run(self.world.clock.advance(IDLE_SECONDS + 5))
        with pytest.raises(InstanceNotFound):
            self.instances.find("g", "one", "")
        assert self.world.clients == []
        if self.reading:
            self.reading[0].end(len(self.reading[0].records))
        self.reset()

    # The group ------------------------------------------------------------------------------------------------------

    def is_member(self) -> bool:
        return bool(self.world.clients and self.client.topics)

    @precondition(lambda self: self.instance and self.is_member())
    @rule(partitions=SUBSETS)
    def assigned(self, partitions: set[TopicPartition]) -> None:
        new = sorted(partitions - self.position.keys())
        self.client.rebalance("on_assign", *new)
        self.runner.run(self.world.rebalanced())
        for partition in new:
            self.begins(partition, self.started(partition))

    @precondition(lambda self: self.instance and self.is_member() and self.position)
    @rule(partitions=SUBSETS, how=st.sampled_from(["on_revoke", "on_lost"]), elsewhere=st.integers(0, 3))
    def taken(self, partitions: set[TopicPartition], how: str, elsewhere: int) -> None:
        """Give partitions to another member, which delivers and commits some records.

        A member that Kafka has removed loses all of them. With a part of them a read would answer that loss.
        """
        old = {*self.position} if how == "on_lost" else partitions & self.position.keys()
        self.client.rebalance(how, *sorted(old))
        self.runner.run(self.world.rebalanced())
        self.ends(old)
        for partition in old:
            end = min(self.started(partition) + elsewhere, len(self.world.logs[partition]))
            self.world.committed[partition] = Committed(end)

    @rule(partition=st.sampled_from(PARTITIONS), sizes=st.lists(st.integers(2, MOST_BYTES), min_size=1, max_size=12))
    def append(self, partition: TopicPartition, sizes: list[int]) -> None:
        self.world.append(partition, *sizes)

    @rule(count=st.integers(1, 4))
    def turns(self, count: int) -> None:
        self.runner.run(self.world.turns(count))

    @precondition(lambda self: self.world.clients)
    @rule(fails=st.booleans())
    def commits_fail(self, fails: bool) -> None:
        self.client.loses_commits = fails

    # Its client -----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.instance)
    @rule(max_bytes=st.integers(1, 2000), max_records=st.integers(1, 12), wait=st.sampled_from([0.0, 0.5, 30.0]))
    def read(self, max_bytes: int, max_records: int, wait: float) -> None:
        assert self.instance
        work = self.instance.read(max_bytes=max_bytes, max_records=max_records, wait_seconds=wait)
        if self.reading or self.instance.reads is None:
            with pytest.raises(InstanceBusy if self.reading else InstanceState):
                self.do(work)
            return
        if self.auto:
            for partition, at in self.uncommitted().items():
                self.may_commit[partition].add(at)
                self.requested[partition] = self.last[partition] = at
        found = self.do(work)
        self.reading = found, dict(self.assignments)
        expected = dict(self.position)
        for record in found.records:
            if record.offset != expected.get(record.topic_partition):
                self.wrong.append(f"{record.topic_partition}: {record.offset} instead of {expected}")
            expected[record.topic_partition] = record.offset + 1
        size = sum(record.size_bytes for record in found.records)
        assert len(found.records) <= max_records
        assert len(found.records) == 1 or size <= max_bytes
        waits = any(len(self.world.logs[p]) > at for p, at in self.position.items())
        if wait and waits and not found.records:
            self.wrong.append(f"nothing was read at {self.position}")

    @precondition(lambda self: self.reading)
    @rule(part=st.sampled_from([0.0, 0.5, 1.0, 1.0]))
    def answered(self, part: float) -> None:
        """End the answer of a read, of which the first part was written."""
        assert self.reading
        (found, assignments), self.reading = self.reading, None
        count = round(len(found.records) * part)
        found.end(count)
        for record in found.records[:count]:
            partition = record.topic_partition
            if assignments.get(partition) == self.assignments.get(partition):
                self.position[partition] = self.delivered[partition] = record.offset + 1
            elif partition not in self.position and self.instance and self.instance.reads:
                self.late |= set() if self.auto or self.by_hand else {partition}

    @precondition(lambda self: self.instance)
    @rule(partition=st.sampled_from(PARTITIONS), part=st.floats(0, 1))
    def seek(self, partition: TopicPartition, part: float) -> None:
        assert self.instance
        offset = round(len(self.world.logs[partition]) * part)
        if partition not in self.position:
            with pytest.raises(InstanceState):
                self.do(self.instance.seek({partition: offset}))
            return
        self.do(self.instance.seek({partition: offset}))
        self.begins(partition, offset)

    @precondition(lambda self: self.instance)
    @rule(wait=st.booleans())
    def commit(self, wait: bool) -> None:
        """Commit what was delivered: exactly that."""
        assert self.instance
        expected = {p: at for p, at in self.uncommitted().items() if p not in self.late}
        self.promise(expected, self.instance.commit(wait=wait), wait)

    @precondition(lambda self: self.instance and self.world.clients)
    @rule(offsets=st.dictionaries(st.sampled_from(PARTITIONS), st.integers(0, 30), min_size=1), wait=st.booleans())
    def commit_list(self, offsets: dict[TopicPartition, int], wait: bool) -> None:
        assert self.instance
        late, self.late = self.late, offsets.keys() - self.position.keys()
        expected = {p: at for p, at in offsets.items() if p in self.position}
        work = self.instance.commit({p: Committed(at) for p, at in offsets.items()}, wait=wait)
        self.promise(expected, work, wait)
        self.late = late - offsets.keys()

    def promise(self, expected: dict[TopicPartition, int], work: Coroutine[Any, Any, Any], wait: bool) -> None:
        """Commit, and compare the answer."""
        if self.world.clients and wait:
            self.client.loses_commits = False
        for partition, at in expected.items():
            self.may_commit[partition].add(at)
        if self.late:
            with pytest.raises(CommitRefused) as caught:
                self.do(work)
            assert {p for p in PARTITIONS if str(p) in str(caught.value)} == self.late
            self.late = set()
        else:
            assert {p: at.offset for p, at in self.do(work).items()} == expected
        self.requested.update(expected)
        for partition, at in expected.items():
            self.last[partition] = at
            if wait and self.world.committed.get(partition) != Committed(at):
                self.wrong.append(f"{partition}: {at} was acknowledged, {self.world.committed} is committed")

    @precondition(lambda self: self.instance)
    @rule()
    def time_passes(self) -> None:
        """What was promised is committed: the client of Kafka answers, and some seconds pass."""
        for client in self.world.clients:
            client.loses_commits = False
        for _ in range(4):
            self.runner.run(self.world.turns())
            self.runner.run(self.world.clock.advance(3))
        self.runner.run(self.world.turns())
        for partition, at in self.requested.items():
            if self.started(partition) != at:
                self.wrong.append(f"{partition}: {at} was promised, {self.world.committed} is committed")

    # What always holds ----------------------------------------------------------------------------------------------

    @invariant()
    def holds(self) -> None:
        assert self.wrong == []
        if self.instance:
            assert self.instance.death is None
            assert self.instance.is_closed or self.instance.assigned == sorted(self.position)
            assert self.instance.buffered_bytes <= BUFFER_BYTES + 500 * MOST_BYTES  # and one poll

    def teardown(self) -> None:
        try:
            self.do(self.instances.stop())
            assert self.world.clients == []
            assert self.wrong == []
        finally:
            self.runner.close()
            self.patch.undo()


TestActive = ActiveMachine.TestCase
TestActive.settings = settings(
    max_examples=500 if settings().max_examples >= 500 else 30, stateful_step_count=25, report_multiple_bugs=False
)
