"""What the brokers do for producers: append batches, run transactions, and write the markers at their ends.

Each method runs on a broker, as a request to it, and raises what that broker refuses.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from confluent_kafka import KafkaError, KafkaException

from headrace_devkit.simulation.brokers import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, Brokers, java_hash
from headrace_devkit.simulation.offsets import CommittedOffset, OffsetsOfGroups, Partition
from headrace_devkit.simulation.partition_log import PartitionLog, UnwrittenRecord
from headrace_devkit.simulation.producer_states import AppendedBatch, ProducerStates
from headrace_devkit.simulation.transaction_coordinator import EndMarker, ProducerEpoch, TransactionCoordinator
from headrace_devkit.simulation.world import EPOCH_SECONDS

IN_SYNC = "replicas.in.sync"
"""A configuration of simulated topics alone: how many replicas are not behind, by default those of running brokers."""
MOST_BYTES = 1_048_588
"""Kafka's default of `max.message.bytes`."""
_RECORD_OVERHEAD_BYTES = 7
_BATCH_OVERHEAD_BYTES = 61
_MARKER_RETRY_SECONDS = 0.1
_LATER: Mapping[int, int] = {
    KafkaError.CONCURRENT_TRANSACTIONS: KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.COORDINATOR_NOT_AVAILABLE: KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.PRODUCER_FENCED: KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.TRANSACTION_ABORTABLE: KafkaError.INVALID_TXN_STATE,
}
"""What a leader answers for a refusal of the coordinator, to a client of librdkafka's age.
Source: Apache Kafka, `ReplicaManager`, `AddPartitionsToTxnManager`."""


MayCommit = Callable[[str, str, int, str | None, Iterable[Partition]], int]
"""Gets a group, and the id, generation and instance of a member."""


class CommittingMember(Protocol):
    """A member of a group that commits offsets."""

    @property
    def group(self) -> str:
        """Its group."""

    @property
    def member_id(self) -> str:
        """Its id."""

    @property
    def generation(self) -> int:
        """Of the group, or the member's epoch; -1 without one."""

    @property
    def instance_id(self) -> str | None:
        """Of a static member."""


class NewBatch(NamedTuple):
    """Records of one partition, as a producer sends them."""

    records: Sequence[UnwrittenRecord]
    producer: ProducerEpoch | None = None
    """None without idempotence."""
    first_sequence: int = 0
    transactional_id: str = ""


class RefusedRecords(Exception):
    """A batch that is refused for some of its records."""

    def __init__(self, indexes: Sequence[int]) -> None:
        super().__init__(indexes)
        self.indexes = indexes


class LateRequests:
    """Requests that a network holds back: the client sees a closed connection, and they arrive later nevertheless."""

    def __init__(self) -> None:
        self._next: dict[str, Callable[[], object]] = {}
        self._held: list[Callable[[], object]] = []

    def hold(self, kind: str, then: Callable[[], object] = lambda: None) -> None:
        """Hold back the next request of a kind, and call `then` when there is one."""
        self._next[kind] = then

    def arrives(self, kind: str, call: Callable[[], object]) -> None:
        """Raise `_TRANSPORT` for a delayed request."""
        if kind in self._next:
            self._held.append(call)
            self._next.pop(kind)()
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def deliver(self) -> None:
        """Let them arrive; no client gets the responses."""
        held, self._held = self._held, []
        for call in held:
            with contextlib.suppress(KafkaException):
                call()


class BrokerTransactions:
    """The producers and transactions of one cluster."""

    def __init__(self, brokers: Brokers, offsets: OffsetsOfGroups, may_commit: MayCommit) -> None:
        """Begin without any; `may_commit` returns the error code for a member that commits offsets, 0 if it may."""
        self._brokers = brokers
        self._world = brokers.world
        self._offsets = offsets
        self.late = LateRequests()
        self.hangs: Callable[[], bool] = lambda: False
        """Whether a client that loses the response to its offsets waits for ever. Source: librdkafka, issue 5511."""
        self.coordinator = TransactionCoordinator()
        self._producers: dict[PartitionLog, ProducerStates] = {}
        self._groups: dict[tuple[int, Partition], dict[str, None]] = {}
        """Groups with offsets of an open transaction, by producer id and partition of the offsets topic."""
        self._may_commit = may_commit

    # Producers -------------------------------------------------------------------------------------------------------

    def new_producer(self) -> ProducerEpoch:
        return self.coordinator.new_producer()

    def append(self, broker: int, topic: str, partition: int, batch: NewBatch) -> int:
        """Append a batch; return the offset of its first record, also for one that is there already."""
        self.late.arrives("Produce", lambda: self.append(broker, topic, partition, batch))
        log = self._led_by(broker, topic, partition)
        self._check_records(topic, batch)
        producer = batch.producer
        if producer is None:
            return log.append(batch.records)
        states = self._producers.setdefault(log, ProducerStates())
        count = len(batch.records)
        known = states.check(producer, batch.first_sequence, count)
        if known is not None:
            return known
        if batch.transactional_id and producer.id not in log.open_transactions:
            self._verify(batch.transactional_id, producer, (topic, partition))
        offset = log.append(batch.records, producer.id if batch.transactional_id else -1)
        states.appended(producer, AppendedBatch(batch.first_sequence, batch.first_sequence + count - 1, offset))
        return offset

    def _check_records(self, topic: str, batch: NewBatch) -> None:
        configs = self._brokers.topics[topic].configs
        sizes = [len(r.key or b"") + len(r.value or b"") + _RECORD_OVERHEAD_BYTES for r in batch.records]
        if sum(sizes) + _BATCH_OVERHEAD_BYTES > int(configs.get("max.message.bytes", MOST_BYTES)):
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))
        # No more replicas are required than there are. Source: Apache Kafka, `Partition.effectiveMinIsr`, with
        # acks=all, which every producer here has.
        required = min(int(configs.get("min.insync.replicas", 1)), len(self._brokers.ids))
        if required > int(configs.get(IN_SYNC, sum(map(self._brokers.is_up, self._brokers.ids)))):
            raise KafkaException(KafkaError(KafkaError.NOT_ENOUGH_REPLICAS))
        if configs.get("cleanup.policy", "").startswith("compact"):
            refused = [index for index, record in enumerate(batch.records) if record.key is None]
            if refused:
                raise RefusedRecords(refused)

    def _led_by(self, broker: int, topic: str, partition: int) -> PartitionLog:
        log = self._brokers.log(topic, partition)
        if log is None:
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        if log.leader != broker:
            raise KafkaException(KafkaError(KafkaError.NOT_LEADER_FOR_PARTITION))
        return log

    def _verify(self, name: str, producer: ProducerEpoch, key: Partition) -> None:
        """Have the coordinator confirm that a partition is in the transaction. Source: KIP-890, part 1."""
        try:
            if self.coordinator_of(name) is None:
                raise KafkaException(KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE))
            self.coordinator.verify(name, producer, key)
        except KafkaException as cause:
            code = cause.args[0].code()
            raise KafkaException(KafkaError(_LATER.get(code, code))) from cause

    # Transactions ----------------------------------------------------------------------------------------------------

    def coordinator_of(self, name: str) -> int | None:
        """Return the coordinator of a transactional id, if it is up."""
        broker = self._brokers.coordinator_of(name, TRANSACTIONS_TOPIC)
        return broker if broker is not None and self._brokers.is_up(broker) else None

    def open(
        self, broker: int, name: str, timeout_seconds: float, expected: ProducerEpoch | None = None
    ) -> ProducerEpoch:
        self._check_coordinator(broker, name)
        if timeout_seconds > self._brokers.configs.get("transaction.max.timeout.ms", 900_000) / 1000:
            raise KafkaException(KafkaError(KafkaError.INVALID_TRANSACTION_TIMEOUT))
        try:
            return self.coordinator.open(name, timeout_seconds, expected)
        finally:
            self._write_markers(name)

    def add(self, broker: int, name: str, producer: ProducerEpoch, keys: Sequence[Partition]) -> None:
        self._check_coordinator(broker, name)
        if any(self._brokers.log(*key) is None for key in keys):
            raise KafkaException(KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART))
        if self.coordinator.add(name, producer, keys, self._world.now):
            self._abort_in_time(name)

    def add_offsets(self, broker: int, name: str, producer: ProducerEpoch, group: str) -> None:
        self.add(broker, name, producer, [self.partition_of_group(group)])

    def partition_of_group(self, group: str) -> Partition:
        """Return the partition with the offsets of a group."""
        return OFFSETS_TOPIC, java_hash(group) % len(self._brokers.topics[OFFSETS_TOPIC].partitions)

    def commit_offsets(
        self,
        broker: int,
        name: str,
        producer: ProducerEpoch,
        member: CommittingMember,
        offsets: Mapping[Partition, CommittedOffset],
    ) -> None:
        """Take offsets that count when the transaction is committed."""
        self.late.arrives("TxnOffsetCommit", lambda: self.commit_offsets(broker, name, producer, member, offsets))
        group = member.group
        key = self.partition_of_group(group)
        log = self._brokers.log(*key)
        if log is None or log.leader != broker:
            raise KafkaException(KafkaError(KafkaError.NOT_COORDINATOR))
        states = self._producers.setdefault(log, ProducerStates())
        states.check_epoch(producer)
        if (producer.id, key) not in self._groups:
            self._verify(name, producer, key)
        if code := self._may_commit(group, member.member_id, member.generation, member.instance_id, offsets):
            raise KafkaException(KafkaError(code))
        if any(at.is_too_large for at in offsets.values()):
            raise KafkaException(KafkaError(KafkaError.OFFSET_METADATA_TOO_LARGE))
        self._groups.setdefault((producer.id, key), {})[group] = None
        self._offsets.commit_later(group, producer.id, offsets)

    def end(
        self, broker: int, name: str, producer: ProducerEpoch, *, committed: bool, version: int = 1
    ) -> ProducerEpoch:
        end = functools.partial(self.end, broker, name, producer, committed=committed, version=version)
        self.late.arrives("EndTxn", end)
        self._check_coordinator(broker, name)
        following = self.coordinator.end(name, producer, committed=committed, version=version)
        self._write_markers(name)
        return following

    def _check_coordinator(self, broker: int, name: str) -> None:
        if self.coordinator_of(name) != broker:
            raise KafkaException(KafkaError(KafkaError.NOT_COORDINATOR))

    def _abort_in_time(self, name: str) -> None:
        """Look at a transaction again when its time is over, at one of the coordinator's regular moments."""
        transaction = self.coordinator.transaction(name)
        assert transaction
        interval = self._brokers.configs.get("transaction.abort.timed.out.transaction.cleanup.interval.ms", 1e4) / 1000
        due = transaction.began_at + transaction.timeout_seconds
        began_at = transaction.began_at

        def look() -> None:
            if transaction.state != "ongoing" or transaction.began_at != began_at:
                return
            if self.coordinator_of(name) is None:
                self._world.call_later(interval, look)
            elif self.coordinator.abort_if_late(name, self._world.now):
                self._write_markers(name)

        self._world.call_at(math.ceil(due / interval) * interval, look)

    # Markers ---------------------------------------------------------------------------------------------------------

    def _write_markers(self, name: str) -> None:
        transaction = self.coordinator.transaction(name)
        if transaction is None or not transaction.is_ending:
            return
        for key in list(transaction.keys):
            self._write_later(name, key, transaction.marker, self._brokers.delay())

    def _write_later(self, name: str, key: Partition, marker: EndMarker, seconds: float) -> None:
        self._world.call_later(seconds, functools.partial(self._write_marker, name, key, marker))

    def _write_marker(self, name: str, key: Partition, marker: EndMarker) -> None:
        transaction = self.coordinator.transaction(name)
        if transaction is None or not transaction.is_ending or key not in transaction.keys:
            return
        log = self._brokers.log(*key)
        leader = log.leader if log else None
        if log and (leader is None or not self._brokers.is_up(leader)):
            self._write_later(name, key, marker, _MARKER_RETRY_SECONDS)
            return
        if log:  # else the topic was deleted, and its marker is not needed
            self._end_in(log, key, marker)
        self.coordinator.marked(name, key, marker)

    def _end_in(self, log: PartitionLog, key: Partition, marker: EndMarker) -> None:
        producer = marker.producer
        self._producers.setdefault(log, ProducerStates()).marked(producer)
        now_ms = int((EPOCH_SECONDS + self._world.now) * 1000)
        log.end_transaction(producer.id, committed=marker.committed, timestamp_ms=now_ms)
        for group in self._groups.pop((producer.id, key), {}):
            self._offsets.end_transaction(group, producer.id, committed=marker.committed)
