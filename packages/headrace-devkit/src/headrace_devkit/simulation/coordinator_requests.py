"""The requests of a client for its transaction: to the coordinator of transactions, and to that of a group.

A request that was lost, or was received by another broker, is sent again; so it may be done twice.
Source: librdkafka, `rdkafka_txnmgr.c`, `rd_kafka_coord_req`, `rd_kafka_buf_retry`.
"""

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from confluent_kafka import KafkaError

from headrace_devkit.simulation.broker_transactions import BrokerTransactions
from headrace_devkit.simulation.brokers import OFFSETS_TOPIC, TRANSACTIONS_TOPIC
from headrace_devkit.simulation.client_cluster import ClientCluster
from headrace_devkit.simulation.offsets import CommittedOffset, Partition
from headrace_devkit.simulation.transaction_coordinator import ProducerEpoch

_FRAME: Final = b"CGMDv2:"
_ADD_RETRY_SECONDS: Final = 0.5
_CONCURRENT_RETRY_SECONDS: Final = 0.02
_OFFSETS_RETRY_SECONDS: Final = 0.5
_FIND_RETRY_SECONDS: Final = 0.5
_RETRY_SECONDS: Final = 0.1
_MOST_RETRY_SECONDS: Final = 1.0
LOST: Final = (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)
"""Errors of a request that was perhaps carried out."""
MOVED: Final = (KafkaError.NOT_COORDINATOR, KafkaError.COORDINATOR_NOT_AVAILABLE)
BUSY: Final = (KafkaError.CONCURRENT_TRANSACTIONS, KafkaError.COORDINATOR_LOAD_IN_PROGRESS)
FENCES: Final = (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
FATAL: Final = (*FENCES, KafkaError.INVALID_TXN_STATE, KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
NEEDS_EPOCH: Final = (KafkaError.UNKNOWN_PRODUCER_ID, KafkaError.INVALID_PRODUCER_ID_MAPPING)


class GroupMemberId(NamedTuple):
    """A member of a group, as the client's metadata names it."""

    group: str
    member_id: str
    generation: int
    instance_id: str | None

    @classmethod
    def of(cls, metadata: bytes) -> "GroupMemberId":
        """Read the client's metadata. Source: librdkafka, `rd_kafka_consumer_group_metadata_write`."""
        start = len(_FRAME)
        generation = int.from_bytes(metadata[start : start + 4], sys.byteorder, signed=True)
        group, member, instance = metadata[start + 4 :].split(b"\0", 2)
        is_null = instance[:1] == b"\1"
        return cls(group.decode(), member.decode(), generation, None if is_null else instance[1:-1].decode())

    @property
    def metadata(self) -> bytes:
        """What the client returns for it."""
        instance = b"\1" if self.instance_id is None else b"\0" + self.instance_id.encode()
        names = b"\0".join((self.group.encode(), self.member_id.encode(), instance))
        return _FRAME + self.generation.to_bytes(4, sys.byteorder, signed=True) + names + b"\0"


class RequestCounter(Protocol):
    """Counts requests for the statistics."""

    def count_request(self, broker: int | str, kind: str, response: Any = None, *, is_repeated: bool = False) -> None:
        """Count a request that is sent (`response` is None), or its response."""


class CoordinatorRequests:
    """Sends requests to the coordinator of a transactional id, wherever it is."""

    def __init__(self, name: str, cluster: ClientCluster, counter: RequestCounter, request_seconds: float) -> None:
        self._request_seconds = request_seconds
        self._name = name
        self._topic = TRANSACTIONS_TOPIC
        self.cluster = cluster
        self._counter = counter
        self._label = "TxnCoordinator"
        self._coordinator: int | None = None

    def of_group(self, group: str) -> "CoordinatorRequests":
        """Return the same for the coordinator of a group."""
        found = CoordinatorRequests(group, self.cluster, self._counter, self._request_seconds)
        found._topic, found._label = OFFSETS_TOPIC, "GroupCoordinator"
        return found

    def send(
        self,
        kind: str,
        call: Callable[[int], Any],
        answered: Callable[[Any, Callable[[], None]], None],
        *,
        pause_seconds: float = 0.0,
        seconds: float = 1e9,
        tries: int = 0,
    ) -> None:
        """Send a request; `answered` gets the response, and a call that sends the request again after a pause."""
        repeat = functools.partial(
            self.send, kind, call, answered, pause_seconds=pause_seconds, seconds=seconds, tries=tries + 1
        )

        def again() -> None:
            pause = pause_seconds or min(_RETRY_SECONDS * 2**tries, _MOST_RETRY_SECONDS)
            self.cluster.after(pause, repeat)

        def received(response: Any) -> None:
            self._counter.count_request(self._label, kind, response)
            if isinstance(response, KafkaError) and response.code() in (*LOST, *MOVED):
                self._coordinator = None
            answered(response, again)

        if self._coordinator is None:
            self._find(repeat)
            return
        self._counter.count_request(self._label, kind, is_repeated=tries > 0 and not pause_seconds)
        broker = self._coordinator
        limit = min(seconds, self._request_seconds)
        self.cluster.send(broker, functools.partial(call, broker), received, self._label, limit)

    def _find(self, then: Callable[[], None]) -> None:
        def answered(response: Any) -> None:
            if isinstance(response, int):
                self._coordinator = response
                then()
            else:
                self.cluster.after(_FIND_RETRY_SECONDS, lambda: self._find(then))

        brokers = self.cluster.brokers
        self.cluster.send_to_any(lambda _broker: brokers.coordinator_of(self._name, self._topic), answered)


class TransactionForOffsets(Protocol):
    """What a request with offsets needs of its transaction."""

    name: str
    state: Any

    @property
    def producer(self) -> ProducerEpoch:
        """Its producer."""

    def must_abort(self, code: int, text: str, *, bumps: bool) -> bool:
        """Take an error after which it can only be aborted."""

    def fail(self, code: int, text: str) -> None:
        """Take a fatal error."""


class TransactionOffsets:
    """Adds offsets of a group to a transaction: to the coordinator of transactions first, then to the group's."""

    def __init__(
        self,
        transaction: TransactionForOffsets,
        coordinator: CoordinatorRequests,
        transactions: BrokerTransactions,
        offsets: Mapping[Partition, CommittedOffset],
        member: GroupMemberId,
    ) -> None:
        self._transaction = transaction
        self._coordinator = coordinator
        self._transactions = transactions
        self._offsets = offsets
        self._member = member
        self._end = 0.0
        self._done: Callable[[KafkaError | None], None]

    def send(self, limit_seconds: float, done: Callable[[KafkaError | None], None]) -> None:
        """Send; `done` gets the error, or None when the group's coordinator has the offsets."""
        self._end = self._coordinator.cluster.world.now + limit_seconds
        self._done = done
        name, producer, group = self._transaction.name, self._transaction.producer, self._member.group
        add = lambda broker: self._transactions.add_offsets(broker, name, producer, group)  # noqa: E731
        self._coordinator.send("AddOffsetsToTxn", add, self._added)

    def _added(self, response: Any, again: Callable[[], None]) -> None:
        if not isinstance(response, KafkaError):
            self._commit()
        elif not self._is_retried(response.code(), again):
            self._failed(response.code(), "Failed to add offsets to transaction")

    def _commit(self) -> None:
        name, producer, member = self._transaction.name, self._transaction.producer, self._member
        call = lambda broker: self._transactions.commit_offsets(  # noqa: E731
            broker, name, producer, member, self._offsets
        )
        requests = self._coordinator.of_group(member.group)
        rest = max(0.001, self._end - self._coordinator.cluster.world.now)
        requests.send("TxnOffsetCommit", call, self._committed, pause_seconds=_OFFSETS_RETRY_SECONDS, seconds=rest)

    def _committed(self, response: Any, again: Callable[[], None]) -> None:
        if not isinstance(response, KafkaError):
            self._done(None)
        elif not self._is_retried(response.code(), again):
            self._failed(response.code(), "Failed to commit offsets to transaction")

    def _is_retried(self, code: int, again: Callable[[], None]) -> bool:
        if self._transaction.state != "in_transaction":
            self._done(error_that_aborts(code, "the transaction has failed"))
            return True
        may_pass = (*LOST, *MOVED, *BUSY, KafkaError.REQUEST_TIMED_OUT, KafkaError.UNKNOWN_TOPIC_OR_PART)
        if code in LOST and self._transactions.hangs():
            return True
        if code not in may_pass or self._coordinator.cluster.world.now >= self._end:
            return False
        again()
        return True

    def _failed(self, code: int, doing: str) -> None:
        text = f"{doing}: {KafkaError(code).str()}"
        if code in (*FATAL, KafkaError.INVALID_PRODUCER_ID_MAPPING):
            self._transaction.fail(code, text)
            return
        self._transaction.must_abort(code, text, bumps=False)
        self._done(error_that_aborts(normal_code(code), text))


class TransactionForPartitions(Protocol):
    """What the partitions of a transaction need of it."""

    def add_partitions(self, keys: Sequence[Partition], answered: Callable[[int], None]) -> None:
        """Have the coordinator add partitions; `answered` gets 0, or the code of an error that may pass."""

    def wake(self) -> None:
        """Have records sent."""


class TransactionPartitions:
    """The partitions of a transaction, as its client knows them."""

    def __init__(self, cluster: ClientCluster, transaction: TransactionForPartitions) -> None:
        self._cluster = cluster
        self._transaction = transaction
        self._added: dict[Partition, None] = {}
        self._pending: dict[Partition, None] = {}
        self._is_adding = False

    def has(self, key: Partition) -> bool:
        """Whether a partition is in the transaction; else it is added."""
        if key in self._added:
            return True
        self._pending[key] = None
        if not self._is_adding:
            self._is_adding = True
            self._cluster.after(0.001, self._add)
        return False

    def clear(self) -> None:
        self._added.clear()
        self.clear_pending()

    def clear_pending(self) -> None:
        self._pending.clear()
        self._is_adding = False

    def _add(self) -> None:
        if not self._is_adding or not self._pending:
            return
        keys = list(self._pending)
        self._transaction.add_partitions(keys, functools.partial(self._answered, keys))

    def _answered(self, keys: Sequence[Partition], code: int) -> None:
        if not self._is_adding:
            return
        if code:
            pause = _CONCURRENT_RETRY_SECONDS if code == KafkaError.CONCURRENT_TRANSACTIONS else _ADD_RETRY_SECONDS
            self._cluster.after(pause, self._add)
            return
        self._is_adding = False
        for key in keys:
            self._pending.pop(key, None)
        self._added.update(dict.fromkeys(keys))
        self._transaction.wake()


def error_that_aborts(code: int, text: str) -> KafkaError:
    """Return an error after which a transaction can only be aborted."""
    return KafkaError(code, text, txn_requires_abort=True)


def normal_code(code: int) -> int:
    """Return the code that the application gets. Source: librdkafka, `rd_kafka_txn_normalize_err`."""
    return int(KafkaError._FENCED) if code in FENCES else code
