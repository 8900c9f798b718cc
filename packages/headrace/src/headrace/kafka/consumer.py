"""A consumer of a group, as the loop sees it, and the subscription that follows its topic patterns.

The client belongs to a separate thread (`poll_thread.py`). The loop calls the thread by commands; the thread calls the
loop through a proxy, in batches.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

from headrace.config.consumers import FlowControl
from headrace.errors import HeadraceError, KafkaTimeout, KafkaUnavailable, TopicRecreated
from headrace.kafka.admin import Admin
from headrace.kafka.assigned_partitions import AssignedPartitions
from headrace.kafka.client import library
from headrace.kafka.client.credentials import ClientSecurity
from headrace.kafka.client.properties import member_properties
from headrace.kafka.cluster_admin import rebalance_of
from headrace.kafka.commits import Commits
from headrace.kafka.fetch_flow import MOST_WAITING_RECORDS, FetchFlowControl
from headrace.kafka.fetch_queue import FetchQueue
from headrace.kafka.loop_proxy import CommandQueue, ConsumerProblems, Listener, LoopProxy
from headrace.kafka.names import check_group, check_topic, names_of
from headrace.kafka.poll_thread import PollThread
from headrace.kafka.positions import PositionResolver, ReadPolicy, StoredOffsets
from headrace.kafka.transactions.transaction_job import GroupOffsets, metadata_in
from headrace.records import CommitOffsets, Committed, Epochs, Offsets, TopicPartition
from headrace.runtime import Clock, Deadline, OwnedThread, Readiness, Service, run_while

log = logging.getLogger(__name__)

T = TypeVar("T")

_WAKE_PART = 0.1
"""Part of the flow budget that must be released before the thread is woken to poll: less would make tiny polls."""
_ATTENTIVE_SECONDS = 0.2
"""A command with a response is often followed by another one. For this long, polls are short, so that it waits less."""
_FIRST_STORE_SECONDS = 2.0
"""Time limit of the first request for the stored offset of a partition."""
_STORE_SECONDS = 30.0
"""The longest time limit of a later one."""
_STORE_REQUESTS = 32
"""How many run at a time."""
_CLOSE_SECONDS = 5.0
"""How long a client that must stop now may take to close: longer only if the group's coordinator does not answer."""
_HANGS_SECONDS = 60.0
"""A turn of the thread takes milliseconds, or in a rebalance as long as the drain of its partitions."""
_LOOK_SECONDS = 5.0
_STALLED_SECONDS = 60.0
_DEFAULT_POLICY = ReadPolicy()
_consumers: WeakSet["Consumer"] = WeakSet()


class _Running(NamedTuple):
    """What a consumer has while it runs."""

    poll: PollThread
    thread: OwnedThread
    closed_by: Deadline | None = None
    """When the thread is abandoned; None until it must leave."""


class Consumer(Service):
    """A member of a consumer group, and the source of a delivery pump.

    Commits only the offsets that `commit` gets. Starts at the committed offset; without one, at the start or the end of
    the partition, by the policy. An offset that is out of range is never reset silently. The problem is reported, and
    the partition is stalled or resumes at the start of the log, by the policy.
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
        self._listener = listener
        self._flow = FetchFlowControl(flow, policy.max_processing_seconds)
        self._policy = policy
        self._clock = clock
        self._admin = admin
        self._properties()
        self._problems = ConsumerProblems(group, admin.config, clock)
        self._commands = CommandQueue()
        self._epochs: dict[TopicPartition, int] = {}
        """Assignment epochs, as far as the loop knows them: the thread may be ahead."""
        self._released_part = 0.0
        self._running: _Running | None = None
        """None before the start."""
        self.on_problem: Callable[[HeadraceError], None] = lambda error: None
        """Called when a partition stalls until a seek, and when a topic was created again."""
        if topics:
            self.subscribe(topics)

    async def start(self) -> None:
        loop = LoopProxy(self, self._listener, self._epochs)
        self._problems.on_stalled = lambda error: loop.post(self.on_problem, error)
        resolver = PositionResolver(self._policy, self._clock, self._problems)
        if self._policy.stored_offsets:
            in_task = functools.partial(loop.post, self.keep)
            store = _OffsetStore(self._policy.stored_offsets, self._group, resolver, self._commands, in_task)
            resolver.request_stored = store.request
        commits = Commits(self.name, self._clock, {}, self._problems, self._admin.reachability.answered)

        def make_client() -> Any:
            return library.Consumer({**self._properties(), "on_commit": commits.reported})

        security = ClientSecurity(self._admin.config.security, make_client)
        queue = FetchQueue(security.make(), self._admin.config)
        partitions = AssignedPartitions(
            self.name, queue, commits, loop=loop, flow=self._flow, resolver=resolver, problems=self._problems
        )
        poll = PollThread(partitions, security, self._commands, self._clock)
        thread = OwnedThread(self.name, poll.run, self.die)
        self._running = _Running(poll, thread)
        thread.start()
        _consumers.add(self)
        self.keep(self._watch_group, "group")

    def _properties(self) -> dict[str, Any]:
        return {
            **member_properties(self._admin.config, f"headrace-{self.name}", self._group, self._policy.member),
            "queued.min.messages": MOST_WAITING_RECORDS,
            "queued.max.messages.kbytes": self._flow.fetch_ahead_kbytes,
            "error_cb": self._admin.reachability.failed,
        }

    def begin_drain(self, deadline: Deadline) -> None:
        """Have the thread leave the group: what is in flight is completed and committed first, as on a revoke."""
        if running := self._running:
            running.poll.partitions.leave_by = deadline
            running.thread.stop_requested.set()
            if running.closed_by is None:  # the first time counts: many consumers are stopped one after the other
                closed_by = Deadline(self._clock, deadline.remaining_seconds + _CLOSE_SECONDS)
                self._running = running._replace(closed_by=closed_by)

    async def drain(self, deadline: Deadline) -> None:
        self.begin_drain(deadline)
        if running := self._running:
            await running.thread.stop(deadline.remaining_seconds)

    async def stop(self) -> None:
        self.begin_drain(Deadline(self._clock, 0))
        await super().stop()  # a revoke that still waits for its drain ends here, with nothing to commit
        running = self._running
        limit = running.closed_by.remaining_seconds if running and running.closed_by else 0
        if running and not await running.thread.stop(limit):
            log.warning("consumer %s did not close in time and is abandoned", self.name)

    @property
    def hangs(self) -> bool:
        """Whether its thread does not return from Kafka's client, which only a restart of the process cures."""
        running = self._running
        if self.death or running is None or running.poll.partitions.leave_by:
            return False
        return self._clock.monotonic() - running.poll.turned_at > _HANGS_SECONDS + self._policy.drain_seconds

    def readiness(self) -> Readiness:
        reasons = self._problems.all()
        return Readiness(False, "; ".join(reasons)) if reasons else Readiness(True)

    async def _watch_group(self) -> None:
        """Say since when the group rebalances and who its members are, if this one has long had no partitions."""
        while True:
            await self._clock.sleep(_STALLED_SECONDS / 3)
            since, now = self._problems.joining_since, self._clock.monotonic()
            found = ""
            if since is not None and now - since >= _STALLED_SECONDS:
                found = await rebalance_of(self._admin, self._group, self._clock.time() - (now - since))
                if not found:
                    self._problems.joining_since = now  # the group waits for no member; look again in a minute
            self._problems.report("rebalance", found)

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        now = self._clock.monotonic()
        epoch = self._epochs.get(partition)
        self._commands.append(functools.partial(self._flow.released, partition, epoch, records, size_bytes, now))
        self._released_part += self._flow.part_of(records, size_bytes)
        if self._released_part >= _WAKE_PART:
            self._released_part = 0.0
            self._commands.wake()

    def commit(self, offsets: CommitOffsets) -> None:
        assert self._running
        epochs = {partition: self._epochs.get(partition, 0) for partition in offsets}
        commits = self._running.poll.partitions.commits
        self._commands.append(functools.partial(commits.request, dict(offsets), epochs))

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
        return await self._answered(lambda poll, response: poll.partitions.seek(partition, epoch, to, response))

    async def _answered(self, command: Callable[[PollThread, Callable[[T | HeadraceError], None]], None]) -> T:
        """Run a command on the thread and return its response, or raise it if it is an error."""
        assert self._running
        poll, thread = self._running.poll, self._running.thread
        response: asyncio.Future[T | HeadraceError] = asyncio.get_running_loop().create_future()
        done = functools.partial(poll.loop.post, response.set_result)

        def run() -> None:
            self._commands.attentive_until = self._clock.monotonic() + _ATTENTIVE_SECONDS
            command(poll, done)

        self._commands.append(run)
        self._commands.wake()
        await run_while(asyncio.wait([response]), thread.wait_ended())
        if not response.done():
            raise KafkaUnavailable(f"{self.name} ended before it could do this: {self.death or 'it was stopped'}")
        result = response.result()
        if isinstance(result, HeadraceError):
            raise result
        return result

    async def move(self, offsets: Offsets) -> Sequence[TopicPartition]:
        """Continue at other offsets, without a commit. If partitions are not assigned, move none and return those."""
        return await self._answered(lambda poll, response: poll.partitions.move(offsets, response))

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
        return await self._answered(
            lambda poll, response: poll.partitions.commits.request_answered(offsets, epochs, response)
        )

    async def for_transaction(self, offsets: CommitOffsets) -> GroupOffsets | None:
        """Return offsets for a transaction of this member; None if a partition is not assigned any more."""
        epochs = {partition: self._epochs.get(partition, 0) for partition in offsets}
        metadata: Any = await self._answered(lambda poll, response: poll.group_metadata(epochs, response))
        return GroupOffsets(offsets, lambda: metadata, self._admin.config, self._group) if metadata else None

    def group_offsets(self, offsets: CommitOffsets) -> GroupOffsets:
        """Return offsets of the current assignments for a transaction, which reads the generation when it sends them.

        They must not be committed in any other way.
        """
        assert self._running
        poll = self._running.poll
        epochs = {partition: self._epochs.get(partition, 0) for partition in offsets}
        return GroupOffsets(offsets, lambda: metadata_in(poll.member, epochs), self._admin.config, self._group)

    def is_committing(self, partition: TopicPartition) -> bool:
        """Return whether a commit of a partition, including that of its start, waits or is in flight."""
        return self._running is not None and self._running.poll.partitions.commits.is_open(partition)

    def rewind(self, epochs: Epochs) -> None:
        """Deliver again what the group has not committed of these assignments."""
        self._command(lambda poll: poll.partitions.rewind(epochs), wakes=True)

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        """Read exactly these partitions from now on, without membership in the group."""
        self._command(lambda poll: poll.partitions.assign(partitions), wakes=True)

    def subscribe(self, topics: Sequence[str]) -> None:
        """Read these topics from now on; partitions of topics that stay are not revoked."""
        names = [check_topic(topic) for topic in topics]
        self._command(lambda poll: poll.subscribe(names))

    def topics_found(self, topics: Iterable[str]) -> None:
        """Forget that Kafka has refused topics: they may be read now, perhaps by another member."""
        for topic in topics:
            self._commands.append(functools.partial(self._problems.report, f"topic {topic}", ""))

    def topic_recreated(self, topic: str, after: float) -> None:
        """Read a topic from its start: it was deleted and created again under the same name.

        Assignments from `after` on (seconds since the epoch) began when the old topic was already gone.
        """
        log.error("%s: %s was deleted and created again; its offsets start again", self.name, topic)
        self.on_problem(
            TopicRecreated(f"topic {topic} was deleted and created again; it is read from its start", topic=topic)
        )
        # KIP-848 knows topics by id and assigns the new one, but a late commit of the old one's offset may lie on it.
        self._command(lambda poll: poll.partitions.restart_topic(topic, after))

    def _command(self, call: Callable[[PollThread], None], *, wakes: bool = False) -> None:
        """Have the thread call something in its next turn, and begin that now if it `wakes`."""

        def run() -> None:
            assert self._running
            call(self._running.poll)

        self._commands.append(run)
        if wakes:
            self._commands.wake()


def hanging_consumers() -> list[str]:
    """Return the names of the consumers of this process whose threads hang."""
    return [consumer.name for consumer in [*_consumers] if consumer.hangs]


class _OffsetStore:
    """The backend that keeps the group's offsets: a bounded number of requests, with time limits that grow."""

    def __init__(
        self,
        stored_offsets: StoredOffsets,
        group: str,
        resolver: PositionResolver,
        commands: CommandQueue,
        in_task: Callable[[Callable[[], Awaitable[None]], str], None],
    ) -> None:
        """Prepare; `in_task` runs a coroutine function on the loop, as a task with a name."""
        self._stored_offsets = stored_offsets
        self._group = group
        self._resolver = resolver
        self._commands = commands
        self._in_task = in_task
        self._limits: dict[TopicPartition, float] = {}
        """Time limits of the next request, of partitions whose last request timed out."""
        self._first = asyncio.Semaphore(_STORE_REQUESTS)
        self._repeated = asyncio.Semaphore(_STORE_REQUESTS)
        """Partitions whose request timed out wait for each other only."""

    def request(self, epochs: Epochs) -> None:
        """Request stored offsets, on the thread; the resolver gets each response."""
        for partition, epoch in epochs.items():
            self._in_task(functools.partial(self._request, partition, epoch), f"stored offset of {partition}")

    async def _request(self, partition: TopicPartition, epoch: int) -> None:
        limit = self._limits.get(partition, _FIRST_STORE_SECONDS)
        try:
            async with self._repeated if partition in self._limits else self._first:
                offset = await asyncio.wait_for(self._stored_offsets(self._group, partition, epoch), limit)
        except (HeadraceError, TimeoutError) as cause:
            if isinstance(cause, TimeoutError):
                self._limits[partition] = min(2 * limit, _STORE_SECONDS)
            why = str(cause) or f"no response within {limit:g} s"
            self._commands.append(lambda: self._resolver.failed(partition, epoch, why))
        else:
            self._limits.pop(partition, None)
            self._commands.append(lambda: self._resolver.answered(partition, epoch, offset))


class Subscription(Service):
    """Lists the cluster's topics every few seconds, for one consumer.

    A deleted topic is dropped when it is missing twice in a row: a broker that has just started may not know it yet.
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
        """Prepare; `topics` are always read, others if they match. `fits` is not called for Kafka's own topics."""
        super().__init__(name)
        self._consumer = consumer
        self._admin = admin
        self._clock = clock
        self._topics = topics
        self._fits = fits
        self.subscribed: Collection[str] = topics
        """Topics that the consumer reads."""
        self.missing: Sequence[str] = ()
        """Topics of these that were missing twice in a row."""
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
                log.info("%s: reading %s", self.name, ", ".join(topics) or "nothing: no topic matches its patterns")
                self._consumer.subscribe(topics)
                self.subscribed = topics
        now = self._clock.time()
        ids = await self._admin.topic_ids(self.subscribed)
        self._consumer.topics_found(ids)
        missing = {topic for topic in self.subscribed if topic not in ids}
        before = self.missing
        self.missing = sorted(missing & self._last_missing)
        self._last_missing = missing
        if self.missing and self.missing != before:
            log.warning("%s: these topics do not exist: %s", self.name, names_of(self.missing))
        for topic, topic_id in ids.items():
            if self._ids.get(topic, topic_id) != topic_id:
                self._consumer.topic_recreated(topic, self._missing_since.get(topic, now))
            self._ids[topic] = topic_id
        self._missing_since = {t: self._missing_since.get(t, now) for t in self._ids if t not in ids}


class MissingPartitions(Service):
    """Looks every few seconds whether partitions exist that are read without membership: the client does not say."""

    def __init__(self, name: str, admin: Admin, clock: Clock, partitions: Sequence[TopicPartition]) -> None:
        """Prepare; no broker is contacted."""
        super().__init__(name)
        self._admin = admin
        self._clock = clock
        self._partitions = partitions
        self._problem = ""

    def readiness(self) -> Readiness:
        return Readiness(not self._problem, self._problem)

    async def run(self) -> None:
        while True:
            try:
                topics = {topic.name: len(topic.partitions) for topic in await self._admin.list_topics()}
                counts = ((at, topics[at.topic]) for at in self._partitions if at.topic in topics)
                missing = (
                    f"partition {at.partition} of {at.topic} does not exist: it has {count} partitions; add some, "
                    "or correct those that are read"
                    for at, count in counts
                    if at.partition >= count
                )
                self._problem = next(missing, "")
            except HeadraceError as error:
                log.debug("%s: %s", self.name, error.description)
            await self._clock.sleep(_LOOK_SECONDS)
