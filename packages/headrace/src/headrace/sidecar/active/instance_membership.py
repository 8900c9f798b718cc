"""What an instance reads, topics of its group or assigned partitions, and why a read finds no records."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from typing import Final

from headrace.config.consumers import FlowControl
from headrace.errors import (
    HeadraceError,
    InstanceNotFound,
    InstanceState,
    KafkaTimeout,
    ReadFailed,
    TopicNotFound,
    TopicRecreated,
)
from headrace.kafka import Admin, Consumer, Subscription
from headrace.kafka.loop_proxy import Listener
from headrace.kafka.names import names_of
from headrace.records import CommitOffsets, TopicPartition
from headrace.runtime import Clock, Deadline
from headrace.sidecar.active.spec import InstanceSpec, Topics

COMMAND_SECONDS: Final = 10.0
"""Longest wait for a response of Kafka."""
_NAMED: Final = 10
"""Most problems that one error describes."""
_MAX_RECORDS: Final = 20_000


@contextlib.asynccontextmanager
async def in_time(advice: str) -> AsyncIterator[None]:
    """Raise KafkaTimeout, with advice, if Kafka takes too long."""
    try:
        async with asyncio.timeout(COMMAND_SECONDS):
            yield
    except TimeoutError as cause:
        raise KafkaTimeout(f"Kafka did not respond within {COMMAND_SECONDS:g} s; {advice}") from cause


class InstanceMembership:
    """The consumer of one instance, which starts with its first topics, and the watch of its topics."""

    def __init__(
        self, name: str, spec: InstanceSpec, admin: Admin, clock: Clock, listener: Listener, arrived: asyncio.Event
    ) -> None:
        """Take the event that wakes a read, and the listener for records and assignments."""
        # For the life of the instance
        self._name = name
        self._spec = spec
        self._admin = admin
        self._clock = clock
        self._listener = listener
        self._arrived = arrived
        self._changes = asyncio.Lock()
        """Locked while its topics are replaced."""
        self._has_ended = False
        # Until the topics are replaced
        self.reads: Topics | None = None
        """Its topics or partitions; None before a subscription or assignment."""
        self._watch: Subscription | None = None
        # Until the group is left
        self.consumer: Consumer | None = None
        self._problems = ReadProblems()

    @property
    def by_hand(self) -> bool:
        """Whether its client assigns partitions, or has not chosen yet."""
        return self.reads is None or self.reads.partitions is not None

    @property
    def topics(self) -> list[str]:
        if self.reads and self.reads.matches:
            return list(self._watch.subscribed) if self._watch else []
        return list(self.reads.names) if self.reads else []

    @property
    def is_closed(self) -> bool:
        """Whether no more records arrive: it ends, or its consumer has left the group or has died."""
        return self._has_ended or self.consumer is None or self.consumer.death is not None

    @property
    def has_new_problems(self) -> bool:
        """Whether a read must report a problem first."""
        return self._problems.are_new(self.consumer)

    def end(self) -> None:
        """Open no further consumer, and wake a read."""
        self._has_ended = True
        self._arrived.set()

    async def subscribe(self, topics: Topics) -> None:
        """Replace its topics or partitions.

        Raises:
            InstanceState: It has an assignment and this is a subscription, or the reverse.
            InstanceNotFound: It was closed meanwhile.
        """
        async with self._changes:
            # 1. A member of a group cannot assign partitions, and the reverse.
            if self.reads and (self.reads.partitions is None) != (topics.partitions is None):
                has = "a subscription" if self.reads.partitions is None else "an assignment"
                raise InstanceState(f"instance {self._name} has {has}; delete its subscriptions first")
            # 2. The previous watch stops first; the instance may be closed meanwhile.
            consumer = self.consumer or await self._open()
            watch = self._watch
            self._watch = None
            self.reads = topics
            if watch:
                await watch.stop()
            if self.consumer is not consumer:
                raise InstanceNotFound(f"instance {self._name} was closed meanwhile")
            # 3. The watch adds topics that are created later.
            names = topics.names
            if topics.partitions is not None:
                consumer.assign(topics.partitions)
                names = sorted({partition.topic for partition in topics.partitions})
            else:
                consumer.subscribe(names)
            self._watch = Subscription(
                f"{self._name} topics", consumer, self._admin, self._clock, topics=names, fits=topics.matches
            )
            await self._watch.start()

    async def unsubscribe(self, deadline: Deadline) -> None:
        """Stop reading, and leave the group."""
        async with self._changes:
            self.reads = None
            await self.close(deadline)

    async def close(self, deadline: Deadline) -> None:
        """Leave the group."""
        watch = self._watch
        consumer = self.consumer
        self._watch = None
        self.consumer = None
        self._arrived.set()
        if watch:
            await watch.stop()
        if consumer:
            await consumer.drain(deadline)
            await consumer.stop()

    async def committed(self, partitions: Sequence[TopicPartition]) -> CommitOffsets:
        """Return the committed offsets of the group; partitions without one are left out."""
        async with self._changes:
            consumer = self.consumer or await self._open()
        async with in_time("try again"):
            return await consumer.committed(partitions)

    async def _open(self) -> Consumer:
        if self._has_ended:
            raise InstanceNotFound(f"instance {self._name} was closed meanwhile")
        spec = self._spec
        consumer = Consumer(
            self._admin,
            name=self._name,
            group=spec.group,
            topics=(),
            listener=self._listener,
            flow=FlowControl(max_records=_MAX_RECORDS, max_bytes=spec.buffer_bytes),
            clock=self._clock,
            policy=spec.policy,
        )
        consumer.on_death = lambda dead: self._arrived.set()
        consumer.on_problem = self._on_problem
        await consumer.start()
        self.consumer = consumer
        return consumer

    def _on_problem(self, error: HeadraceError) -> None:
        self._problems.add(error)
        self._arrived.set()

    def raise_problem(self, assigned: Collection[TopicPartition]) -> None:
        """Raise the reason why a read has no records, if there is one: a new problem, else one that lasts."""
        consumer = self.consumer
        if consumer is None:
            return
        if consumer.death:
            raise ReadFailed(f"instance {self._name} has failed: {consumer.death}; create it again")
        if error := self._problems.take(consumer, self._watch, assigned):
            raise error
        self._admin.reachability.check(float("inf") if assigned else 0, "nothing was read")

    def require_rights(self) -> None:
        """Raise KafkaUnauthorized if Kafka refuses the group or one of its topics."""
        if self.consumer and self._watch:
            self.consumer.require_rights(self._watch.subscribed)


class ReadProblems:
    """Problems that reads report: each once when it happens, and if it lasts, again when there are no records."""

    def __init__(self) -> None:
        self._new: list[HeadraceError] = []

    def add(self, error: HeadraceError) -> None:
        """Take a problem that no read has reported."""
        self._new.append(error)

    def are_new(self, consumer: Consumer | None) -> bool:
        """Return whether there is an unreported problem that no seek has solved."""
        stalled = {*consumer.stalled.values()} if self._new and consumer else ()
        self._new = [one for one in self._new if one in stalled or isinstance(one, TopicRecreated)]
        return bool(self._new)

    def take(
        self, consumer: Consumer, watch: Subscription | None, assigned: Iterable[TopicPartition]
    ) -> HeadraceError | None:
        """Return new problems as one error, else those that last, else a missing topic, else a partition's problem.

        Raises:
            KafkaUnauthorized: Kafka refuses the group, or one of its topics.
        """
        found = self._new if self.are_new(consumer) else [*consumer.stalled.values()]
        self._new = []
        if found:
            text = "; ".join([one.description for one in found[:_NAMED]])
            return type(found[0])(text, **found[0].parameters, partitions=[one.parameters for one in found])
        if watch and (missing := watch.missing):
            text = f"topic {missing[0]} does not exist" if len(missing) == 1 else f"no such topics: {names_of(missing)}"
            return TopicNotFound(f"{text}; create the missing topics, or subscribe to others", topic=missing[0])
        consumer.require_rights(watch.subscribed if watch else ())
        for partition in assigned:
            if problem := consumer.trouble(partition):  # also a position that is not in the log
                return ReadFailed(problem, topic=partition.topic, partition=partition.partition)
        return None
