"""What librdkafka's threads do for a producer: batches go to the leaders, in order, until each record has its report.

Each partition has a queue. A batch that fails for a moment is sent again with the same sequence numbers. Nothing of
its partition is in flight then. A number that will never be sent makes the client bump its epoch: it waits
for what is in flight, gets another epoch, and numbers anew. Source: librdkafka, `rd_kafka_handle_Produce_error`,
`rd_kafka_handle_idempotent_Produce_error`, `rd_kafka_toppar_producer_serve`, `rd_kafka_idemp_drain_epoch_bump`.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol

from confluent_kafka import KafkaError

from headrace_devkit.simulation.broker_transactions import BrokerTransactions, NewBatch, RefusedRecords
from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.offsets import Partition
from headrace_devkit.simulation.partition_log import UnwrittenRecord
from headrace_devkit.simulation.produce_queue import ProducedBatch, ProduceQueue, QueuedRecord
from headrace_devkit.simulation.producer_topics import ProducedTopics
from headrace_devkit.simulation.transaction_coordinator import ProducerEpoch

_SCAN_SECONDS = 1.0
"""How often librdkafka looks for records whose time is over."""
_UNKNOWN_SECONDS = 1.0
_BUSY_SECONDS = 0.0001
_REFRESH = (
    KafkaError._TRANSPORT,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.KAFKA_STORAGE_ERROR,
)
"""Errors after which the client looks for the leader, and sends again."""
_AGAIN = (
    *_REFRESH,
    KafkaError._TIMED_OUT,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
)
IdempotenceState = Literal["none", "requested", "assigned", "draining", "waits_for_abort"]


class SenderSettings(NamedTuple):
    """The properties of a producer that decide how it sends."""

    linger_seconds: float
    batch_bytes: int
    batch_records: int
    in_flight: int
    delivery_seconds: float
    socket_seconds: float
    backoff_seconds: float
    most_backoff_seconds: float
    is_idempotent: bool
    is_acknowledged: bool
    transactional_id: str


class SenderOwner(Protocol):
    """What a sender needs of its client."""

    def report(self, record: QueuedRecord, error: KafkaError | None, offset: int | None) -> None:
        """Take the report of a record."""

    def count_request(self, broker: int | str, kind: str, response: Any = None, *, is_repeated: bool = False) -> None:
        """Count a request that is sent (`response` is None), or its response, in the statistics."""

    def fail_for_good(self, code: int, text: str) -> None:
        """Take a fatal error."""

    def may_send(self, key: Partition) -> bool:
        """Whether records of a partition may be sent now."""

    def must_abort(self, code: int, text: str, *, bumps: bool) -> bool:
        """Take an error that ends a transaction; return whether there is one."""

    def request_producer(self, expected: ProducerEpoch | None) -> None:
        """Ask for a producer id or epoch, and call `Sender.assigned` with it."""


class Sender:
    """The queues of one producer."""

    def __init__(
        self, cluster: ClientCluster, transactions: BrokerTransactions, settings: SenderSettings, owner: SenderOwner
    ) -> None:
        # For good
        self._cluster = cluster
        self._world = cluster.world
        self._transactions = transactions
        self._settings = settings
        self._owner = owner
        # Records
        self._queues: dict[Partition, ProduceQueue] = {}
        self._topics = ProducedTopics(cluster)
        # Sending
        self.producer: ProducerEpoch | None = None
        self.state: IdempotenceState = "none"
        self.flushes = 0
        """While it is not 0, a batch does not wait for more records."""
        self._timers = _SenderTimers(cluster, self._serve, self._scan)
        self._on_broker: dict[int, int] = {}
        """Requests in flight, by broker."""

    # Records ---------------------------------------------------------------------------------------------------------

    def refusal_of(self, topic: str, partition: int) -> int:
        """Return the error code of a record that is refused at once; 0 if it is taken."""
        if self._topics.is_missing(topic):
            return int(KafkaError._UNKNOWN_TOPIC)
        count = self._cluster.count(topic)
        return int(KafkaError._UNKNOWN_PARTITION) if count and partition >= count else 0

    def put(self, record: QueuedRecord) -> None:
        """Queue a record."""
        now = self._world.now
        record.queued_at = now
        record.deadline = now + self._settings.delivery_seconds
        if self._cluster.count(record.topic):
            self._queue(record)
        else:
            self._topics.unplaced.setdefault(record.topic, deque()).append(record)
        self._timers.scan_in(_SCAN_SECONDS)
        self._timers.serve_in(0.0)

    def _queue(self, record: QueuedRecord) -> None:
        if record.partition < 0:
            record.partition = self._topics.choose(record.topic, record.key)
        elif record.partition >= self._cluster.count(record.topic):
            self._fail([record], KafkaError._UNKNOWN_PARTITION)
            return
        key = record.topic, record.partition
        if key not in self._queues:
            self._queues[key] = ProduceQueue(key)
        self._queues[key].put(record)

    def purge(self, *, in_queue: bool, in_flight: bool, aborts: bool = False) -> None:
        """Drop records, each with its report; one that `aborts` a transaction leaves no gap in the numbers."""
        if in_queue:
            self._fail(self._topics.drop(lambda _: True), KafkaError._PURGE_QUEUE)
            for queue in self._queues.values():
                dropped = queue.drop(lambda _: True)
                if aborts:
                    queue.skip(len(dropped))
                self._fail(dropped, KafkaError._PURGE_QUEUE)
        for queue in self._queues.values() if in_flight else ():
            for batch in queue.in_flight:
                if not batch.is_purged:
                    batch.is_purged = True
                    self._fail(batch.records, KafkaError._PURGE_INFLIGHT)

    def _fail(self, records: Iterable[QueuedRecord], code: int) -> None:
        for record in records:
            self._owner.report(record, KafkaError(code), None)

    def wake(self) -> None:
        """Look again at what may be sent."""
        self._timers.serve_in(0.0)

    # Sending ---------------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        unplaced = self._topics.unplaced
        for topic in list(unplaced):
            if self._cluster.count(topic):
                for record in unplaced.pop(topic):
                    self._queue(record)
            elif self._topics.is_missing(topic):
                self._fail(unplaced.pop(topic), KafkaError._UNKNOWN_TOPIC)
            else:
                self._topics.look(topic, self.wake, _UNKNOWN_SECONDS)
        working = [queue for queue in self._queues.values() if queue.has_work]
        if not working:
            return
        if self._settings.is_idempotent and self.state != "assigned":
            self.need_producer()
            return
        for queue in working:
            while queue.has_work and self._send_next(queue):
                pass

    def _send_next(self, queue: ProduceQueue) -> bool:
        """Send the next batch of a partition if it may be sent now; else come back when it may."""
        topic, partition = queue.key
        leader = self._cluster.leader(topic, partition)
        if leader is None:
            if self._topics.is_missing(topic):
                self._fail(queue.drop(lambda _: True), KafkaError._UNKNOWN_TOPIC)
            else:
                self._topics.look(topic, self.wake, self._settings.backoff_seconds)
            return False
        now = self._world.now
        if now < queue.not_before:
            self._timers.serve_in(queue.not_before - now)
            return False
        if not self._owner.may_send(queue.key) or self._on_broker.get(leader, 0) >= self._settings.in_flight:
            return False  # the response wakes it
        if queue.again:
            if queue.in_flight:
                return False
            self._send(queue, queue.again.pop(0), leader)
            return True
        records, is_full = queue.take(self._settings.batch_bytes, self._settings.batch_records)
        due = records[0].queued_at + self._settings.linger_seconds
        if not (is_full or self.flushes or now >= due):
            self._timers.serve_in(due - now)
            return False
        self._send(queue, queue.batch(records, self.producer), leader)
        return True

    def _send(self, queue: ProduceQueue, batch: ProducedBatch, leader: int) -> None:
        queue.in_flight.append(batch)
        self._on_broker[leader] = self._on_broker.get(leader, 0) + 1
        new = [UnwrittenRecord(r.key, r.value, r.headers, r.timestamp_ms) for r in batch.records]
        request = NewBatch(new, batch.producer, batch.first_sequence, self._settings.transactional_id)
        rest = max(0.001, batch.records[0].deadline - self._world.now)
        self._owner.count_request(leader, "Produce")
        self._cluster.send(
            leader,
            functools.partial(self._append, leader, queue.key, request),
            functools.partial(self._answered, queue, batch, leader),
            seconds=min(self._settings.socket_seconds, rest),
        )

    def _append(self, leader: int, key: Partition, batch: NewBatch) -> Any:
        try:
            return self._transactions.append(leader, *key, batch)
        except RefusedRecords as refused:
            return refused

    def _answered(self, queue: ProduceQueue, batch: ProducedBatch, leader: int, response: Any) -> None:
        self._on_broker[leader] -= 1
        queue.in_flight.remove(batch)
        self._owner.count_request(leader, "Produce", response)
        if isinstance(response, int):
            queue.acknowledged = batch.first_sequence + len(batch.records)
            offset = response if self._settings.is_acknowledged else None
            for index, record in enumerate(batch.records if not batch.is_purged else ()):
                self._owner.report(record, None, None if offset is None else offset + index)
        elif isinstance(response, RefusedRecords):
            self._refused_records(batch, response.indexes)
        else:
            self._failed(queue, batch, response.code())
        if self.state == "draining":
            self._bump_when_drained()
        self._timers.serve_in(0.0)

    # Failures --------------------------------------------------------------------------------------------------------

    def _failed(self, queue: ProduceQueue, batch: ProducedBatch, code: int) -> None:
        if batch.producer is not None and code == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER:
            if batch.first_sequence > queue.acknowledged and batch.producer == self.producer:
                self._send_again(queue, batch)
                self._bump(code, "skipped sequence numbers")
                return
            self._owner.fail_for_good(code, f"{len(batch.records)} message(s) failed due to sequence desynchronization")
        elif code in _AGAIN:
            if code in _REFRESH:
                self._topics.forget_leader(queue.key)
            self._send_again(queue, batch)
            return
        else:
            self._give_up(batch, code)
        if not batch.is_purged:
            self._fail(batch.records, code)

    def _send_again(self, queue: ProduceQueue, batch: ProducedBatch) -> None:
        if batch.is_purged:
            return
        now = self._world.now
        self._fail([record for record in batch.records if record.deadline <= now], KafkaError._MSG_TIMED_OUT)
        batch.records = [record for record in batch.records if record.deadline > now]
        if not batch.records:
            return
        pause = min(self._settings.backoff_seconds * 2**batch.tries, self._settings.most_backoff_seconds)
        batch.tries += 1
        queue.not_before = now + pause * self._world.random.uniform(0.8, 1.2)
        queue.again.append(batch)
        queue.again.sort(key=lambda one: one.first_sequence)

    def _give_up(self, batch: ProducedBatch, code: int) -> None:
        """Take an error for which records are not sent again."""
        if batch.producer is None:
            return
        text = f"ProduceRequest with {len(batch.records)} message(s) failed: {KafkaError(code).str()}"
        if self._settings.transactional_id and code == KafkaError.INVALID_PRODUCER_EPOCH:
            self._owner.fail_for_good(KafkaError._FENCED, f"{text}: fenced by newer producer instance")
        elif not self._owner.must_abort(code, text, bumps=False):
            self._bump(code, "message sequence gap")

    def _refused_records(self, batch: ProducedBatch, indexes: Sequence[int]) -> None:
        """Report a batch with refused records: all alike if it is one, else the others by an error of their own.

        Source: KIP-467, as in librdkafka's `rd_kafka_handle_Produce_parse`.
        """
        code = int(KafkaError.INVALID_RECORD)
        self._give_up(batch, code)
        for index, record in enumerate(batch.records if not batch.is_purged else ()):
            is_refused = len(indexes) == 1 or index in indexes
            own = code if is_refused else int(KafkaError._INVALID_DIFFERENT_RECORD)
            self._owner.report(record, KafkaError(own), None)

    def _scan(self) -> None:
        """Report the records whose time is over.

        The client has made batches of them, also while no broker takes any. So it does not bump its epoch here: the
        broker refuses the next batch, because numbers are missing.
        """
        now = self._world.now
        is_over: Callable[[QueuedRecord], bool] = lambda record: record.deadline <= now  # noqa: E731
        self._fail(self._topics.drop(is_over), KafkaError._MSG_TIMED_OUT)
        for queue in self._queues.values():
            self._fail(queue.drop(is_over), KafkaError._MSG_TIMED_OUT)
        if self._topics.unplaced or any(queue.has_work or queue.in_flight for queue in self._queues.values()):
            self._timers.scan_in(_SCAN_SECONDS)

    # Idempotence -----------------------------------------------------------------------------------------------------

    def need_producer(self) -> None:
        """Ask for a producer id, unless that is being done."""
        if self.state == "none":
            self.state = "requested"
            self._owner.request_producer(self.producer)

    def assigned(self, producer: ProducerEpoch) -> None:
        """Continue with a producer id, or another epoch of it."""
        self.producer, self.state = producer, "assigned"
        for queue in self._queues.values():
            queue.renumber()
        self._timers.serve_in(0.0)

    def _bump(self, code: int, text: str) -> None:
        """Get another epoch; in a transaction when that is aborted."""
        if self.state != "assigned":
            return
        if self._owner.must_abort(code, text, bumps=True):
            self.state = "waits_for_abort"
        else:
            self.bump_after_abort()

    def bump_after_abort(self) -> None:
        """Get another epoch as soon as nothing is in flight."""
        self.state = "draining"
        self._bump_when_drained()

    def _bump_when_drained(self) -> None:
        if not any(queue.in_flight for queue in self._queues.values()):
            self.state = "none"
            self.need_producer()


class _SenderTimers:
    """When a sender looks at its queues: for what may be sent, and for records whose time is over."""

    def __init__(self, cluster: ClientCluster, serve: Callable[[], None], scan: Callable[[], None]) -> None:
        self._cluster = cluster
        self._serve = serve
        self._scan = scan
        self._next_serve: Any = None
        self._next_scan: Any = None

    def serve_in(self, seconds: float) -> None:
        seconds = max(seconds, _BUSY_SECONDS)
        if self._next_serve is not None:
            if self._next_serve.at <= self._cluster.world.now + seconds:
                return
            self._next_serve.cancel()
        self._next_serve = self._cluster.after(seconds, self._serve_now)

    def scan_in(self, seconds: float) -> None:
        if self._next_scan is None:
            self._next_scan = self._cluster.after(seconds, self._scan_now)

    def _serve_now(self) -> None:
        self._next_serve = None
        self._serve()

    def _scan_now(self) -> None:
        self._next_scan = None
        self._scan()
