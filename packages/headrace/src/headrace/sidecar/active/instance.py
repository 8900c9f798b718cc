"""One instance: a member of a group, or a reader of assigned partitions, on behalf of a client.

A record is sent when the response of a read was written completely. If that fails, it returns to the buffer. It is
delivered when its client has received or named it; else it is read again. Only delivered records are committed: by
`commit`, or with auto commit when the next read confirms them.

`Read.end` counts what was sent, and takes a function that later returns whether it was received. In the process with
the client's connection that is `Arrival.received` of `http/arrival.py`, which checks the connection. Behind another
process it is the confirmation that `http/forwarding.py` passes on.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

from headrace import errors
from headrace.kafka import Admin, Consumer, GroupOffsets
from headrace.kafka.loop_proxy import Listener
from headrace.kafka.names import names_of
from headrace.records import CommitOffsets, Committed, Epochs, Offsets, Record, RecordBatch, TopicPartition
from headrace.runtime import Clock, Deadline, Service
from headrace.sidecar.active.buffer import RecordBuffer
from headrace.sidecar.active.instance_membership import COMMAND_SECONDS, InstanceMembership, in_time
from headrace.sidecar.active.partition_positions import GONE, PartitionPosition, PartitionPositions, Processed, newest
from headrace.sidecar.active.read_entries import EntryWriter
from headrace.sidecar.active.spec import InstanceSpec

_JOIN_SECONDS: Final = 10.0
_NOWHERE: Final[Offsets] = {}
OnDelivered = Callable[["ActiveInstance", Sequence[RecordBatch]], None]
"""Takes the records that the client of an instance has received; at least one."""


Received = Callable[[], Awaitable[bool]]
"""Returns whether a client has received a response."""


async def arrived() -> bool:
    """Return that a response counts as received once it is written."""
    return True


class ReadTurn:
    """Serves one read, or the reads of one stream, at a time."""

    def __init__(self, instance: str) -> None:
        """Take the name of the instance for errors."""
        self._instance = instance
        self._is_reading = False
        self._stream: object = None

    @property
    def is_taken(self) -> bool:
        """Whether a read or a stream is in progress."""
        return self._is_reading or self._stream is not None

    async def wait_free(self) -> None:
        """Wait a moment for a read or stream to end: the server may not have noticed that its client left."""
        for _ in range(20):
            if self.is_taken:
                await asyncio.sleep(0.005)

    @contextlib.contextmanager
    def stream(self) -> Iterator[object]:
        """Reserve the instance for one stream, which passes the token to its reads.

        Raises:
            InstanceBusy: A read or another stream is in progress.
        """
        self.check(None)
        token = self._stream = object()
        try:
            yield token
        finally:
            self._stream = None

    def check(self, stream: object) -> None:
        """Raise InstanceBusy if another read or stream is in progress; `stream` is None for a plain read."""
        if self._is_reading or self._stream is not stream:
            raise errors.InstanceBusy(
                f"another read of instance {self._instance} is in progress; only one at a time is served"
            )

    def begin(self) -> None:
        self._is_reading = True

    def end(self) -> None:
        self._is_reading = False


class ActiveInstance(Service, Listener):
    """One instance. It never skips offsets by itself."""

    def __init__(
        self, spec: InstanceSpec, entries: EntryWriter, admin: Admin, clock: Clock, on_delivered: OnDelivered
    ) -> None:
        super().__init__(f"active consumer {spec.id}")
        # For its life
        self.spec = spec
        self.entries = entries
        self._clock = clock
        self._on_delivered = on_delivered
        self.last_used = clock.monotonic()
        """When its client last used it, in seconds of the monotonic clock."""
        self._arrived = asyncio.Event()
        """Set when a read may have something to return."""
        self.membership = InstanceMembership(self.name, spec, admin, clock, self, self._arrived)
        """Its topics or partitions, and its consumer."""
        # Of the assigned partitions
        self._buffer = RecordBuffer()
        self._positions = PartitionPositions()
        # Of one read, until the next
        self.turn = ReadTurn(self.name)
        self._received: Received | None = None
        """Returns whether the client has received the last response; None if only the client can tell."""
        self._settling = asyncio.Lock()

    @property
    def assigned(self) -> list[TopicPartition]:
        consumer = self.membership.consumer
        return sorted({*self._positions, *(consumer.stalled if consumer else ())})

    @property
    def positions(self) -> dict[TopicPartition, tuple[int, str]]:
        """The offsets after those that were sent, of assigned partitions, and the assignment of each."""
        return {p: (one.end, one.assignment) for p, one in self._positions.items() if one.start is not None}

    @property
    def next_offsets(self) -> dict[TopicPartition, int]:
        """The next offset to deliver of each partition; partitions of which nothing was fetched are left out."""
        return {**self._buffer.first_offsets, **{partition: at for partition, (at, _) in self.positions.items()}}

    @property
    def buffered_bytes(self) -> int:
        """Bytes of fetched records that are not delivered."""
        return self._buffer.size_bytes

    async def start(self) -> None:
        if seconds := self.spec.auto_commit_seconds:
            self.keep(lambda: self._commit_confirmed(seconds), "auto commit")

    def end_reads(self) -> None:
        """Let a waiting read return what is there, and end a stream; later reads return nothing."""
        self.membership.end()

    async def drain(self, deadline: Deadline) -> None:
        """Let a waiting read return what is there, commit what was confirmed, and leave the group."""
        self.membership.end()
        await self.membership.close(deadline)
        self._drop(list(self._positions))

    async def stop(self) -> None:
        await self.drain(Deadline(self._clock, 0))
        await super().stop()

    async def unsubscribe(self) -> None:
        """Stop reading, and leave the group."""
        await self.membership.unsubscribe(Deadline(self._clock, COMMAND_SECONDS))
        self._drop(list(self._positions))

    async def read(self, *, max_bytes: int, max_records: int, wait_seconds: float, stream: object = None) -> "Read":
        """Return the next records as soon as the minimum of bytes is there, or when the wait ends.

        Raises:
            InstanceBusy: Another read is in progress.
            InstanceState: It has neither a subscription nor an assignment.
            InvalidOffset: Partitions wait for a seek. Raised once at once, and later by
                reads that find no records.
            TopicRecreated: A topic was deleted and created again. Raised once.
            TopicNotFound: A topic does not exist, and there are no records.
            KafkaError, ReadFailed: Kafka refuses the group or a partition, or does not respond; there are no records.
        """
        # 1. One read at a time.
        if stream is None:
            await self.turn.wait_free()
        self.turn.check(stream)
        if self.membership.reads is None:
            raise errors.InstanceState(
                f"instance {self.name} reads nothing; subscribe it to topics, or assign partitions"
            )
        self.turn.begin()
        try:
            # 2. What the last read sent was delivered, or is read again; auto commit takes what was delivered.
            await self._settle()
            await self._send_again(self._positions.ahead, self._positions.in_doubt if stream is None else _NOWHERE)
            if self.spec.auto_commit_seconds:
                self._positions.confirm()
            # 3. Wait for the minimum of bytes, and then a moment for more.
            until = asyncio.get_running_loop().time() + wait_seconds
            linger = self.spec.linger_seconds
            most = min(max_bytes, self.spec.buffer_bytes // 2)
            await self._wait(min(self.spec.min_bytes, most), max_records, until)
            if linger and self._buffer.records:
                until = min(until, asyncio.get_running_loop().time() + linger)
                await self._wait(most, max_records, until)
            # 4. A new problem is raised first; an old one only if there are no records.
            if self.membership.has_new_problems or not self._buffer.records:
                self.membership.raise_problem(self._positions)
            batches = self._buffer.take(max_bytes, max_records)
            return Read(self, batches, dict(self._positions))
        except BaseException:
            self.turn.end()
            raise

    async def _wait(self, size_bytes: int, records: int, until: float) -> None:
        """Wait for bytes or records until a time of the loop, or until a problem or the end of the instance."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                while not self.membership.is_closed and not self.membership.has_new_problems:
                    count = self._buffer.records
                    if count and (count >= records or self._buffer.size_bytes >= size_bytes):
                        break
                    self._arrived.clear()
                    await self._arrived.wait()

    def end_read(self, read: "Read", count: int, received: Received | None) -> None:
        """Count the first records as sent, and put the others back if their assignment still lasts."""
        self.turn.end()
        self.last_used = self._clock.monotonic()
        # 1. What was not sent returns, unless its partition was revoked or sought meanwhile.
        positions = self._positions
        consumer = self.membership.consumer
        before = read.positions
        current = {partition for partition, one in before.items() if positions.get(partition) is one}
        sent = self._buffer.put_back(read.batches, count, current)
        if sent:
            self._received = received
            self._on_delivered(self, sent)
        for batch in sent:
            partition = batch.topic_partition
            end = batch.offsets[-1] + 1
            now = positions.get(partition)
            if partition in current and consumer:
                # 2. What was sent may arrive; its bytes leave the buffer, so the consumer may fetch more.
                before[partition].count_sent(batch.offsets[0], end)
                positions.revoked.pop(partition, None)
                consumer.release(partition, len(batch), batch.size_bytes)
            elif now is None or now.assignment != before[partition].assignment:
                # 3. What was revoked meanwhile cannot be committed, and the client must learn that.
                positions.revoked[partition] = end
        self._forget_revoked()

    async def _settle(self) -> None:
        """Count the last response as delivered if its client has received it; else read its records again."""
        async with self._settling:
            if received := self._received:
                if await received():
                    self._positions.deliver()
                else:
                    await self._send_again(_NOWHERE, self._positions.in_doubt)
                self._received = None

    async def _send_again(self, targets: Offsets, in_doubt: Offsets) -> None:
        """Read again what may not have arrived, and read other partitions from these offsets."""
        offsets = {**in_doubt, **{p: at for p, at in targets.items() if p in self._positions}}
        if not offsets:
            return
        before = dict(self._positions)
        while offsets and (gone := {*await self._move(offsets)}):
            offsets = {partition: at for partition, at in offsets.items() if partition not in gone}
        self._positions.moved({partition: before[partition] for partition in offsets}, targets)

    async def commit(self, processed: Sequence[Processed] | None = None, *, wait: bool = True) -> CommitOffsets:
        """Commit what a client names, or what was delivered, and return it.

        Raises:
            CommitRefused: Partitions were revoked, or revoked and assigned again, or the offset would go back.
            InstanceState: None is named, and the last records were sent on a stream.
            KafkaTimeout: No acknowledgement arrived. The commit is repeated while the partitions are assigned.
        """
        # 1. A part may be refused; the rest is committed.
        positions = self._positions
        consumer = self.membership.consumer
        if processed is None:
            await self._settle()
            processed = positions.to_commit()
        refused = positions.refusals(processed, commits=True)
        offsets = newest([one for one in processed if one not in refused])
        before = dict(positions)
        if offsets and consumer:
            # 2. Partitions may be revoked meanwhile; the revoke commits what an asynchronous commit has promised.
            gone = set[TopicPartition]()
            if wait:
                async with in_time(
                    "the outcome is unknown, and the commit is repeated while the partitions are assigned here"
                ):
                    gone.update(await consumer.commit_now(offsets))
            else:
                for partition, at in offsets.items():
                    positions[partition].promised = at
                self.spawn(self._commit_later(consumer, offsets), "commit")
            # 3. What was committed counts as delivered.
            refused |= {one: GONE for one in processed if one.partition in gone and one not in refused}
            offsets = {p: at for p, at in offsets.items() if p not in gone}
            positions.take(offsets, before)
        if refused:
            raise positions.refuse(refused, offsets)
        return offsets

    async def _commit_later(self, consumer: Consumer, offsets: CommitOffsets) -> None:
        """Commit offsets of a request that already has its response."""
        with contextlib.suppress(errors.HeadraceError):  # the consumer has ended
            await consumer.commit_now(offsets)
            for partition, at in offsets.items():
                position = self._positions.get(partition)
                if position and position.promised is at:
                    position.promised = None

    async def for_transaction(self, processed: Sequence[Processed]) -> tuple[GroupOffsets, Callable[[], None]]:
        """Return offsets for a transaction, and a function to call when it is committed.

        Raises:
            InstanceState: It is not a member of a group, has auto commit, or an offset was not delivered since the
                last commit.
            CommitRefused: A partition was revoked, or revoked and assigned again.
            KafkaUnavailable: Earlier commits are not acknowledged, so the transaction did not begin.
        """
        consumer = self.membership.consumer
        if consumer is None or self.membership.by_hand:
            raise errors.InstanceState(f"instance {self.name} is not a member of its group; subscribe it to topics")
        if self.spec.auto_commit_seconds:
            raise errors.InstanceState(f"instance {self.name} has auto commit; create it without")
        self._positions.require(processed)
        self._positions.require_delivered(processed)
        offsets = newest(processed)
        before = dict(self._positions)
        try:
            async with asyncio.timeout(COMMAND_SECONDS):
                found = await consumer.for_transaction(offsets)
        except TimeoutError as cause:
            raise errors.KafkaUnavailable("earlier commits are not acknowledged yet; nothing was written") from cause
        if found is None:
            self._positions.require(processed)  # names those that were revoked meanwhile
            raise self._positions.refuse(dict.fromkeys(processed, GONE))
        return found, lambda: self._positions.take(offsets, before)

    async def seek(self, offsets: Offsets, named: Sequence[Processed] = ()) -> None:
        """Read partitions from other offsets; what was delivered and not committed stays uncommitted.

        Args:
            offsets: The next offset of each partition.
            named: Those for which the client names the assignment.

        Raises:
            CommitRefused: One of `named` is of an earlier assignment; no position has changed.
            InstanceState: A partition is not assigned to this instance; no position has changed.
        """
        self._positions.require(named)
        if gone := await self._move(offsets):
            text = f"not assigned to instance {self.name}, so no position has changed: {names_of(gone)}"
            raise errors.InstanceState(f"{text}; subscribe or assign them first")
        for partition in self._positions.keys() & offsets.keys():
            self._positions[partition].seek_back(offsets[partition])

    async def _move(self, offsets: Offsets) -> Sequence[TopicPartition]:
        """Read partitions from other offsets; if some are not assigned, return these and change nothing."""
        consumer = self.membership.consumer
        if consumer is None:
            return list(offsets)
        async with in_time("seek again"):
            return await consumer.move(offsets)

    async def resume(self, received: Sequence[Processed]) -> None:
        """Begin a stream behind what its client has received of the previous one; the rest is sent again.

        Raises:
            CommitRefused: Some of it is of an earlier assignment. The other partitions are resumed.
        """
        if unnamed := [one.partition for one in received if not one.assignment]:
            await self.wait_assigned(unnamed)
        await self._settle()
        refused = self._positions.refusals(received)
        kept = newest([one for one in received if one not in refused])
        targets = {p: max(at.offset, self._positions[p].committed) for p, at in kept.items()}
        await self._send_again(targets, self._positions.in_doubt)
        if refused:
            raise self._positions.refuse(refused)

    async def wait_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Wait some seconds until partitions are assigned: a group takes a moment to assign them."""
        reads = self.membership.reads
        if reads is None:
            return
        if reads.partitions is not None:
            partitions = [*{*partitions} & {*reads.partitions}]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_JOIN_SECONDS):
                while not ({*self.assigned} >= {*partitions} and self.assigned) and not self.membership.is_closed:
                    self._arrived.clear()
                    await self._arrived.wait()
                return
        self.membership.require_rights()

    async def _commit_confirmed(self, seconds: float) -> None:
        sent: dict[TopicPartition, tuple[int, int]] = {}  # with the epoch: an earlier one may have been dropped
        while True:
            await self._clock.sleep(seconds)
            confirmed = {
                partition: (one.epoch, one.confirmed)
                for partition, one in self._positions.items()
                if one.confirmed is not None
            }
            changed = {
                p: Committed(offset) for p, (epoch, offset) in confirmed.items() if sent.get(p) != (epoch, offset)
            }
            if changed and (consumer := self.membership.consumer):
                consumer.commit(changed)
            sent = confirmed

    def on_assigned(self, partitions: Epochs, committed: CommitOffsets) -> None:
        self._buffer.drop(partitions)
        self._positions.assign(partitions, committed)
        self._arrived.set()

    def on_records(self, partition: TopicPartition, epoch: int, records: Sequence[Record]) -> None:
        position = self._positions.get(partition)
        if position and position.epoch == epoch:
            self._buffer.add(RecordBatch.of(records))
            self._arrived.set()

    async def on_revoked(self, partitions: Sequence[TopicPartition], deadline: Deadline) -> CommitOffsets:
        positions = {p: self._positions[p] for p in partitions if p in self._positions}
        found = {p: one.promised for p, one in positions.items() if one.promised}
        if self.spec.auto_commit_seconds:
            found |= {p: Committed(one.confirmed) for p, one in positions.items() if one.confirmed is not None}
        self._drop(partitions)
        return found

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        self._drop(partitions, with_commits=True)

    def _drop(self, partitions: Sequence[TopicPartition], *, with_commits: bool = False) -> None:
        self._buffer.drop(partitions)
        self._positions.lose(partitions, with_commits=with_commits)
        self._forget_revoked()

    def _forget_revoked(self) -> None:
        """Forget what was revoked if no commit may name it: with assigned partitions, or with auto commit."""
        if self.membership.by_hand or self.spec.auto_commit_seconds:
            self._positions.revoked.clear()


class Read:
    """The records of one read, until its response was written or has failed."""

    def __init__(
        self,
        instance: ActiveInstance,
        batches: Sequence[RecordBatch],
        positions: Mapping[TopicPartition, PartitionPosition],
    ) -> None:
        """Take the records, and the positions of the assigned partitions at that moment."""
        self.batches = batches
        self.positions = positions
        self.assignments = {partition: one.assignment for partition, one in positions.items()}
        """The name of each partition's assignment, for clients."""
        self._instance = instance
        self._is_ended = False

    def end(self, sent: int, received: Received | None = arrived) -> None:
        """End the read: the first records were sent, the others return to the buffer. Only the first call counts.

        Args:
            sent: How many.
            received: Returns later whether the client has received them; if None, the client must name them.
        """
        if not self._is_ended:
            self._is_ended = True
            self._instance.end_read(self, sent, received)
