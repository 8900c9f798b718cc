"""One group member on one owned thread: polls, pauses, commits, and tells the loop what it got.

The thread never waits for a backend or a handler. When too much is held that has not ended, it pauses partitions and
goes on polling, so the membership never depends on anybody's speed. The loop speaks to the thread by commands; the
thread speaks to the loop through a bridge, in batches. Only on revoke does the thread wait for the loop, with a limit.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import confluent_kafka

from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.kafka.error_map import to_error
from headrace.kafka.flow import Flow
from headrace.kafka.listener import Listener
from headrace.kafka.names import check_group, check_topic
from headrace.kafka.positions import Gap, Start, StartPolicy, find_gap, find_starts, from_client, to_client
from headrace.kafka.properties import member_properties
from headrace.kafka.reader import to_record
from headrace.lifecycle import Clock, Deadline, LoopBridge, OwnedThread, Readiness, Service
from headrace.lifecycle.failpoints import reach
from headrace.records import Committed, Record, TopicPartition

log = logging.getLogger(__name__)

_BATCH_RECORDS = 500
_IDLE_SECONDS = 0.1
_BUSY_SECONDS = 0.01
_PATIENCE_SECONDS = 0.1
_COMMIT_AGAIN_SECONDS = 1.0
_PLACE_AGAIN_SECONDS = 1.0
_DRAIN_SECONDS = 20.0
_THREAD_STOP_SECONDS = 30.0
_END = confluent_kafka.KafkaError._PARTITION_EOF
_OUT_OF_RANGE = confluent_kafka.KafkaError._AUTO_OFFSET_RESET
_epochs = itertools.count(1)
_DEFAULT_POLICY = StartPolicy()


class Consumer(Service):
    """A member of a consumer group, and the source of a delivery pump.

    Commits only what it is told to. Takes up at the committed offset; where there is none, at the start or the end
    of the partition as the policy says. An offset that is out of range never resets by itself (decisions.md 11): what
    is missing is said, and the partition stands still or goes on at the start of the log, as the policy says.
    """

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
        policy: StartPolicy = _DEFAULT_POLICY,
    ) -> None:
        super().__init__(name)
        self._kafka = kafka
        self._group = check_group(group)
        self._topics = [check_topic(topic) for topic in topics]
        self._listener = listener
        self._flow = Flow(flow)
        self._policy = policy
        self._epoch_of: dict[TopicPartition, int] = {}
        self._room = threading.Event()
        self._commands: deque[Callable[[], None]] = deque()
        self._newest_commit: dict[TopicPartition, Committed] = {}  # the thread's own, as is what follows
        self._commit_under_way = False
        self._commit_again_at = 0.0
        self._unplaced: dict[TopicPartition, int | None] = {}
        """Assigned, but it is not known where to go on; the position that is out of range, if that is why."""
        self._place_again_at = 0.0
        self._problems: dict[str, str] = {"": f"group {group}: not joined yet"}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._bridge: LoopBridge[Callable[[], None]] | None = None
        self._thread: OwnedThread | None = None
        self._client: Any = None
        self._clock = clock
        self._leave_by: Deadline | None = None

    # On the loop -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._bridge = LoopBridge(self._loop, self._run_all)
        self._client = confluent_kafka.Consumer(
            {
                **member_properties(self._kafka, f"headrace-{self.name}", self._group),
                "on_commit": self._on_commit,
                "error_cb": self._on_error,
            }
        )
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
        reasons = [text for text in self._problems.values() if text]
        return Readiness(False, "; ".join(reasons)) if reasons else Readiness(True)

    def release(self, partition: TopicPartition, records: int, size_bytes: int) -> None:
        self._commands.append(lambda: self._flow.released(partition, records, size_bytes, self._clock.monotonic()))
        self._room.set()

    def commit(self, offsets: Mapping[TopicPartition, Committed]) -> None:
        self._commands.append(functools.partial(self._newest_commit.update, dict(offsets)))

    def _run_all(self, calls: list[Callable[[], None]]) -> None:
        for call in calls:
            # After a call that failed the listener has missed something, so nothing that follows may be believed.
            if self.death is not None:
                return
            try:
                call()
            except Exception as cause:  # noqa: BLE001 boundary: this consumer dies and is named, nothing is committed
                self.die(cause)

    # On the thread ---------------------------------------------------------------------------------------------------

    def _main(self, stop_asked: threading.Event) -> None:
        client = self._client
        client.subscribe(self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost)
        try:
            while not stop_asked.is_set():
                self._obey()
                if self._unplaced and self._clock.monotonic() >= self._place_again_at:
                    self._place()
                self._steer()
                if self._flow.must_wait:
                    self._wait_for_room()
                    continue
                # consume() alone waits until the batch is full; poll() returns with the first record.
                first = client.poll(_BUSY_SECONDS if self._flow.records else _IDLE_SECONDS)
                if first is not None:
                    reach("poll.after")
                    self._take([first, *client.consume(min(_BATCH_RECORDS, self._flow.half_room_records), 0)])
        finally:
            client.close()  # runs _on_revoke for what is assigned

    def _obey(self) -> None:
        commands = self._commands
        while commands:
            commands.popleft()()
        if self._newest_commit and not self._commit_under_way and self._clock.monotonic() >= self._commit_again_at:
            self._send_commit()

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

    def _take(self, taken: list[Any]) -> None:
        batches: dict[TopicPartition, list[Record]] = {}
        batch: list[Record] = []
        topic, partition = "", -1
        for item in taken:
            if item.error() is not None:
                self._flush(batches)
                self._on_event(item)
                partition = -1
                continue
            record = to_record(item)
            # Neighbours come from one partition mostly, so the look-up is rare.
            if record.partition != partition or record.topic != topic:
                topic, partition = record.topic, record.partition
                batch = batches.setdefault(TopicPartition(topic, partition), [])
            batch.append(record)
        self._flush(batches)

    def _flush(self, batches: dict[TopicPartition, list[Record]]) -> None:
        if batches:
            self._problems.pop("", None)
        for partition, records in batches.items():
            epoch = self._epoch_of.get(partition)
            if epoch is None:
                continue  # revoked inside this very poll
            size = sum([record.size_bytes for record in records])
            self._flow.taken(partition, len(records), size, self._clock.monotonic())
            reach("hand-over.before")
            self._post(self._listener.on_records, partition, epoch, records)
            reach("hand-over.after")
        batches.clear()

    def _on_event(self, item: Any) -> None:
        error, code = item.error(), item.error().code()
        partition = TopicPartition(item.topic() or "", item.partition() if item.partition() is not None else -1)
        if code == _END:
            if epoch := self._epoch_of.get(partition):
                self._post(self._listener.on_end, partition, epoch, item.offset())
        elif code == _OUT_OF_RANGE:
            self._unplaced[partition] = item.offset()
        elif code in _FENCED:
            raise to_error(error, f"group {self._group}")
        else:
            self._say("", f"group {self._group}: {error.str()}")

    def _on_assign(self, client: Any, assigned: list[Any]) -> None:
        reach("assign.before")
        partitions = [TopicPartition(p.topic, p.partition) for p in assigned]
        starts = self._look_up(partitions)
        for item, partition in zip(assigned, partitions, strict=True):
            item.offset = starts[partition].offset if partition in starts else confluent_kafka.OFFSET_END
        client.incremental_assign(assigned)
        # The client may remember a pause from an earlier assignment, and flow control starts from nothing paused.
        client.resume(assigned)
        if unknown := [partition for partition in partitions if partition not in starts]:
            client.pause(_plain(unknown))
            self._unplaced.update(dict.fromkeys(unknown))
        self._say("", "")
        self._take_up(starts)
        log.info("%s: assigned %s", self.name, _names(partitions))
        reach("assign.after")

    def _look_up(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Start]:
        """Return where to begin, or nothing as long as Kafka does not say: then it is asked again."""
        try:
            starts = find_starts(self._client, partitions, self._policy.reset) if partitions else {}
        except confluent_kafka.KafkaException as cause:
            for partition in partitions:
                self._say(str(partition), f"{partition}: committed offsets cannot be read: {cause.args[0].str()}")
            return {}
        for partition in partitions:
            self._say(str(partition), "")
        return starts

    def _take_up(self, starts: Mapping[TopicPartition, Start]) -> None:
        """Tell the loop that partitions are ours and records will come."""
        epochs = {partition: next(_epochs) for partition in starts}
        self._epoch_of.update(epochs)
        self._flow.assigned(epochs)
        committed = {partition: start.committed for partition, start in starts.items() if start.committed}
        self._newest_commit.update({p: committed[p] for p, start in starts.items() if start.is_new})
        self._post(self._listener.on_assigned, epochs, committed)

    def _place(self) -> None:
        """Find where to go on in partitions where that was not known."""
        self._place_again_at = self._clock.monotonic() + _PLACE_AGAIN_SECONDS
        starts = self._look_up([partition for partition, position in self._unplaced.items() if position is None])
        for partition, start in starts.items():
            del self._unplaced[partition]
            self._go_on_at(partition, start.offset)
        self._take_up(starts)
        for partition, position in list(self._unplaced.items()):
            if position is not None:
                try:
                    gap = find_gap(self._client, partition, position)
                except confluent_kafka.KafkaException as cause:
                    self._say(str(partition), f"{partition}: offset {position} is out of range: {cause.args[0].str()}")
                    continue
                del self._unplaced[partition]
                self._pass(partition, position, gap)

    def _pass(self, partition: TopicPartition, position: int, gap: Gap | None) -> None:
        """Do what the policy says about offsets that are missing."""
        self._say(str(partition), "")
        if gap is None:
            self._go_on_at(partition, position)
        elif self._policy.on_gap == "stop":
            self._say(
                str(partition),
                f"{partition}: {gap}; it stands still: commit another offset for group {self._group} while it is "
                "stopped, or set on_gap: continue, and start again",
            )
        else:
            log.warning("%s, %s: %s; going on at %d, as on_gap says", self._group, partition, gap, gap.start)
            self._post(self._listener.on_gap, partition, gap.end - gap.first)
            self._go_on_at(partition, gap.start)
            if gap.is_cut_off:  # positions that come now were there before, so it is another assignment
                self._forget([partition])
                self._post(self._listener.on_lost, [partition])
                self._take_up({partition: Start(gap.start, Committed(gap.start), is_new=True)})

    def _go_on_at(self, partition: TopicPartition, offset: int) -> None:
        # A seek is refused where the client has stopped fetching; to assign anew is not.
        place = [confluent_kafka.TopicPartition(*partition, offset)]
        self._client.incremental_unassign(place)
        self._client.incremental_assign(place)
        (self._client.pause if self._flow.is_paused(partition) else self._client.resume)(place)

    def _on_revoke(self, client: Any, revoked: list[Any]) -> None:
        partitions = [TopicPartition(p.topic, p.partition) for p in revoked]
        reach("revoke.before")
        offsets = self._ask_loop(partitions) if partitions else {}
        reach("revoke.drained")
        self._forget(partitions)
        if offsets:
            try:
                client.commit(offsets=to_client(offsets), asynchronous=False)
            except confluent_kafka.KafkaException as cause:
                log.warning("%s: commit on revoke failed, records will come again: %s", self.name, cause.args[0].str())
        reach("revoke.committed")
        client.incremental_unassign(revoked)
        log.info("%s: revoked %s", self.name, _names(partitions))

    def _on_lost(self, client: Any, lost: list[Any]) -> None:
        reach("lost.before")
        partitions = [TopicPartition(p.topic, p.partition) for p in lost]
        self._forget(partitions)
        self._post(self._listener.on_lost, partitions)
        client.incremental_unassign(lost)
        self._say("", f"group {self._group}: partitions were lost, joining again")
        log.warning("%s: lost %s", self.name, _names(partitions))
        reach("lost.after")

    def _forget(self, partitions: Sequence[TopicPartition]) -> None:
        self._flow.revoked(partitions)
        for partition in partitions:
            self._epoch_of.pop(partition, None)
            self._newest_commit.pop(partition, None)
            self._unplaced.pop(partition, None)
            self._say(str(partition), "")

    def _ask_loop(self, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, Committed]:
        """Wait until the loop has drained these partitions; its answer is what may be committed."""
        if self.death is not None:
            return {}
        answer: dict[TopicPartition, Committed] = {}
        done = threading.Event()
        seconds = min(_DRAIN_SECONDS, self._leave_by.remaining_seconds if self._leave_by else _DRAIN_SECONDS)

        async def drain() -> None:
            try:
                deadline = Deadline(self._clock, seconds)
                answer.update(await self._listener.on_revoked(partitions, deadline))
            finally:
                done.set()

        # Behind everything already posted, so records handed over before the revoke are known to the drain.
        self._post(lambda: self.spawn(drain(), "revoke"))
        if not done.wait(seconds + 1):
            log.error("%s: the loop did not drain %s in time", self.name, _names(partitions))
            return {}
        return answer

    def _send_commit(self) -> None:
        offsets = {p: offset for p, offset in self._newest_commit.items() if p in self._epoch_of}
        self._newest_commit.clear()
        if not offsets:
            return
        reach("commit.before")
        try:
            self._client.commit(offsets=to_client(offsets), asynchronous=True)
            # One at a time: the repetition of one that failed must not set back a newer one.
            self._commit_under_way = True
            reach("commit.sent")
        except confluent_kafka.KafkaException as cause:
            log.warning("%s: commit failed: %s", self.name, cause.args[0].str())

    def _on_commit(self, error: Any, offsets: list[Any]) -> None:
        self._commit_under_way = False
        reach("commit.acknowledged")
        failed = [p for p in offsets if error is not None or p.error is not None]
        if failed:
            log.warning("%s: commit failed, it is repeated: %s", self.name, error or failed[0].error)
            self._newest_commit = from_client(failed) | self._newest_commit
            self._commit_again_at = self._clock.monotonic() + _COMMIT_AGAIN_SECONDS

    def _on_error(self, error: Any) -> None:
        if error.code() == confluent_kafka.KafkaError._ALL_BROKERS_DOWN:
            log.warning("%s: no broker answers", self.name)

    def _post(self, call: Callable[..., Any], *arguments: Any) -> None:
        assert self._bridge is not None
        self._bridge.post(lambda: call(*arguments))

    def _say(self, about: str, problem: str) -> None:
        """Set or clear what readiness says about a partition, or about the membership when `about` is empty."""
        if problem:
            log.warning("%s", problem)
            self._problems[about] = problem
        else:
            self._problems.pop(about, None)


_FENCED = (confluent_kafka.KafkaError._FATAL, confluent_kafka.KafkaError._FENCED)


def _plain(partitions: Sequence[TopicPartition]) -> list[Any]:
    return [confluent_kafka.TopicPartition(p.topic, p.partition) for p in partitions]


def _names(partitions: Sequence[TopicPartition] | Mapping[TopicPartition, int]) -> str:
    return ", ".join(str(partition) for partition in partitions) or "nothing"
