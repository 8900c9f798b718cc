"""Retry topics and blocked keys under crashes at every write, against the plainest model of what was promised.

Two processes: one reads the topic, the other the retry topics; each knows blocked keys by reading their topic, late.
Either may be killed before or after any write, hand its partition on, or find the destination down.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from headrace.config.consumers import RetryConfig
from headrace.delivery.outcomes import ACK, DeadLetter, Delivery, Reply
from headrace.delivery.pump import Pump
from headrace.delivery.retry_topics import delayed_of
from headrace.errors import DestinationUnavailable
from headrace.records import Committed, OutgoingRecord, Produced, Record, TopicPartition
from headrace.runtime import Deadline
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from tests.unit.delivery.loop_machine import LoopMachine, in_loop
from tests.unit.delivery.retry_harness import BLOCKED, RetryHarness

SOURCE, GROUP = "t", "g"
PLANS = [0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 99]
"""How often a record fails before it is taken; 99 is for ever."""
KEYS = [b"a", b"a", b"b", None]
SECONDS = st.sampled_from([0.1, 1, 3, 10])
NAMES = st.sampled_from(["source", "retry"])


class Model:
    """Kafka, a destination and a dead letter topic, in memory, and the two processes."""

    def __init__(self, retry_topics: list[int], keep: bool, ordering: str) -> None:
        self.clock = ManualClock()
        limits = {"attempts": 2, "first_delay_seconds": 1, "max_delay_seconds": 2, "topics": retry_topics}
        # An error of this name does not apply to records that wait for their key.
        errors = {"errors": {"Blocked": "dead_letter"}, "keep_key_order": True} if keep else {}
        self.retry = RetryConfig.model_validate({**limits, **errors})
        self.ordering = ordering
        self.topics = self.retry.topic_names(GROUP)
        self.cluster = MemoryCluster(dict.fromkeys([SOURCE, *self.topics, BLOCKED], 1))
        self.committed: dict[TopicPartition, Committed] = {}
        self.plans: dict[int, int] = {}
        self.failures: dict[int, int] = defaultdict(int)
        self.ended: list[Record] = []
        """Records of the source in the order they were taken, or became dead letters."""
        self.letters: list[DeadLetter] = []
        self.down = False
        self.refused = ""
        """The process that does not reach the destination."""
        self.epochs = 0
        self.wrong: list[str] = []
        self.processes = {name: Process(self, name) for name in ("source", "retry")}

    async def start(self) -> None:
        for process in self.processes.values():
            await process.start()

    def log(self, topic: str) -> list[Record]:
        return self.cluster.records(topic)

    def append(self, record: OutgoingRecord) -> Produced:
        written = self.cluster.write(record, int(self.clock.time()))
        for process in self.processes.values():
            process.news.set()
        return written

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        if self.down:
            raise DestinationUnavailable("down")
        outcomes = []
        for record in delivery.records:
            as_it_was = _text_of(record) == _text_of(self.log(SOURCE)[record.offset])
            if not as_it_was or delivery.partition != (SOURCE, 0) or delivery.group != GROUP:
                self.wrong.append(f"{record} is not as it was")
            self.failures[record.offset] += 1
            if self.failures[record.offset] > self.plans[record.offset]:
                self._end(record)
                outcomes.append(ACK)
            else:
                outcomes.append(Reply("E", "again"))
        return outcomes

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        for letter in letters:
            self.letters.append(letter)
            self._end(letter.record)

    def _end(self, record: Record) -> None:
        if self.retry.keep_key_order and record.key is not None:
            places = [other.offset for other in self.log(SOURCE) if other.key == record.key]
            before = [other.offset for other in self.ended if other.key == record.key]
            latest = places.index(before[-1]) if before else -1
            if places.index(record.offset) > latest + 1:
                self.wrong.append(f"key {record.key!r}: {record.offset} ended after {before}")
        self.ended.append(record)

    def is_safe(self, record: Record) -> bool:
        """Whether a record has ended or lies somewhere behind the place it is committed at."""
        origin = delayed_of(record).origin.offset
        if any(other.offset == origin for other in self.ended):
            return True
        later = self.topics if record.topic == SOURCE else self.topics[self.topics.index(record.topic) + 1 :]
        return any(
            delayed_of(other).origin.offset == origin for retry_topic in later for other in self.log(retry_topic)
        )


class Process(RetryHarness):
    """One of the two pumps and what it knows; the source of its pump."""

    def __init__(self, model: Model, name: str) -> None:
        policy = model.retry.model_dump(exclude_unset=True)
        super().__init__(
            clock=model.clock,
            cluster=model.cluster,
            follows=False,
            ordering=model.ordering,
            max_records=3,
            max_in_flight=3,
            **policy,
        )
        self.model = model
        self.name = name
        self.dead, self.died_at, self.stays_dead_seconds = False, 0.0, 0.0
        self.dies_in: tuple[int, bool] | None = None
        """After how many writes, before or after the last of them is in the log."""
        self.reads = [SOURCE] if name == "source" else model.topics
        self.pump = self.live if name == "source" else self.retries
        self.position: dict[str, int] = {}
        self.read_up_to = 0
        self.news = asyncio.Event()

    async def start(self) -> None:
        await self.pump.start()
        if self.table:
            self.pump.spawn(self._follow(), "follow")
        for topic in self.reads:
            self.assign(topic)

    def assign(self, topic: str) -> None:
        self.model.epochs += 1
        place = TopicPartition(topic, 0)
        committed = self.model.committed.get(place)
        self.position[topic] = committed.offset if committed else 0
        self.pump.on_assigned({place: self.model.epochs}, {place: committed} if committed else {})

    def fetch(self) -> None:
        for topic in self.reads:
            news = self.model.log(topic)[self.position[topic] :]
            lane = self.pump.lanes.get(TopicPartition(topic, 0))
            if news and lane and not self.dead:
                self.position[topic] += len(news)
                self.pump.on_records(lane.partition, lane.tracker.epoch, news)

    async def _follow(self) -> None:
        chance = Random(self.model.epochs)
        while True:
            await self.model.clock.sleep(chance.choice([0.0, 0.3, 8.0]))
            self.news.clear()
            log = self.model.log(BLOCKED)
            news, self.read_up_to = log[self.read_up_to :], len(log)
            assert self.table
            self.table.read(news, self.read_up_to)
            self.table.loaded(self.read_up_to)
            await self.news.wait()

    async def produce(self, records: Sequence[OutgoingRecord]) -> list[Produced]:
        written = []
        for record in records:
            await self._step(lambda record=record: written.append(self.model.append(record)))  # type: ignore[misc]
        return written

    async def write(self, letters: Sequence[DeadLetter]) -> None:
        await self._alive()
        await self.model.write(letters)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        await asyncio.sleep(0)
        await self._alive()
        if self.model.refused == self.name:
            raise DestinationUnavailable("down from here")
        return await self.model.deliver(delivery)

    async def _step(self, write: object) -> None:
        await asyncio.sleep(0)
        await self._alive()
        left, before = self.dies_in or (0, False)
        if left:
            self.dies_in = (left - 1, before)
            self.dead, self.died_at = left == 1, self.model.clock.time()
        if not (self.dead and before):
            write()  # type: ignore[operator]
        await self._alive()

    async def _alive(self) -> None:
        if self.dead:
            await asyncio.Event().wait()

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self.pump.spawn(self._commit_soon(offsets), "commit soon")

    async def _commit_soon(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        await self.model.clock.sleep(0.5)
        self.commit_now(offsets)

    def commit_now(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        if self.dead:
            return
        for partition, committed in offsets.items():
            for record in self.model.log(partition.topic)[: committed.offset]:
                if not self.model.is_safe(record):
                    self.model.wrong.append(
                        f"{committed.offset} of {partition} is committed, {record.offset} is nowhere"
                    )
        self.model.committed.update(offsets)


def _text_of(record: Record) -> tuple[object, ...]:
    return (*record.topic_partition, record.offset, record.timestamp_ms, record.key, record.value, *record.headers)


class RetryTopicMachine(LoopMachine):
    """Drives a model."""

    @initialize(
        how=st.sampled_from(
            [([5], True, "key"), ([5], True, "key"), ([3, 9], False, "none"), ([5], False, "partition")]
        )
    )
    @in_loop
    async def open(self, how: tuple[list[int], bool, str]) -> None:
        self.model = Model(*how)
        await self.model.start()

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 4), seconds=SECONDS)
    def arrive(self, seed: int, count: int, seconds: float) -> None:
        chance, model = Random(seed), self.model
        for _ in range(count):
            model.plans[len(model.log(SOURCE))] = chance.choice(PLANS)
            model.append(OutgoingRecord(SOURCE, chance.choice(KEYS), b"v", [("own", b"\x00")]))
        self._pass(seconds)

    @rule(name=NAMES, writes=st.integers(1, 4), before=st.booleans(), for_seconds=st.sampled_from([0, 3, 6]))
    def doom(self, name: str, writes: int, before: bool, for_seconds: float) -> None:
        self.model.processes[name].dies_in = (writes, before)
        self.model.processes[name].stays_dead_seconds = for_seconds

    @rule(name=NAMES)
    @in_loop
    async def hand_over(self, name: str) -> None:
        process = self.model.processes[name]
        places = [TopicPartition(topic, 0) for topic in process.reads]
        revoke = asyncio.ensure_future(process.pump.on_revoked(places, Deadline(self.model.clock, 1e9)))
        for _ in range(1000):
            if revoke.done() or process.dead:
                break
            await self.model.clock.advance(0.1)
        if revoke.done():
            process.commit_now(revoke.result())
        process.dead = True
        revoke.cancel()
        await self._revive(name)
        await self._go_on(0.0)

    @rule(down=st.booleans(), seconds=SECONDS)
    def change(self, down: bool, seconds: float) -> None:
        self.model.down = down
        self._pass(seconds)

    def pumps(self) -> Sequence[Pump]:
        return [process.pump for process in self.model.processes.values()]

    def check_end(self) -> None:
        """Every record is completed, keys end with their last, and nothing waits."""
        model = self.model
        assert {record.offset for record in model.ended} == {record.offset for record in model.log(SOURCE)}
        for topic in (SOURCE, *model.topics):
            if log := model.log(topic):
                assert model.committed[TopicPartition(topic, 0)] == Committed(len(log))
        if model.retry.keep_key_order:
            self._check_keys(model)

    @staticmethod
    def _check_keys(model: Model) -> None:
        for key in {*KEYS} - {None}:
            if places := [record.offset for record in model.log(SOURCE) if record.key == key]:
                assert [record.offset for record in model.ended if record.key == key][-1] == places[-1]
        waiting = {record.key: record.value for record in model.log(BLOCKED)}
        assert [place for place, value in waiting.items() if value is not None] == []

    async def heal(self) -> None:
        self.model.down, self.model.refused = False, ""
        self.model.plans = dict.fromkeys(self.model.plans, 0)  # else the breaker is right to hold back dead letters
        for process in self.model.processes.values():
            process.dies_in = None
        for _ in range(40):
            if self._is_done():
                break
            await self._go_on(10)
        for process in self.model.processes.values():
            await process.pump.stop()

    def _is_done(self) -> bool:
        committed, log = self.model.committed, self.model.log
        topics = [SOURCE, *self.model.topics]
        return all(committed.get(TopicPartition(topic, 0), (0,))[0] == len(log(topic)) for topic in topics)

    def _pass(self, seconds: float) -> None:
        self.runner.run(self._go_on(seconds))

    async def _go_on(self, seconds: float) -> None:
        """Let records flow and time pass."""
        for _ in range(3):
            for name, process in self.model.processes.items():
                if process.dead and self.model.clock.time() >= process.died_at + process.stays_dead_seconds:
                    await self._revive(name)
                self.model.processes[name].fetch()
            await self.model.clock.advance(seconds / 3)

    async def _revive(self, name: str) -> None:
        """Have another process take the place of one that died, knowing what Kafka knows."""
        await self.model.processes[name].pump.stop()
        self.model.processes[name] = Process(self.model, name)
        await self.model.processes[name].start()


TestRetryTopicMachine = RetryTopicMachine.TestCase
TestRetryTopicMachine.settings = settings(max_examples=settings().max_examples, stateful_step_count=8)


class CalmRetryTopicMachine(RetryTopicMachine):
    """Nothing is killed and no partition changes hands; the destination may be down."""

    doom = hand_over = None  # type: ignore[assignment]

    @rule(name=st.sampled_from(["", "source", "retry"]), seconds=SECONDS)
    def refuse(self, name: str, seconds: float) -> None:
        self.model.refused = name
        self._pass(seconds)

    @invariant()
    def nothing_is_delivered_twice(self) -> None:
        if model := getattr(self, "model", None):
            offsets = [record.offset for record in model.ended]
            assert len(offsets) == len({*offsets}), offsets


TestCalmRetryTopicMachine = CalmRetryTopicMachine.TestCase
TestCalmRetryTopicMachine.settings = settings(max_examples=settings().max_examples // 2, stateful_step_count=20)
