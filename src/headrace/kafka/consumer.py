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
from typing import Any, Literal

import confluent_kafka

from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.kafka.error_map import to_error
from headrace.kafka.flow import Flow
from headrace.kafka.listener import Listener
from headrace.kafka.names import check_group, check_topic
from headrace.kafka.properties import client_properties
from headrace.kafka.reader import to_record
from headrace.lifecycle import Clock, Deadline, LoopBridge, OwnedThread, Readiness, Service
from headrace.records import Committed, Record, TopicPartition

log = logging.getLogger(__name__)

_BATCH_RECORDS = 500
_IDLE_SECONDS = 0.1
_BUSY_SECONDS = 0.01
_PATIENCE_SECONDS = 0.1
_COMMIT_AGAIN_SECONDS = 1.0
_LOOK_UP_SECONDS = 10.0
_DRAIN_SECONDS = 20.0
_THREAD_STOP_SECONDS = 30.0
_SESSION_MS = 10_000
_END = confluent_kafka.KafkaError._PARTITION_EOF
_OUT_OF_RANGE = confluent_kafka.KafkaError._AUTO_OFFSET_RESET
_epochs = itertools.count(1)


class Consumer(Service):
    """A member of a consumer group, and the source of a delivery pump.

    Commits only what it is told to. Takes up at the committed offset; where there is none, at the start or the end
    of the partition as `reset` says. An offset that is out of range never resets by itself (decisions.md 11): the
    partition stands still and readiness says so.
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
        reset: Literal["earliest", "latest"] = "earliest",
    ) -> None:
        super().__init__(name)
        self._kafka = kafka
        self._group = check_group(group)
        self._topics = [check_topic(topic) for topic in topics]
        self._listener = listener
        self._flow = Flow(flow)
        self._reset = reset
        self._epoch_of: dict[TopicPartition, int] = {}
        self._room = threading.Event()
        self._commands: deque[Callable[[], None]] = deque()
        self._newest_commit: dict[TopicPartition, Committed] = {}  # the thread's own, as is what follows
        self._commit_under_way = False
        self._commit_again_at = 0.0
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
        self._client = confluent_kafka.Consumer(self._properties())
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
                self._steer()
                if self._flow.must_wait:
                    self._wait_for_room()
                    continue
                # consume() alone waits until the batch is full; poll() returns with the first record.
                first = client.poll(_BUSY_SECONDS if self._flow.records else _IDLE_SECONDS)
                if first is not None:
                    self._take([first, *client.consume(_BATCH_RECORDS - 1, 0)])
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
            self._post(self._listener.on_records, partition, epoch, records)
        batches.clear()

    def _on_event(self, item: Any) -> None:
        error, code = item.error(), item.error().code()
        partition = TopicPartition(item.topic() or "", item.partition() if item.partition() is not None else -1)
        if code == _END:
            if epoch := self._epoch_of.get(partition):
                self._post(self._listener.on_end, partition, epoch, item.offset())
        elif code == _OUT_OF_RANGE:
            self._say(
                str(partition),
                f"{partition}: the committed offset is no longer in the partition ({error.str()}); "
                "nothing is skipped silently: choose a position and commit it for the group",
            )
        elif code in _FENCED:
            raise to_error(error, f"group {self._group}")
        else:
            self._say("", f"group {self._group}: {error.str()}")

    def _on_assign(self, client: Any, assigned: list[Any]) -> None:
        committed = self._find_positions(client, assigned) if assigned else {}
        epochs = {TopicPartition(p.topic, p.partition): next(_epochs) for p in assigned}
        self._epoch_of.update(epochs)
        self._flow.assigned(epochs)
        client.incremental_assign(assigned)
        # The client may remember a pause from an earlier assignment, and flow control starts from nothing paused.
        client.resume(assigned)
        self._say("", "")
        self._post(self._listener.on_assigned, epochs, committed)
        log.info("%s: assigned %s", self.name, _names(epochs))

    def _find_positions(self, client: Any, assigned: list[Any]) -> dict[TopicPartition, Committed]:
        """Set where to begin, and return what the group has committed."""
        try:
            committed = client.committed(assigned, timeout=_LOOK_UP_SECONDS)
        except confluent_kafka.KafkaException as cause:
            # Without an answer the client looks up by itself, and says "out of range" where nothing is committed:
            # the partition then stands still instead of beginning somewhere.
            log.warning("%s: cannot read committed offsets: %s", self.name, cause.args[0].str())
            return {}
        begin = confluent_kafka.OFFSET_BEGINNING if self._reset == "earliest" else confluent_kafka.OFFSET_END
        for wanted, known in zip(assigned, committed, strict=True):
            wanted.offset = known.offset if known.offset >= 0 else begin
        return _committed([known for known in committed if known.offset >= 0])

    def _on_revoke(self, client: Any, revoked: list[Any]) -> None:
        partitions = [TopicPartition(p.topic, p.partition) for p in revoked]
        offsets = self._ask_loop(partitions) if partitions else {}
        self._forget(partitions)
        if offsets:
            try:
                client.commit(offsets=_with_offsets(offsets), asynchronous=False)
            except confluent_kafka.KafkaException as cause:
                log.warning("%s: commit on revoke failed, records will come again: %s", self.name, cause.args[0].str())
        client.incremental_unassign(revoked)
        log.info("%s: revoked %s", self.name, _names(partitions))

    def _on_lost(self, client: Any, lost: list[Any]) -> None:
        partitions = [TopicPartition(p.topic, p.partition) for p in lost]
        self._forget(partitions)
        self._post(self._listener.on_lost, partitions)
        client.incremental_unassign(lost)
        self._say("", f"group {self._group}: partitions were lost, joining again")
        log.warning("%s: lost %s", self.name, _names(partitions))

    def _forget(self, partitions: Sequence[TopicPartition]) -> None:
        self._flow.revoked(partitions)
        for partition in partitions:
            self._epoch_of.pop(partition, None)
            self._newest_commit.pop(partition, None)
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
        try:
            self._client.commit(offsets=_with_offsets(offsets), asynchronous=True)
            # One at a time: the repetition of one that failed must not set back a newer one.
            self._commit_under_way = True
        except confluent_kafka.KafkaException as cause:
            log.warning("%s: commit failed: %s", self.name, cause.args[0].str())

    def _on_commit(self, error: Any, offsets: list[Any]) -> None:
        self._commit_under_way = False
        failed = [p for p in offsets if error is not None or p.error is not None]
        if failed:
            log.warning("%s: commit failed, it is repeated: %s", self.name, error or failed[0].error)
            self._newest_commit = _committed(failed) | self._newest_commit
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

    def _properties(self) -> dict[str, Any]:
        chosen = client_properties(self._kafka, f"headrace-{self.name}", consumer=True)
        classic = {"session.timeout.ms": _SESSION_MS, "partition.assignment.strategy": "cooperative-sticky"}
        return {
            # KIP-848: the broker owns session and assignor, and the client refuses both.
            **(classic if chosen.get("group.protocol", "classic") == "classic" else {}),
            "fetch.queue.backoff.ms": 10,  # the client's 1000 starves a fast consumer
            "queued.max.messages.kbytes": 16_384,
            "topic.metadata.refresh.interval.ms": 5000,  # a topic that is created later is found soon
            **chosen,
            "group.id": self._group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "check.crcs": True,
            "on_commit": self._on_commit,
            "error_cb": self._on_error,
        }


_FENCED = (confluent_kafka.KafkaError._FATAL, confluent_kafka.KafkaError._FENCED)


def _plain(partitions: Sequence[TopicPartition]) -> list[Any]:
    return [confluent_kafka.TopicPartition(p.topic, p.partition) for p in partitions]


def _with_offsets(offsets: Mapping[TopicPartition, Committed]) -> list[Any]:
    return [confluent_kafka.TopicPartition(p.topic, p.partition, at.offset, at.metadata) for p, at in offsets.items()]


def _committed(offsets: Sequence[Any]) -> dict[TopicPartition, Committed]:
    return {TopicPartition(p.topic, p.partition): Committed(p.offset, p.metadata or "") for p in offsets}


def _names(partitions: Sequence[TopicPartition] | Mapping[TopicPartition, int]) -> str:
    return ", ".join(str(partition) for partition in partitions) or "nothing"
