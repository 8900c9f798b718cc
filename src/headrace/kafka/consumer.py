"""A consumer of a group, as the loop sees it, and the subscription that follows its topic patterns.

The client belongs to a thread of its own (`poll_thread.py`). The loop calls the thread by commands; the thread calls
the loop through a proxy, in batches.
"""

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakSet

import confluent_kafka

from headrace.config.consumers import FlowControl
from headrace.errors import HeadraceError, KafkaTimeout, KafkaUnavailable, TopicRecreated
from headrace.kafka.admin import Admin
from headrace.kafka.client.credentials import ClientSecurity
from headrace.kafka.client.properties import member_properties
from headrace.kafka.fetch_flow import FetchFlowControl
from headrace.kafka.loop_proxy import CommandQueue, ConsumerProblems, Listener, LoopProxy
from headrace.kafka.names import check_group, check_topic, names_of
from headrace.kafka.poll_thread import ATTENTIVE_SECONDS, PollThread
from headrace.kafka.positions import PositionResolver, ReadPolicy
from headrace.kafka.transactions.transaction_job import GroupOffsets, metadata_in
from headrace.records import CommitOffsets, Committed, Epochs, Offsets, TopicPartition
from headrace.runtime import Clock, Deadline, OwnedThread, Readiness, Service, run_while

log = logging.getLogger(__name__)

T = TypeVar("T")

_WAKE_PART = 0.1
"""Part of the flow budget that must be released before the thread is woken to poll: less would make tiny polls."""
_FIRST_STORE_SECONDS, _STORE_SECONDS, _STORE_QUESTIONS = 2.0, 30.0, 32
"""How long the first response for one partition may take, how long a later one; how many run at a time."""
_THREAD_STOP_SECONDS = 30.0
_HANGS_SECONDS = 60.0
"""A turn of a thread takes milliseconds, and in a rebalance as long as the drain of its partitions."""
_LOOK_SECONDS = 5.0
_DEFAULT_POLICY = ReadPolicy()
_MOST_QUEUED_KBYTES = 16_384
_running: WeakSet["Consumer"] = WeakSet()


class Consumer(Service):
    """A member of a consumer group, and the source of a delivery pump.

    Commits only what `commit` is given. Starts at the committed offset; where there is none, at the start or the end
    of the partition as the policy says. An offset that is out of range is never reset silently: the problem is
    reported, and the partition is stalled or resumes at the start of the log, as the policy says.
    """

    def __init__(
        self,
        admin: Admin,
        *,
        name: str,
        group: str,
        topics: Sequence[str],
        listener: Listener,
        flow: FlowControl,
        clock: Clock,
        policy: ReadPolicy = _DEFAULT_POLICY,
    ) -> None:
        """Prepare; no broker is contacted. `admin` gets errors and acknowledged commits.

        Raises:
            ConfigError: Settings of the member and of every client contradict each other.
        """
        super().__init__(name)
        self._group = check_group(group)
        self._queued_kbytes = min(_MOST_QUEUED_KBYTES, max(1, flow.max_bytes // 1024))
        """The client fetches ahead as much as may be in flight, so that what a consumer holds has a bound."""
        self._listener = listener
        self._flow = FetchFlowControl(flow, policy.max_processing_seconds)
        self._policy = policy
        self._clock = clock
        self._admin = admin
        self._properties()
        self._problems = ConsumerProblems(group, admin.config)
        self._commands = CommandQueue()
        self._epochs: dict[TopicPartition, int] = {}
        """Assignment epochs, as far as the loop knows them: the thread may be ahead."""
        self._released_part = 0.0
        self._store = _StoreQuestions()
        self._poll: PollThread | None = None
        self._thread: OwnedThread | None = None
        self.on_problem: Callable[[HeadraceError], None] = lambda error: None
        """Called when a partition stalls until it is sought, and when a topic was created again."""
        if topics:
            self.subscribe(topics)

    async def start(self) -> None:
        loop = LoopProxy(self, self._listener, self._epochs)
        self._problems.on_stalled = lambda error: loop.post(self.on_problem, error)
        ask_store = functools.partial(self._ask_store, loop) if self._policy.stored_offsets else None
        self._poll = PollThread(
            self.name,
            ClientSecurity(self._admin.config.security, lambda: confluent_kafka.Consumer(self._properties())),
            loop=loop,
            commands=self._commands,
            flow=self._flow,
            resolver=PositionResolver(self._policy, self._clock, self._problems, ask_store),
            problems=self._problems,
            clock=self._clock,
        )
        self._thread = OwnedThread(self.name, self._poll.run, self.die)
        self._thread.start()
        _running.add(self)

    def _properties(self) -> dict[str, Any]:
        return {
            **member_properties(self._admin.config, f"headrace-{self.name}", self._group, self._policy.member),
            "queued.max.messages.kbytes": self._queued_kbytes,
            "on_commit": self._commit_reported,
            "error_cb": self._admin.reachability.failed,
        }

    async def drain(self, deadline: Deadline) -> None:
        """Leave the group: what is in flight ends and is committed first, as on a revoke."""
        if self._poll and self._thread:
            self._poll.leave_by = deadline
            await self._thread.stop(deadline.remaining_seconds)

    async def stop(self) -> None:
        if self._poll:
            self._poll.leave_by = Deadline(self._clock, 0)
        await super().stop()  # a revoke that still waits for its drain ends here, with nothing to commit
        if self._thread and not await self._thread.stop(_THREAD_STOP_SECONDS):
            log.warning("consumer %s did not close in time and is abandoned", self.name)

    @property
    def hangs(self) -> bool:
        """Whether its thread does not return from Kafka's client, which only another process can cure."""
        poll, limit = self._poll, _HANGS_SECONDS + self._policy.drain_seconds
        if self.death or poll is None or poll.leave_by:
            return False
        return self._clock.monotonic() - poll.turned_at > limit

    def readiness(self) -> Readiness:
        reasons = self._problems.all()
        return Readiness(False, "; ".join(reasons)) if reasons else Readiness(True)

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        now, epoch, poll, flow = self._clock.monotonic(), self._epochs.get(partition), self._poll, self._flow
        assert poll

        def released() -> None:
            if epoch == poll.epochs.get(partition):  # an earlier assignment has nothing in flight any more
                flow.released(partition, records, size_bytes, now)

        self._commands.append(released)
        self._released_part += flow.part_of(records, size_bytes)
        if self._released_part >= _WAKE_PART:
            self._released_part = 0.0
            self._commands.wake()

    def commit(self, offsets: CommitOffsets) -> None:
        copy, epochs = dict(offsets), {partition: self._epochs.get(partition, 0) for partition in offsets}
        self._command(lambda poll: poll.commits.request(copy, epochs))

    @property
    def keeps_offsets_elsewhere(self) -> bool:
        return self._policy.stored_offsets is not None

    def trouble(self, partition: TopicPartition) -> str:
        return str(self._problems.of(partition))

    def require_rights(self, topics: Iterable[str]) -> None:
        """Raise KafkaUnauthorized if Kafka refuses the group or one of these topics."""
        if refusal := self._problems.refusal(set(topics)):
            raise refusal.with_traceback(None)  # it is raised many times, and would collect the frames

    @property
    def stalled(self) -> Mapping[TopicPartition, HeadraceError]:
        """Assigned partitions that wait for a seek, and why."""
        errors = self._problems.stalled.values()
        return {TopicPartition(one.parameters["topic"], one.parameters["partition"]): one for one in errors}

    def pause_reason(self, partition: TopicPartition) -> str:
        return self._flow.pause_reason(partition, self._clock.monotonic())

    async def seek(self, partition: TopicPartition, epoch: int, to: Committed) -> bool:
        return await self._answered(lambda poll, response: poll.seek(partition, epoch, to, response))

    async def _answered(self, command: Callable[[PollThread, Callable[[T | HeadraceError], None]], None]) -> T:
        """Run a command on the thread and return its response, or raise it if it is an error."""
        poll, thread = self._poll, self._thread
        assert poll
        assert thread
        response: asyncio.Future[T | HeadraceError] = asyncio.get_running_loop().create_future()
        done = functools.partial(poll.loop.post, response.set_result)

        def run() -> None:
            poll.attentive_until = self._clock.monotonic() + ATTENTIVE_SECONDS
            command(poll, done)

        self._commands.append(run)
        self._commands.wake()
        await run_while(asyncio.wait([response]), thread.wait_ended())
        if not response.done():
            raise KafkaUnavailable(f"{self.name} has ended before it could do this: {self.death or 'it was stopped'}")
        result = response.result()
        if isinstance(result, HeadraceError):
            raise result
        return result

    async def move(self, offsets: Offsets) -> Sequence[TopicPartition]:
        """Read partitions from other offsets on, without a commit, unless some are not assigned: return those."""
        return await self._answered(lambda poll, response: poll.move(offsets, response))

    async def committed(self, partitions: Sequence[TopicPartition]) -> CommitOffsets:
        """Return the committed offsets of the group; partitions without one are left out."""
        try:
            return await self._answered(lambda poll, response: poll.committed(partitions, response))
        except KafkaTimeout:
            await self._admin.group_members(self._group, "Read")  # the client does not say that the group is refused
            raise

    async def commit_now(self, offsets: CommitOffsets) -> Sequence[TopicPartition]:
        """Commit, wait for the acknowledgement, and return the partitions that were revoked before it."""
        epochs = {partition: self._epochs.get(partition, 0) for partition in offsets}
        return await self._answered(lambda poll, response: poll.commits.request_answered(offsets, epochs, response))

    async def for_transaction(self, offsets: CommitOffsets) -> GroupOffsets | None:
        """Return offsets for a transaction of this member; None if a partition is not assigned any more."""
        epochs = {partition: self._epochs.get(partition, 0) for partition in offsets}
        metadata: Any = await self._answered(lambda poll, response: poll.group_metadata(epochs, response))
        return GroupOffsets(offsets, lambda: metadata, self._admin.config, self._group) if metadata else None

    def group_offsets(self, offsets: CommitOffsets) -> GroupOffsets:
        """Return offsets of the present assignments for a transaction, which reads the generation when it sends them.

        They must not be committed in another way.
        """
        poll, epochs = self._poll, {partition: self._epochs.get(partition, 0) for partition in offsets}
        assert poll
        return GroupOffsets(offsets, lambda: metadata_in(poll.member, epochs), self._admin.config, self._group)

    def is_committing(self, partition: TopicPartition) -> bool:
        """Return whether a commit of a partition, as of the offset it starts at, waits or is in flight."""
        return self._poll is not None and self._poll.commits.is_open(partition)

    def rewind(self, epochs: Epochs) -> None:
        """Deliver again what the group has not committed of these assignments."""
        self._command(lambda poll: poll.rewind(epochs), wakes=True)

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly these partitions from now on, without membership in the group."""
        self._command(lambda poll: poll.assign(partitions), wakes=True)

    def subscribe(self, topics: Sequence[str]) -> None:
        """Read these topics from now on; partitions of topics that stay are not revoked."""
        names = [check_topic(topic) for topic in topics]
        self._command(lambda poll: poll.subscribe(names))

    def topics_found(self, topics: Iterable[str]) -> None:
        """Forget that Kafka has refused topics: they may be read now, also if another member has them."""
        for topic in topics:
            self._commands.append(functools.partial(self._problems.report, f"topic {topic}", ""))

    def topic_recreated(self, topic: str, after: float) -> None:
        """Read a topic from its start: it was deleted and created again under the same name.

        Assignments from `after` on (seconds since the epoch) began when the old topic was gone already.
        """
        log.error("%s: %s was deleted and created again; its offsets start again", self.name, topic)
        self.on_problem(
            TopicRecreated(f"topic {topic} was deleted and created again; it is read from its start", topic=topic)
        )
        # KIP-848 knows topics by id and assigns the new one, but a late commit of the old one's offset may lie on it.
        self._command(lambda poll: poll.restart_topic(topic, after))

    def _command(self, call: Callable[[PollThread], None], *, wakes: bool = False) -> None:
        """Have the thread call something in its next turn, and begin that now if it `wakes`."""

        def run() -> None:
            assert self._poll
            call(self._poll)

        self._commands.append(run)
        if wakes:
            self._commands.wake()

    def _ask_store(self, loop: LoopProxy, epochs: Epochs) -> None:
        """Ask for stored offsets; called on the thread."""
        for partition, epoch in epochs.items():
            loop.post(self.keep, functools.partial(self._ask, partition, epoch), f"stored offset of {partition}")

    async def _ask(self, partition: TopicPartition, epoch: int) -> None:
        ask, poll, store = self._policy.stored_offsets, self._poll, self._store
        assert ask
        assert poll
        limit = store.limits.get(partition, _FIRST_STORE_SECONDS)
        try:
            async with store.repeated if partition in store.limits else store.first:
                offset = await asyncio.wait_for(ask(self._group, partition, epoch), limit)
        except (HeadraceError, TimeoutError) as cause:
            if isinstance(cause, TimeoutError):
                store.limits[partition] = min(2 * limit, _STORE_SECONDS)
            why = str(cause) or f"no response within {limit:g} s"
            self._commands.append(lambda: poll.resolver.failed(partition, epoch, why))
        else:
            store.limits.pop(partition, None)
            self._commands.append(lambda: poll.resolver.answered(partition, epoch, offset))

    def _commit_reported(self, error: Any, offsets: Sequence[Any]) -> None:
        """Take the report of a commit, on the thread."""
        if error is None:
            self._admin.reachability.answered()
        if self._poll:
            self._poll.commits.reported(error, offsets)


def hanging_consumers() -> list[str]:
    """Return the names of the consumers of this process whose threads hang."""
    return [consumer.name for consumer in [*_running] if consumer.hangs]


class _StoreQuestions:
    """Limits of the questions to a backend that keeps the group's offsets."""

    def __init__(self) -> None:
        self.limits: dict[TopicPartition, float] = {}
        """How long partitions without a response may take at their next question."""
        self.first = asyncio.Semaphore(_STORE_QUESTIONS)
        self.repeated = asyncio.Semaphore(_STORE_QUESTIONS)
        """Partitions that did not answer wait for each other only."""


class Subscription(Service):
    """Looks at the cluster's topics every few seconds, for one consumer.

    A deleted topic is dropped when it is missing twice in a row: a broker that has just started may know no topics
    yet.
    """

    def __init__(
        self,
        name: str,
        consumer: Consumer,
        admin: Admin,
        clock: Clock,
        *,
        topics: Sequence[str],
        fits: Callable[[str], bool] | None,
    ) -> None:
        """Prepare; `topics` are always read, others if they fit. `fits` is not called for Kafka's own topics."""
        super().__init__(name)
        self._consumer = consumer
        self._admin = admin
        self._clock = clock
        self._topics = topics
        self._fits = fits
        self.subscribed: Collection[str] = topics
        """Topics that the consumer reads."""
        self.missing: Sequence[str] = ()
        """Topics of these that do not exist, as of two looks."""
        self._last_found: set[str] = set()
        self._last_missing: set[str] = set()
        self._ids: dict[str, str] = {}
        self._missing_since: dict[str, float] = {}
        self._problem = "" if fits is None else "the cluster's topics are not known yet"

    def readiness(self) -> Readiness:
        return Readiness(not self._problem, self._problem)

    async def run(self) -> None:
        while True:
            try:
                await self._look()
            except HeadraceError as error:
                log.debug("%s: %s", self.name, error.description)
            else:
                self._problem = ""
            await self._clock.sleep(_LOOK_SECONDS)

    async def _look(self) -> None:
        if self._fits is not None:
            found = {topic.name for topic in await self._admin.list_topics() if self._fits(topic.name)}
            topics = [*self._topics, *sorted((found | self._last_found) - set(self._topics))]
            self._last_found = found
            if topics != self.subscribed:
                log.info("%s: reads %s", self.name, ", ".join(topics) or "nothing: no topic fits")
                self._consumer.subscribe(topics)
                self.subscribed = topics
        now = self._clock.time()
        ids = await self._admin.topic_ids(self.subscribed)
        self._consumer.topics_found(ids)
        missing = {topic for topic in self.subscribed if topic not in ids}
        before, self.missing, self._last_missing = self.missing, sorted(missing & self._last_missing), missing
        if self.missing and self.missing != before:
            log.warning("%s: these topics do not exist: %s", self.name, names_of(self.missing))
        for topic, topic_id in ids.items():
            if self._ids.get(topic, topic_id) != topic_id:
                self._consumer.topic_recreated(topic, self._missing_since.get(topic, now))
            self._ids[topic] = topic_id
        self._missing_since = {t: self._missing_since.get(t, now) for t in self._ids if t not in ids}
