"""`confluent_kafka.Producer` of a run: the same calls, which raise the same errors.

Records go to a queue. Reports, errors and statistics wait until a thread calls `poll` or `flush`.
Source: librdkafka, `rdkafka.c`, `rdkafka_msg.c`; confluent-kafka-python, `Producer.c`.
"""

import json
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import confluent_kafka
from confluent_kafka import KafkaError, KafkaException

from headrace_devkit.simulation.broker_transactions import BrokerTransactions
from headrace_devkit.simulation.brokers import Brokers
from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.coordinator_requests import GroupMemberId
from headrace_devkit.simulation.greenlet_threads import Waiter, current_machine
from headrace_devkit.simulation.offsets import CommittedOffset, Partition
from headrace_devkit.simulation.produce_queue import QueuedRecord
from headrace_devkit.simulation.producer_sender import Sender, SenderSettings
from headrace_devkit.simulation.producer_transaction import ClientTransaction
from headrace_devkit.simulation.transaction_coordinator import ProducerEpoch

_PID_RETRY_SECONDS: Final = 0.5
_FOR_EVER: Final = 1e9
_DEFAULTS: Final[Mapping[str, Any]] = {
    "acks": "all",
    "batch.num.messages": 10_000,
    "batch.size": 1_000_000,
    "delivery.timeout.ms": 300_000,
    "enable.idempotence": False,
    "linger.ms": 5,
    "max.in.flight.requests.per.connection": 1_000_000,
    "message.max.bytes": 1_000_000,
    "queue.buffering.max.kbytes": 1_048_576,
    "queue.buffering.max.messages": 100_000,
    "retry.backoff.max.ms": 1000,
    "retry.backoff.ms": 100,
    "socket.timeout.ms": 60_000,
    "statistics.interval.ms": 0,
    "topic.metadata.refresh.interval.ms": 300_000,
    "transaction.timeout.ms": 60_000,
    "transactional.id": "",
}
"""librdkafka's, of the properties that a run honours; others change nothing."""
_ALIASES: Final = {"message.timeout.ms": "delivery.timeout.ms", "queue.buffering.max.ms": "linger.ms"}
_MOST_IN_FLIGHT: Final = 5
"""Of an idempotent producer."""


class ProducedMessage:
    """`confluent_kafka.Message`, as a delivery report has it."""

    def __init__(self, record: QueuedRecord, error: KafkaError | None, offset: int | None, seconds: float) -> None:
        self._record = record
        self._error = error
        self._offset = offset
        self._seconds = seconds

    def error(self) -> KafkaError | None:
        return self._error

    def topic(self) -> str:
        return self._record.topic

    def partition(self) -> int | None:
        return None if self._record.partition < 0 else self._record.partition

    def offset(self) -> int | None:
        return self._offset

    def key(self) -> bytes | None:
        return self._record.key

    def value(self) -> bytes | None:
        return self._record.value

    def headers(self) -> Sequence[Any] | None:
        return self._record.headers or None

    def timestamp(self) -> tuple[int, int]:
        return confluent_kafka.TIMESTAMP_CREATE_TIME, self._record.timestamp_ms

    def latency(self) -> float:
        return self._seconds


class SimulatedProducer:
    """A producer of the machine whose code makes it."""

    def __init__(self, brokers: Brokers, transactions: BrokerTransactions, properties: Mapping[str, Any]) -> None:
        """Open it; `properties` are librdkafka's."""
        self._settings = _settings_of(properties)
        self._error_cb = properties.get("error_cb")
        # Events
        self._events: deque[Callable[[], object]] = deque()
        self._waiters: list[Waiter] = []
        self._fatal: KafkaError | None = None
        # Records
        self._messages = 0
        """Those without a report that a callback has had."""
        self._bytes = 0
        # What sends
        self._cluster = ClientCluster(brokers, current_machine(), self._connection_failed)
        self._transactions = transactions
        self._counts = _RequestCounts()
        sending = _sender_settings(self._settings)
        self._transaction: ClientTransaction | None = None
        self._sender = Sender(self._cluster, transactions, sending, self)
        if name := sending.transactional_id:
            seconds = self._settings["transaction.timeout.ms"] / 1000
            owned = ClientTransaction(name, seconds, self._cluster, transactions, self, sending.socket_seconds)
            owned.sender, self._transaction = self._sender, owned
        elif sending.is_idempotent:
            self._sender.need_producer()
        if self._settings["statistics.interval.ms"] and properties.get("stats_cb"):
            self._report_statistics(properties["stats_cb"])
        self._cluster.refresh_every(self._settings["topic.metadata.refresh.interval.ms"] / 1000)

    # Records ---------------------------------------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        partition: int = -1,
        callback: Callable[[Any, Any], object] | None = None,
        on_delivery: Callable[[Any, Any], object] | None = None,
        timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Queue a record; `callback` gets its report.

        Raises:
            BufferError: The queue is full.
            KafkaException: The client refuses the record.
        """
        pairs = list(headers.items()) if isinstance(headers, dict) else list(headers or ())
        at = timestamp or int(self._cluster.machine.now * 1000)
        record = QueuedRecord(topic, partition, _bytes(key), _bytes(value), pairs, at, callback or on_delivery)
        settings = self._settings
        if self._fatal:
            raise _refused(KafkaError._FATAL)
        if self._transaction and self._transaction.state != "in_transaction":
            raise _refused(KafkaError._STATE)
        if record.size_bytes > settings["message.max.bytes"]:
            raise _refused(KafkaError.MSG_SIZE_TOO_LARGE)
        most_bytes = settings["queue.buffering.max.kbytes"] * 1024
        if self._messages >= settings["queue.buffering.max.messages"] or self._bytes + record.size_bytes > most_bytes:
            raise BufferError("Local: Queue full")
        if code := self._sender.refusal_of(topic, partition):
            raise _refused(code)
        self._messages += 1
        self._bytes += record.size_bytes
        self._sender.put(record)

    def poll(self, timeout: float = -1) -> int:
        """Serve events, and wait for the first of them; return how many were served."""
        if not self._events and timeout:
            self._wait(timeout)
        return self._serve()

    def flush(self, timeout: float = -1) -> int:
        """Send at once, and serve events until nothing is left; return what is left after the time limit."""
        end = self._cluster.world.now + (_FOR_EVER if timeout < 0 else timeout)
        self._sender.flushes += 1
        self._sender.wake()
        try:
            self._serve()
            while len(self) and self._cluster.world.now < end:
                self._wait(end - self._cluster.world.now)
                self._serve()
        finally:
            self._sender.flushes -= 1
        return len(self)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Drop records, each with its report."""
        self._sender.purge(in_queue=in_queue, in_flight=in_flight)

    def close(self) -> None:
        """End the client at once."""
        self._cluster.close()

    def __len__(self) -> int:
        return self._messages + sum(1 for event in self._events if not isinstance(event, _Report))

    def __bool__(self) -> bool:
        return True

    def _wait(self, seconds: float) -> None:
        waiter = Waiter()
        self._waiters.append(waiter)
        waiter.wait(None if seconds < 0 or seconds >= _FOR_EVER else seconds)
        if waiter in self._waiters:
            self._waiters.remove(waiter)

    def _serve(self) -> int:
        count = len(self._events)
        for _ in range(count):
            self._events.popleft()()
        return count

    def _event(self, event: Callable[[], object]) -> None:
        self._events.append(event)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.wake()

    # Transactions ----------------------------------------------------------------------------------------------------

    def init_transactions(self, timeout: float = -1) -> None:
        self._required().open(timeout)

    def begin_transaction(self) -> None:
        self._required().begin()

    def send_offsets_to_transaction(self, positions: Sequence[Any], group_metadata: bytes, timeout: float = -1) -> None:
        offsets = {
            (one.topic, one.partition): CommittedOffset(one.offset, one.metadata or "", one.leader_epoch or -1)
            for one in positions
            if one.offset >= 0
        }
        self._required().send_offsets(offsets, GroupMemberId.of(group_metadata), timeout)

    def commit_transaction(self, timeout: float = -1) -> None:
        self._required().commit(timeout)

    def abort_transaction(self, timeout: float = -1) -> None:
        self._required().abort(timeout)

    def _required(self) -> ClientTransaction:
        if self._transaction is None:
            text = "The Transactional API requires transactional.id to be configured"
            raise KafkaException(KafkaError(KafkaError._NOT_CONFIGURED, text))
        return self._transaction

    # What the sender and the transaction say -------------------------------------------------------------------------

    def report(self, record: QueuedRecord, error: KafkaError | None, offset: int | None) -> None:
        if error is not None and self._transaction:
            self._transaction.current.failed_reports += 1
        message = ProducedMessage(record, error, offset, self._cluster.world.now - record.queued_at)
        self._event(_Report(self, record, message))

    def reported(self, record: QueuedRecord) -> None:
        """Count a record whose report is being served."""
        self._messages -= 1
        self._bytes -= record.size_bytes

    def may_send(self, key: Partition) -> bool:
        return not self._fatal and (self._transaction is None or self._transaction.may_send(key))

    def must_abort(self, code: int, text: str, *, bumps: bool) -> bool:
        return self._transaction is not None and self._transaction.must_abort(code, text, bumps=bumps)

    def fail_for_good(self, code: int, text: str) -> None:
        if self._fatal:
            return
        self._fatal = KafkaError(code, text, fatal=True)
        self._event(self._raise_fatal)
        if self._transaction:
            self._transaction.failed(code, text)
        self._sender.purge(in_queue=True, in_flight=False)

    def _raise_fatal(self) -> None:
        raise KafkaException(self._fatal)

    def request_producer(self, expected: ProducerEpoch | None) -> None:
        if self._transaction:
            self._transaction.request_producer(expected)
            return

        def answered(response: Any) -> None:
            if isinstance(response, KafkaError):
                self._cluster.after(_PID_RETRY_SECONDS, lambda: self.request_producer(expected))
            else:
                self._sender.assigned(response)

        self._cluster.send_to_any(lambda _broker: self._transactions.new_producer(), answered)

    def count_request(self, broker: int | str, kind: str, response: Any = None, *, is_repeated: bool = False) -> None:
        self._counts.count(broker, kind, response, is_repeated=is_repeated)

    def _connection_failed(self, error: KafkaError) -> None:
        if call := self._error_cb:
            self._event(lambda: call(error))

    # Statistics ------------------------------------------------------------------------------------------------------

    def _report_statistics(self, call: Callable[[str], object]) -> None:
        def tell() -> None:
            text = self._counts.text(int(self._cluster.world.now * 1e6))
            self._event(lambda: call(text))
            self._cluster.after(interval, tell)

        interval = self._settings["statistics.interval.ms"] / 1000
        self._cluster.after(interval, tell)


class _Report:
    """The event of a delivery report."""

    def __init__(self, producer: SimulatedProducer, record: QueuedRecord, message: ProducedMessage) -> None:
        self._producer = producer
        self._record = record
        self._message = message

    def __call__(self) -> None:
        self._producer.reported(self._record)
        if self._record.callback is not None:
            self._record.callback(self._message.error(), self._message)


class _RequestCounts:
    """What the statistics say of each broker, as far as Headrace reads it."""

    def __init__(self) -> None:
        self._brokers: dict[str, dict[str, Any]] = {}

    def count(self, broker: int | str, kind: str, response: Any, *, is_repeated: bool) -> None:
        """Count a request, or its response."""
        name = broker if isinstance(broker, str) else f"broker-{broker}:9092/{broker}"
        counts = self._brokers.setdefault(
            name, {"req_timeouts": 0, "txretries": 0, "disconnects": 0, "req": defaultdict(int)}
        )
        if response is None:
            counts["req"][kind] += 1
            counts["txretries"] += is_repeated
        elif isinstance(response, KafkaError):
            is_late = response.code() == KafkaError._TIMED_OUT
            counts["req_timeouts"] += is_late
            counts["disconnects"] += is_late or response.code() == KafkaError._TRANSPORT

    def text(self, micros: int) -> str:
        return json.dumps({"ts": micros, "brokers": self._brokers})


def _settings_of(properties: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(_DEFAULTS)
    for name, value in properties.items():
        known = _ALIASES.get(name, name)
        if known in settings:
            settings[known] = type(settings[known])(value) if isinstance(settings[known], int) else value
    if settings["transactional.id"]:
        settings["enable.idempotence"] = True
    return settings


def _sender_settings(settings: Mapping[str, Any]) -> SenderSettings:
    is_idempotent = settings["enable.idempotence"]
    in_flight = settings["max.in.flight.requests.per.connection"]
    transactional_id = settings["transactional.id"]
    delivery_ms = settings["delivery.timeout.ms"]
    if transactional_id and delivery_ms == _DEFAULTS["delivery.timeout.ms"]:
        delivery_ms = settings["transaction.timeout.ms"]
    return SenderSettings(
        linger_seconds=float(settings["linger.ms"]) / 1000,
        batch_bytes=settings["batch.size"],
        batch_records=settings["batch.num.messages"],
        in_flight=min(in_flight, _MOST_IN_FLIGHT) if is_idempotent else in_flight,
        delivery_seconds=delivery_ms / 1000,
        socket_seconds=settings["socket.timeout.ms"] / 1000,
        backoff_seconds=settings["retry.backoff.ms"] / 1000,
        most_backoff_seconds=settings["retry.backoff.max.ms"] / 1000,
        is_idempotent=is_idempotent,
        is_acknowledged=str(settings["acks"]) != "0",
        transactional_id=transactional_id,
    )


def _bytes(data: bytes | str | None) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


def _refused(code: int) -> KafkaException:
    return KafkaException(KafkaError(code, f"Unable to produce message: {KafkaError(code).str()}"))
