"""One group member on one owned thread: polls, pauses, commits, and tells the loop what it got.

The thread never waits for a backend or a handler. When too much is held that has not ended, it pauses partitions and
goes on polling, so the membership never depends on anybody's speed. The loop speaks to the thread by commands; the
thread speaks to the loop through a bridge, in batches. Only on revoke does the thread wait for the loop, with a limit.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import confluent_kafka

from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError
from headrace.kafka.assignment import Assignment
from headrace.kafka.commits import Commits, commit_now
from headrace.kafka.flow import Flow
from headrace.kafka.intake import Intake
from headrace.kafka.listener import Listener
from headrace.kafka.loop_side import LoopSide
from headrace.kafka.names import check_group, check_topic
from headrace.kafka.placement import Placement
from headrace.kafka.positions import Gap, ReadPolicy, Start
from headrace.kafka.problems import Problems
from headrace.kafka.properties import member_properties
from headrace.kafka.reachability import Reachability
from headrace.lifecycle import Clock, Deadline, OwnedThread, Readiness, Service
from headrace.lifecycle.failpoints import reach
from headrace.records import Committed, TopicPartition

log = logging.getLogger(__name__)

_BATCH_RECORDS = 500
_IDLE_SECONDS = 0.1
_BUSY_SECONDS = 0.01
_PATIENCE_SECONDS = 0.1
_ROOM = 0.1
"""Part of what may be held that must have ended before the thread is woken to poll: less would make tiny polls."""
_FIRST_STORE_SECONDS, _STORE_SECONDS, _STORE_QUESTIONS = 2.0, 30.0, 32
"""How long the first answer for one partition may take, how long a later one, and how many are asked for at a time."""
_DRAIN_SECONDS = 20.0
_THREAD_STOP_SECONDS = 30.0
_DEFAULT_POLICY = ReadPolicy()


class Consumer(Service):
    """A member of a consumer group, and the source of a delivery pump.

    Commits only what it is told to. Takes up at the committed offset; where there is none, at the start or the end
    of the partition as the policy says. An offset that is out of range never resets by itself (decisions.md 11): what
    is missing is said, and the partition stands still or goes on at the start of the log, as the policy says.
    """

    reachability: Reachability | None = None
    """Gets the errors and the acknowledged commits of this client. Set before start."""

    def __init__(
        self,
        kafka: KafkaConfig,
        *,
        name: str,
        group: str,
        topics: Sequence[str],
        listener: Listener,
        flow: FlowControl,
        clock: Clock,
        policy: ReadPolicy = _DEFAULT_POLICY,
    ) -> None:
        """Prepare; no one is contacted.

        Raises:
            ConfigError: Settings of the member and of every client contradict each other.
        """
        super().__init__(name)
        self._group = check_group(group)
        self._properties = member_properties(kafka, f"headrace-{self.name}", group, policy.member)
        self._topics: list[str] | None = None
        self._listener = listener
        self._flow = Flow(flow)
        self._policy = policy
        self._epoch_of: dict[TopicPartition, int] = {}
        self._room = threading.Event()
        self._freed = 0.0  # part of the room that was given back since the thread was woken last
        self._commands: deque[Callable[[], None]] = deque()
        self._problems = Problems(group)
        self._say = self._problems.say
        # The thread's own, as is what follows.
        self._placement = Placement(policy, clock, self._say, self._ask_store if policy.stored_offsets else None)
        self._commits = Commits(name, clock, self._epoch_of, self._placement.acknowledged)
        self._seeks: dict[TopicPartition, Callable[[bool], None]] = {}
        self._seen_epochs: dict[TopicPartition, int] = {}  # the loop's view of `_epoch_of`, which is behind
        self._store_questions = asyncio.Semaphore(_STORE_QUESTIONS)
        self._repeated_questions = asyncio.Semaphore(_STORE_QUESTIONS)
        self._silent: dict[TopicPartition, float] = {}  # the time that each has when it is asked for again
        self._loop = LoopSide(self)
        self._intake = Intake(
            group, listener, self._loop, self._flow, self._placement, self._epoch_of, clock, self._say
        )
        self._thread: OwnedThread | None = None
        self._client: Any = None
        self._assignment: Any = None
        self._clock = clock
        self._leave_by: Deadline | None = None
        if topics:
            self.subscribe(topics)

    # On the loop -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop.open()
        self._client = confluent_kafka.Consumer(
            {**self._properties, "on_commit": self._commit_reported, "error_cb": self._on_error}
        )
        self._assignment = Assignment(self._client, whole=self._policy.member.stops_everything)
        self._thread = OwnedThread(self.name, self._main, self.die)
        self._thread.start()

    async def drain(self, deadline: Deadline) -> None:
        """Leave the group: what is in flight ends and is committed first, as on a revoke."""
        self._leave_by = deadline
        if self._thread:
            await self._thread.stop(deadline.remaining_seconds)

    async def stop(self) -> None:
        self._leave_by = Deadline(self._clock, 0)
        await super().stop()  # a revoke that still waits for its drain ends here, with nothing to commit
        if self._thread and not await self._thread.stop(_THREAD_STOP_SECONDS):
            log.warning("consumer %s did not close in time and is abandoned", self.name)

    def readiness(self) -> Readiness:
        reasons = self._problems.all()
        return Readiness(False, "; ".join(reasons)) if reasons else Readiness(True)

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        now, epoch = self._clock.monotonic(), self._seen_epochs.get(partition)

        def released() -> None:
            if epoch == self._epoch_of.get(partition):  # else it was of an assignment whose room is free already
                self._flow.released(partition, records, size_bytes, now)

        self._commands.append(released)
        self._freed += self._flow.part_of(records, size_bytes)
        if self._freed >= _ROOM:
            self._freed = 0.0
            self._room.set()

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        epochs = {partition: self._seen_epochs.get(partition, 0) for partition in offsets}
        self._commands.append(functools.partial(self._commits.want, dict(offsets), epochs))

    @property
    def keeps_offsets_elsewhere(self) -> bool:
        return self._policy.stored_offsets is not None

    def trouble(self, partition: TopicPartition) -> str:
        return self._problems.of(partition)

    def pause(self, partition: TopicPartition) -> str:
        if not self._flow.is_paused(partition):
            return ""
        return "nothing more is fetched until some of what is held has ended, as the bounds of flow are reached"

    async def seek(self, partition: TopicPartition, epoch: int, offset: int) -> bool:
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def answered(done: bool) -> None:
            self._loop.post(answer.set_result, done)

        self._commands.append(lambda: self._seek(partition, epoch, offset, answered))
        return await asyncio.shield(answer)  # the thread answers in any case

    def subscribe(self, topics: Sequence[str]) -> None:
        """Read these topics from now on; partitions of topics that stay are not taken away."""
        names = [check_topic(topic) for topic in topics]
        self._commands.append(lambda: self._subscribe(names))

    def created_anew(self, topic: str, after: float) -> None:
        """Take note that a topic was deleted and created under the same name: its offsets begin anew.

        Assignments from `after` on (seconds since the epoch) began when it was gone already, so they know.
        """
        log.error("%s: %s was deleted and created anew; its offsets begin anew", self.name, topic)
        # KIP-848 knows topics by id and assigns the new one, but a late commit of the old one's offset may lie on it.
        self._commands.append(lambda: self._begin_anew(topic, after))

    # On the thread ---------------------------------------------------------------------------------------------------

    def _main(self, stop_asked: threading.Event) -> None:
        client = self._client
        try:
            while not stop_asked.is_set():
                self._obey()
                self._place()
                self._steer()
                if self._flow.must_wait:
                    self._wait_for_room()
                    continue
                # consume() alone waits until the batch is full; poll() returns with the first record.
                first = client.poll(_BUSY_SECONDS if self._flow.records else _IDLE_SECONDS)
                if first is not None:
                    reach("poll.after")
                    more = client.consume(min(_BATCH_RECORDS - 1, self._flow.half_room_records), 0)
                    self._intake.take(client, [first, *more])
            # Before the client closes: a closing client learns of no new generation, and Kafka refuses its commits.
            self._give_up(list(self._epoch_of))
        finally:
            client.close()  # runs _on_revoke for what is assigned

    def _obey(self) -> None:
        commands = self._commands
        for _ in range(len(commands)):  # one that is added meanwhile has its turn after the next poll
            commands.popleft()()
        self._commits.send_due(self._client)

    def _subscribe(self, topics: list[str]) -> None:
        if topics == self._topics:
            return
        self._topics = self._placement.subscribed = topics
        if topics:
            self._client.subscribe(topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)
        else:
            self._client.unsubscribe()
            self._say("", f"group {self._group}: no topic fits its patterns yet")

    def _wait_for_room(self) -> None:
        """Wait a moment for something to end; not to poll for so long is no danger, and cheaper than to pause."""
        self._room.wait(_PATIENCE_SECONDS)
        self._room.clear()

    def _steer(self) -> None:
        pause, resume = self._flow.changes(self._clock.monotonic())
        if pause:
            self._client.pause(_plain(pause))
        if resume:
            self._client.resume(_plain(resume))

    def _on_assign(self, client: Any, assigned: list[Any]) -> None:
        reach("assign.before")
        if self._leave_by:  # the client closes, and revokes them at once
            self._assignment.add(assigned)
            return
        partitions = [TopicPartition(p.topic, p.partition) for p in assigned]
        self._forget(partitions)
        starts = self._placement.starts(client, partitions)
        for item, partition in zip(assigned, partitions, strict=True):
            item.offset = starts[partition].offset if partition in starts else confluent_kafka.OFFSET_END
        self._assignment.add(assigned)
        # The client may remember a pause from an earlier assignment, and flow control starts from nothing paused.
        client.resume(assigned)
        if unknown := [partition for partition in partitions if partition not in starts]:
            client.pause(_plain(unknown))
        self._say("", "")
        self._take_up(starts)
        log.info("%s: assigned %s", self.name, _names(partitions))
        reach("assign.after")

    def _take_up(self, starts: Mapping[TopicPartition, Start]) -> None:
        """Tell the loop that partitions are ours and records will come."""
        epochs = {partition: start.epoch for partition, start in starts.items()}
        self._epoch_of.update(epochs)
        self._flow.assigned(epochs)
        committed = {partition: start.committed for partition, start in starts.items() if start.committed}
        self._commits.want({p: committed[p] for p, start in starts.items() if start.is_new}, epochs)
        self._placement.read_to({partition: start.offset for partition, start in starts.items()})

        def assigned() -> None:  # one call: a commit of the epoch before must not come between as one of the new epoch
            self._seen_epochs.update(epochs)
            self._listener.on_assigned(epochs, committed)

        self._loop.post(assigned)

    def _place(self) -> None:
        """Go on where that was not known before."""
        for partition, found in self._placement.found(self._client):
            if isinstance(found, Gap):
                self._pass(partition, found)
            elif isinstance(found, Start):
                self._begin_at(partition, found)
            else:
                self._go_on_at(partition, found)

    def _begin_at(self, partition: TopicPartition, start: Start) -> None:
        sought = self._seeks.pop(partition, None)
        if sought:
            reach("seek.committed")
        self._go_on_at(partition, start.offset)
        self._take_up({partition: start})
        if sought:
            reach("seek.after")
            sought(True)

    def _seek(self, partition: TopicPartition, epoch: int, offset: int, answer: Callable[[bool], None]) -> None:
        """Let go of a partition, and commit where it is to begin again; `_place` goes on with it."""
        if self._epoch_of.get(partition) != epoch:
            answer(False)
            return
        self._forget([partition])
        start = Start(offset, Committed(offset), epoch=self._placement.new_epoch())
        self._seeks[partition] = answer
        self._epoch_of[partition] = start.epoch
        self._placement.wait_for_commit(partition, start)
        self._client.pause(_plain([partition]))
        self._commits.want({partition: Committed(offset)}, {partition: start.epoch})

    def _pass(self, partition: TopicPartition, gap: Gap) -> None:
        """Do what the policy says about offsets that are missing."""
        if self._policy.on_gap == "stop":
            self._say(
                str(partition),
                f"{partition}: {gap}; it stands still: have group {self._group} go on at an offset that is there "
                "(headrace reactive seek), or set on_gap: continue",
            )
        else:
            log.warning("%s, %s: %s; going on at %d, as on_gap says", self._group, partition, gap, gap.start)
            self._loop.post(self._listener.on_gap, partition, gap.end - gap.first)
            if gap.is_cut_off:  # positions that come now were there before, so it is another assignment
                self._begin_again(partition, gap.start, gap.start)
            else:
                self._go_on_at(partition, gap.start)

    def _begin_anew(self, topic: str, after: float) -> None:
        """Take a topic that was created anew from its start, also if its offsets have passed our positions already."""
        for partition in [p for p, epoch in self._epoch_of.items() if p.topic == topic and epoch < after * 1000]:
            log.warning("%s, %s: going on at the start of the new topic", self._group, partition)
            self._begin_again(partition, confluent_kafka.OFFSET_BEGINNING, 0)

    def _begin_again(self, partition: TopicPartition, start: int, committed: int) -> None:
        """Begin another assignment of a partition that is ours, without a rebalance."""
        self._forget([partition])
        self._loop.post(self._listener.on_lost, [partition])
        epoch = self._placement.new_epoch()
        self._take_up({partition: Start(start, Committed(committed), is_new=True, epoch=epoch)})
        self._go_on_at(partition, start)  # last: before, flow control still knows of the pause of what is forgotten

    def _go_on_at(self, partition: TopicPartition, offset: int) -> None:
        for place in self._assignment.go_on_at(partition, offset):
            waits = self._flow.is_paused(place) or self._placement.is_open(place)
            (self._client.pause if waits else self._client.resume)(_plain([place]))

    def _on_revoke(self, client: Any, revoked: list[Any]) -> None:
        partitions = [TopicPartition(p.topic, p.partition) for p in revoked]
        reach("revoke.before")
        self._give_up(partitions)
        self._assignment.remove(revoked)
        log.info("%s: revoked %s", self.name, _names(partitions))

    def _give_up(self, partitions: Sequence[TopicPartition]) -> None:
        """Drain partitions and commit what has ended in them."""
        begun = [partition for partition in partitions if partition in self._epoch_of]
        offsets = self._drained(begun) if begun else {}
        reach("revoke.drained")
        self._forget(partitions)
        if offsets and (failure := commit_now(self._client, offsets)):
            log.warning("%s: commit on revoke failed, records will come again: %s", self.name, failure)
        reach("revoke.committed")

    def _on_lost(self, client: Any, lost: list[Any]) -> None:
        reach("lost.before")
        partitions = [TopicPartition(p.topic, p.partition) for p in lost]
        self._forget(partitions)
        self._loop.post(self._listener.on_lost, partitions)
        self._assignment.remove(lost)
        self._say("", f"group {self._group}: partitions were lost, joining again")
        log.warning("%s: lost %s", self.name, _names(partitions))
        reach("lost.after")

    def _forget(self, partitions: Sequence[TopicPartition]) -> None:
        self._flow.revoked(partitions)
        self._commits.forget(partitions)
        self._placement.forget(partitions)
        for partition in partitions:
            self._epoch_of.pop(partition, None)
            if sought := self._seeks.pop(partition, None):
                sought(False)

    def _drained(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, Committed]:
        """Wait until the loop has drained these partitions; its answer is what may be committed."""
        seconds = min(_DRAIN_SECONDS, self._leave_by.remaining_seconds if self._leave_by else _DRAIN_SECONDS)
        deadline = Deadline(self._clock, seconds)  # from now on: the loop may be late

        async def drain() -> Mapping[TopicPartition, Committed]:
            return await self._listener.on_revoked(partitions, deadline)

        answer = self._loop.wait_for(drain, "revoke", seconds + 1)
        if answer is None and self.death is None:
            log.error("%s: the loop did not drain %s in time", self.name, _names(partitions))
        return answer or {}

    def _ask_store(self, epochs: Mapping[TopicPartition, int]) -> None:
        ask = self._policy.stored_offsets
        assert ask is not None

        async def one(partition: TopicPartition, epoch: int) -> None:
            limit = self._silent.get(partition, _FIRST_STORE_SECONDS)
            # Partitions that were silent wait behind each other only.
            questions = self._repeated_questions if partition in self._silent else self._store_questions
            try:
                async with questions:
                    offset = await asyncio.wait_for(ask(self._group, partition, epoch), limit)
            except (HeadraceError, TimeoutError) as cause:
                if isinstance(cause, TimeoutError):
                    self._silent[partition] = min(2 * limit, _STORE_SECONDS)
                why = str(cause) or f"no answer within {limit:g} s"
                self._commands.append(lambda: self._placement.failed(partition, epoch, why))
            else:
                self._silent.pop(partition, None)
                self._commands.append(lambda: self._placement.answered(partition, epoch, offset))

        for partition, epoch in epochs.items():
            self._loop.run(functools.partial(one, partition, epoch), "stored offset")

    def _commit_reported(self, error: Any, offsets: Sequence[Any]) -> None:
        if self.reachability and error is None:
            self.reachability.answered()
        self._commits.reported(error, offsets)

    def _on_error(self, error: Any) -> None:
        if self.reachability:
            self.reachability.failed(error)


def _plain(partitions: Sequence[TopicPartition]) -> list[Any]:
    return [confluent_kafka.TopicPartition(p.topic, p.partition) for p in partitions]


def _names(partitions: Sequence[TopicPartition] | Mapping[TopicPartition, int]) -> str:
    return ", ".join(str(partition) for partition in partitions) or "nothing"
