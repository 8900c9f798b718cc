"""One instance: a member of a group, or a reader of assigned partitions, on behalf of a client.

A record is sent when the answer of a read was written completely. Until then it returns to the buffer. It is delivered
when its client has received it, or has named it; else it is read again. Only delivered records are committed: by
`commit`, or with auto commit when the next read confirms them.
"""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from headrace import errors
from headrace.config.consumers import FlowControl
from headrace.kafka import Admin, Consumer, GroupOffsets, Subscription
from headrace.kafka.loop_proxy import Listener
from headrace.kafka.names import names_of
from headrace.records import CommitOffsets, Committed, Epochs, Offsets, Record, TopicPartition
from headrace.runtime import Clock, Deadline, Service
from headrace.sidecar.active.buffer import Read, Received, RecordBuffer, runs_of
from headrace.sidecar.active.entries import EntryWriter
from headrace.sidecar.active.holdings import GONE, Holding, Holdings, Processed, newest
from headrace.sidecar.active.problems import COMMAND_SECONDS, ReadProblems, in_time
from headrace.sidecar.active.spec import InstanceSpec, Topics

_JOIN_SECONDS: Final = 10.0
_MAX_RECORDS: Final = 20_000
_NOWHERE: Final[Offsets] = {}

OnDelivered = Callable[["ActiveInstance", Sequence[Record]], None]
"""Takes records that the client of an instance has received, at least one."""


class ActiveInstance(Service, Listener):
    """One instance. Its consumer starts with its first topics. It never skips offsets by itself."""

    def __init__(
        self, spec: InstanceSpec, entries: EntryWriter, admin: Admin, clock: Clock, on_delivered: OnDelivered
    ) -> None:
        super().__init__(f"active consumer {spec.id}")
        self.spec = spec
        self.entries = entries
        self.last_used = clock.monotonic()
        """Of its client, in seconds of the monotonic clock."""
        self.reads: Topics | None = None
        """What it reads; None before a subscription or assignment."""
        self._admin = admin
        self._clock = clock
        self._on_delivered = on_delivered
        self._buffer = RecordBuffer()
        self._consumer: Consumer | None = None
        self._watch: Subscription | None = None
        self._holdings = Holdings()
        self._unanswered: dict[TopicPartition, Committed] = {}
        """Offsets of asynchronous commits, until they are acknowledged."""
        self._received: Received | None = None
        """Tells whether the client has received the last answer that was written; None if only it can say so."""
        self._settling = asyncio.Lock()
        self._problems = ReadProblems()
        self._arrived = asyncio.Event()
        self._free = asyncio.Event()
        """Clear while a read is not answered."""
        self._free.set()
        self._stream: object = None
        self._changes = asyncio.Lock()
        """Held while what it reads is replaced."""
        self._ended = False

    @property
    def assigned(self) -> list[TopicPartition]:
        """Partitions that it reads now."""
        return sorted({*self._holdings, *(self._consumer.stalled if self._consumer else ())})

    @property
    def positions(self) -> dict[TopicPartition, tuple[int, str]]:
        """The offsets after those that were sent, of assigned partitions, and the assignment of each."""
        return {p: (held.end, held.assignment) for p, held in self._holdings.items() if held.start is not None}

    @property
    def next_offsets(self) -> dict[TopicPartition, int]:
        """The next offset to deliver of its partitions, where it is known: of the others nothing was fetched."""
        return {**self._buffer.first_offsets, **{partition: at for partition, (at, _) in self.positions.items()}}

    @property
    def topics(self) -> list[str]:
        """Topics that it reads now."""
        if self.reads and self.reads.matches:
            return list(self._watch.subscribed) if self._watch else []
        return list(self.reads.names) if self.reads else []

    @property
    def is_reading(self) -> bool:
        """Whether a read or a stream is not answered yet."""
        return not self._free.is_set() or self._stream is not None

    @property
    def is_closed(self) -> bool:
        """Whether it ends, or its consumer has left the group or has died, so that no records come."""
        return self._ended or self._consumer is None or self._consumer.death is not None

    @property
    def buffered_bytes(self) -> int:
        """Bytes of fetched records that are not delivered."""
        return self._buffer.size_bytes

    async def start(self) -> None:
        if seconds := self.spec.auto_commit_seconds:
            self.keep(lambda: self._commit_confirmed(seconds), "auto commit")

    def end_reads(self) -> None:
        """Answer a waiting read with what is there, and end a stream. Nothing is read any more."""
        self._ended = True
        self._arrived.set()

    async def drain(self, deadline: Deadline) -> None:
        """Answer a waiting read with what is there, commit what was confirmed, and leave the group."""
        self._ended = True
        await self._close(deadline)

    async def stop(self) -> None:
        self._ended = True
        await self._close(Deadline(self._clock, 0))
        await super().stop()

    async def subscribe(self, topics: Topics) -> None:
        """Replace what it reads.

        Raises:
            InstanceState: It has an assignment and this is a subscription, or the reverse.
            InstanceNotFound: It was closed meanwhile.
        """
        async with self._changes:
            await self._subscribe(topics)

    async def _subscribe(self, topics: Topics) -> None:
        if self.reads and (self.reads.partitions is None) != (topics.partitions is None):
            has = "a subscription" if self.reads.partitions is None else "an assignment"
            raise errors.InstanceState(
                f"instance {self.name} has {has}: delete its subscriptions before it gets the other"
            )
        consumer = self._consumer or await self._open()
        watch, self._watch, self.reads = self._watch, None, topics
        if watch:
            await watch.stop()
        if self._consumer is not consumer:
            raise errors.InstanceNotFound(f"instance {self.name} was closed meanwhile")
        names = topics.names
        if topics.partitions is not None:
            consumer.assign(topics.partitions)
            names = sorted({partition.topic for partition in topics.partitions})
        else:
            consumer.subscribe(names)
        self._watch = Subscription(
            f"{self.name} topics", consumer, self._admin, self._clock, topics=names, fits=topics.matches
        )
        await self._watch.start()

    async def unsubscribe(self) -> None:
        """Read nothing, and leave the group."""
        async with self._changes:
            self.reads = None
            self._holdings.revoked.clear()
            await self._close(Deadline(self._clock, COMMAND_SECONDS))

    async def _open(self) -> Consumer:
        if self._ended:
            raise errors.InstanceNotFound(f"instance {self.name} was closed meanwhile")
        spec = self.spec
        flow = FlowControl(max_records=_MAX_RECORDS, max_bytes=spec.buffer_bytes)
        consumer = Consumer(
            self._admin,
            name=self.name,
            group=spec.group,
            topics=(),
            listener=self,
            flow=flow,
            clock=self._clock,
            policy=spec.policy,
        )
        consumer.on_death = lambda dead: self._arrived.set()
        consumer.on_problem = self._on_problem
        await consumer.start()
        self._consumer = consumer
        return consumer

    async def _close(self, deadline: Deadline) -> None:
        watch, consumer, self._watch, self._consumer = self._watch, self._consumer, None, None
        self._arrived.set()
        if watch:
            await watch.stop()
        if consumer:
            await consumer.drain(deadline)
            await consumer.stop()
        self._drop(list(self._holdings))

    async def wait_free(self) -> None:
        """Wait a moment for the end of a read or stream: the server may not know yet that its client has left."""
        for _ in range(20):
            if self.is_reading:
                await asyncio.sleep(0.005)

    @contextlib.contextmanager
    def stream(self) -> Iterator[object]:
        """Reserve the instance for one stream, which passes the token to its reads.

        Raises:
            InstanceBusy: A read or another stream is not answered yet.
        """
        self._check_free(None)
        token = self._stream = object()
        try:
            yield token
        finally:
            self._stream = None

    async def read(self, *, max_bytes: int, max_records: int, wait_seconds: float, stream: object = None) -> Read:
        """Return the next records: as soon as the least bytes are there, or when the wait ends.

        Raises:
            InstanceBusy: Another read is not answered yet.
            InstanceState: It has neither a subscription nor an assignment.
            OffsetNotCommitted, PositionOutOfRange: Partitions wait for a seek. Said at once and once, and later when
                nothing else waits.
            TopicRecreated: A topic begins again. Said once.
            TopicNotFound: A topic does not exist; nothing else waits.
            KafkaError, ReadFailed: Kafka refuses the group or a partition, or does not answer; nothing else waits.
        """
        if stream is None:
            await self.wait_free()
        self._check_free(stream)
        if self.reads is None:
            raise errors.InstanceState(
                f"instance {self.name} reads nothing: subscribe it to topics, or assign partitions"
            )
        self._free.clear()
        try:
            await self._settle()
            if stream is None:
                await self._send_again()
            if self.spec.auto_commit_seconds:
                self._holdings.confirm()
            until, linger = asyncio.get_running_loop().time() + wait_seconds, self.spec.linger_seconds
            most = min(max_bytes, self.spec.buffer_bytes // 2)
            await self._wait(min(self.spec.min_bytes, most), max_records, until)
            if linger and self._buffer.records:
                until = min(until, asyncio.get_running_loop().time() + linger)
                await self._wait(most, max_records, until)
            if self._problems.are_new(self._consumer) or not self._buffer.records:
                self._raise_problem()
            records = self._buffer.take(max_bytes, max_records)
            held = dict(self._holdings)
            assignments = {partition: one.assignment for partition, one in held.items()}
            return Read(records, assignments, functools.partial(self._end_read, records, held))
        except BaseException:
            self._free.set()
            raise

    async def _wait(self, size_bytes: int, records: int, until: float) -> None:
        """Wait for bytes or records until a time of the loop, or until there is something else to answer."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not self.is_closed and not self._problems.are_new(self._consumer):
                    count = self._buffer.records
                    if count and (count >= records or self._buffer.size_bytes >= size_bytes):
                        break
                    self._arrived.clear()
                    await self._arrived.wait()

    def _check_free(self, stream: object) -> None:
        if not self._free.is_set() or self._stream is not stream:
            raise errors.InstanceBusy(f"another read of instance {self.name} is not answered yet: one at a time")

    def _end_read(
        self, records: Sequence[Record], held: Mapping[TopicPartition, Holding], count: int, received: Received | None
    ) -> None:
        """Count the first records as sent, and put the others back, where the assignment still lasts."""
        self._free.set()
        self.last_used = self._clock.monotonic()
        if count:
            self._received = received
            self._on_delivered(self, records[:count])
        holdings, auto_commit = self._holdings, self.spec.auto_commit_seconds is not None
        current = {partition for partition, one in held.items() if holdings.get(partition) is one}
        self._buffer.put_back([record for record in records[count:] if record.topic_partition in current])
        for partition, run in runs_of(records[:count]):
            first, end, now = run[0].offset, run[-1].offset + 1, holdings.get(partition)
            if partition in current and self._consumer:
                holdings.sent(partition, held[partition], first, end, auto_commit=auto_commit)
                self._consumer.release(partition, len(run), sum([record.size_bytes for record in run]))
            elif now is None or now.assignment != held[partition].assignment:
                holdings.revoked[partition] = end  # while the answer was written
        self._forget_given_up()

    async def _settle(self) -> None:
        """Count the last answer as delivered if its client has received it, else read its records again."""
        async with self._settling:
            if received := self._received:
                if await received():
                    self._holdings.deliver()
                else:
                    await self._send_again()
                self._received = None

    async def _send_again(self, targets: Offsets = _NOWHERE) -> None:
        """Read again what may not have arrived, and other partitions at these offsets."""
        offsets = self._holdings.in_doubt | {p: at for p, at in targets.items() if p in self._holdings}
        before = dict(self._holdings)
        while offsets and (gone := {*await self._move(offsets)}):
            offsets = {partition: at for partition, at in offsets.items() if partition not in gone}
        self._holdings.moved({partition: before[partition] for partition in offsets}, targets)

    def _raise_problem(self) -> None:
        consumer = self._consumer
        if consumer is None:
            return
        if consumer.death:
            raise errors.ReadFailed(f"instance {self.name} has ended: {consumer.death}; create it again")
        if error := self._problems.take(consumer, self._watch, self._holdings):
            raise error
        self._admin.reachability.check(float("inf") if self._holdings else 0, "nothing was read")

    async def commit(self, processed: Sequence[Processed] | None = None, *, wait: bool = True) -> CommitOffsets:
        """Commit what a client names, or what was delivered, and return it.

        Raises:
            CommitRefused: Partitions are not assigned to this instance any more, or anew, or the offset would go back.
            InstanceState: None is named, and what was sent last went out on a stream.
            KafkaTimeout: No acknowledgement arrived. The commit is repeated while the partitions are assigned.
        """
        holdings = self._holdings
        if processed is None:
            await self._settle()
            processed = holdings.to_commit()
        refused = holdings.refusals(processed, commits=True)
        offsets = newest([one for one in processed if one not in refused])
        before = dict(holdings)
        if offsets and self._consumer:
            gone = set[TopicPartition]()
            if wait:
                async with in_time(", so the outcome is unknown; it is repeated while they are assigned here"):
                    gone.update(await self._consumer.commit_now(offsets))
            else:
                self._unanswered.update(offsets)  # a revoke or the end of the instance commits them, too
                self.spawn(self._commit_later(self._consumer, offsets), "commit")
            refused |= {one: GONE for one in processed if one.partition in gone and one not in refused}
            offsets = {p: at for p, at in offsets.items() if p not in gone}
            holdings.take(offsets, before)
        if refused:
            raise holdings.refuse(refused, offsets)
        return offsets

    async def _commit_later(self, consumer: Consumer, offsets: CommitOffsets) -> None:
        """Commit offsets of a request that is answered already."""
        with contextlib.suppress(errors.HeadraceError):  # the consumer has ended
            await consumer.commit_now(offsets)
            for partition, at in offsets.items():
                if self._unanswered.get(partition) is at:
                    del self._unanswered[partition]

    async def for_transaction(self, processed: Sequence[Processed]) -> tuple[GroupOffsets, Callable[[], None]]:
        """Return offsets for a transaction, and what to call when it is committed.

        Raises:
            InstanceState: It is no member of a group, commits by itself, or an offset was not delivered since the last
                commit.
            CommitRefused: A partition is not assigned to this instance any more, or anew.
            KafkaUnavailable: Earlier commits are not acknowledged, so the transaction did not begin.
        """
        if self._consumer is None or not self.reads or self.reads.partitions is not None:
            raise errors.InstanceState(f"instance {self.name} is no member of its group: subscribe it to topics")
        if self.spec.auto_commit_seconds:
            raise errors.InstanceState(f"instance {self.name} commits by itself: create it without auto commit")
        self._holdings.require(processed)
        self._holdings.require_delivered(processed)
        offsets, before = newest(processed), dict(self._holdings)
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                found = await self._consumer.for_transaction(offsets)
        except TimeoutError as cause:
            raise errors.KafkaUnavailable("earlier commits are not acknowledged, so nothing was written") from cause
        if found is None:
            raise self._holdings.refuse(dict.fromkeys(processed, GONE))
        return found, lambda: self._holdings.take(offsets, before)

    async def committed(self, partitions: Sequence[TopicPartition]) -> CommitOffsets:
        """Return the committed offsets of the group; partitions without one are left out."""
        async with self._changes:
            consumer = self._consumer or await self._open()
        async with in_time(": ask again"):
            return await consumer.committed(partitions)

    async def seek(self, offsets: Offsets, named: Sequence[Processed] = ()) -> None:
        """Read partitions from other offsets on; what was delivered and not committed stays uncommitted.

        Args:
            offsets: Where to.
            named: Those of which the client names the assignment.

        Raises:
            CommitRefused: One that is named is of an earlier assignment, so none has moved.
            InstanceState: A partition is not assigned to this instance, so none has moved.
        """
        self._holdings.require(named)
        if gone := await self._move(offsets):
            text = f"not assigned to instance {self.name}, so no position has changed: {names_of(gone)}"
            raise errors.InstanceState(f"{text}; subscribe or assign them first")
        for partition in self._holdings.keys() & offsets.keys():
            self._holdings[partition].seek_back(offsets[partition])

    async def _move(self, offsets: Offsets) -> Sequence[TopicPartition]:
        """Read partitions from other offsets on, or return those that are not assigned, and move none."""
        if self._consumer is None:
            return list(offsets)
        async with in_time(": seek again"):
            return await self._consumer.move(offsets)

    async def resume(self, received: Sequence[Processed]) -> None:
        """Begin a stream behind what its client has received of the one before; the rest of that is sent again.

        Raises:
            CommitRefused: Some of it is of an earlier assignment. The other partitions are resumed.
        """
        if unnamed := [one.partition for one in received if not one.assignment]:
            await self.wait_assigned(unnamed)
        await self._settle()
        refused = self._holdings.refusals(received)
        kept = newest([one for one in received if one not in refused])
        await self._send_again({p: max(at.offset, self._holdings[p].committed) for p, at in kept.items()})
        if refused:
            raise self._holdings.refuse(refused)

    async def wait_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Return when partitions are assigned, or after some seconds: a group takes a moment to assign them."""
        if self.reads is None:
            return
        if self.reads.partitions is not None:
            partitions = [*{*partitions} & {*self.reads.partitions}]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_SECONDS):
                while not ({*self.assigned} >= {*partitions} and self.assigned) and not self.is_closed:
                    self._arrived.clear()
                    await self._arrived.wait()
                return
        if self._consumer and self._watch:
            self._consumer.require_rights(self._watch.subscribed)

    async def _commit_confirmed(self, seconds: float) -> None:
        sent: dict[TopicPartition, tuple[int, int]] = {}  # what an earlier epoch sent may have been dropped
        while True:
            await self._clock.sleep(seconds)
            confirmed = {
                p: (one.epoch, one.confirmed) for p, one in self._holdings.items() if one.confirmed is not None
            }
            changed = {p: Committed(one[1]) for p, one in confirmed.items() if sent.get(p) != one}
            if changed and self._consumer:
                self._consumer.commit(changed)
            sent = confirmed

    def on_assigned(self, partitions: Epochs, committed: CommitOffsets) -> None:
        self._buffer.drop(partitions)
        for partition in partitions:
            self._unanswered.pop(partition, None)
        self._holdings.assign(partitions, committed)
        self._arrived.set()

    def _on_problem(self, error: errors.HeadraceError) -> None:
        self._problems.add(error)
        self._arrived.set()

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        if partition in self._holdings and self._holdings[partition].epoch == epoch:
            self._buffer.add(partition, [*records])  # each is made once, and not whenever it is read
            self._arrived.set()

    async def on_revoked(self, partitions: Sequence[TopicPartition], deadline: Deadline) -> CommitOffsets:
        found = {p: self._unanswered[p] for p in partitions if p in self._unanswered}
        if self.spec.auto_commit_seconds:
            held = {p: self._holdings[p].confirmed for p in partitions if p in self._holdings}
            found |= {p: Committed(at) for p, at in held.items() if at is not None}
        self._drop(partitions)
        return found

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._drop(partitions, self._unanswered)

    def _drop(self, partitions: Sequence[TopicPartition], unanswered: Collection[TopicPartition] = ()) -> None:
        self._buffer.drop(partitions)
        self._holdings.lose(partitions, unanswered)
        self._forget_given_up()
        for partition in partitions:
            self._unanswered.pop(partition, None)

    def _forget_given_up(self) -> None:
        by_client = self.reads is None or self.reads.partitions is not None
        if by_client or self.spec.auto_commit_seconds:
            self._holdings.revoked.clear()
