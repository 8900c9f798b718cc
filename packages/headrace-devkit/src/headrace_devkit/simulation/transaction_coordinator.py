"""The coordinator's side of transactions: who may write under a transactional id, and how its transactions end.

| State | until | then |
|---|---|---|
| empty | a partition is added | ongoing |
| ongoing | the producer ends it, a new producer opens, or its time is over | prepare commit, or prepare abort |
| prepare commit, prepare abort | each of its partitions has its marker | complete commit, complete abort |
| complete commit, complete abort | a partition is added, or a new producer opens | ongoing, or empty |

Pure: times come in, refusals are `KafkaException`. Source: Apache Kafka, `TransactionCoordinator`,
`TransactionMetadata`; KIP-98, KIP-360, KIP-890. In version 1, all transactions of a producer have one epoch. So a
request that was delayed counts in the next transaction. In version 2, each end of a transaction begins another epoch.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple, NoReturn

from confluent_kafka import KafkaError, KafkaException

from headrace_devkit.simulation.offsets import Partition

State = Literal["empty", "ongoing", "prepare_commit", "prepare_abort", "complete_commit", "complete_abort"]
FIRST_PRODUCER_ID = 1000
LAST_EPOCH = 2**15 - 2
"""A producer with this epoch gets another id instead of another epoch."""
_NO_EPOCH = -1


class ProducerEpoch(NamedTuple):
    """The id of a producer, and its epoch: an earlier one is fenced."""

    id: int
    epoch: int


class EndMarker(NamedTuple):
    """What is written to a partition when a transaction ends."""

    producer: ProducerEpoch
    committed: bool


class CoordinatedTransaction:
    """A transactional id: its producer, and its last transaction."""

    def __init__(self, producer_id: int, timeout_seconds: float) -> None:
        # The producer
        self.producer_id = producer_id
        self.epoch = _NO_EPOCH
        self.last_epoch = _NO_EPOCH
        """The epoch before, so that a repeated request is recognised."""
        self.timeout_seconds = timeout_seconds
        # Its transaction
        self.state: State = "empty"
        self.keys: dict[Partition, None] = {}
        """Partitions of it that have no marker yet."""
        self.began_at = 0.0
        self.ended_by_version = 1
        """2 if the last end has begun another epoch."""

    @property
    def producer(self) -> ProducerEpoch:
        return ProducerEpoch(self.producer_id, self.epoch)

    @property
    def marker(self) -> EndMarker:
        """What its partitions get; only while it is being ended."""
        return EndMarker(self.producer, self.state == "prepare_commit")

    @property
    def is_ending(self) -> bool:
        return self.state in ("prepare_commit", "prepare_abort")


class TransactionCoordinator:
    """All transactional ids of a cluster, as the log of transactions has them."""

    def __init__(self, first_producer_id: int = FIRST_PRODUCER_ID) -> None:
        self._transactions: dict[str, CoordinatedTransaction] = {}
        self._next_id = first_producer_id

    def transaction(self, name: str) -> CoordinatedTransaction | None:
        return self._transactions.get(name)

    def new_producer(self) -> ProducerEpoch:
        """Return a producer without a transactional id."""
        self._next_id += 1
        return ProducerEpoch(self._next_id - 1, 0)

    def open(self, name: str, timeout_seconds: float, expected: ProducerEpoch | None = None) -> ProducerEpoch:
        """Return the producer of a transactional id in its next epoch, which fences the one before.

        `expected` is what a producer has that continues after an error. An open transaction is aborted first: the
        client is refused with CONCURRENT_TRANSACTIONS, and must send the request again.
        """
        transaction = self._transactions.get(name)
        if transaction is None:
            made = CoordinatedTransaction(self.new_producer().id, timeout_seconds)
            transaction = self._transactions[name] = made
        if expected and transaction.epoch != _NO_EPOCH and expected.id != transaction.producer_id:
            _refuse(KafkaError.PRODUCER_FENCED)
        if transaction.is_ending:
            _refuse(KafkaError.CONCURRENT_TRANSACTIONS)
        if transaction.state == "ongoing":
            self._fence(transaction)
            _refuse(KafkaError.CONCURRENT_TRANSACTIONS)
        if expected and expected.epoch == transaction.last_epoch != _NO_EPOCH:
            return transaction.producer  # a repeated request
        if expected and transaction.epoch not in (_NO_EPOCH, expected.epoch):
            _refuse(KafkaError.PRODUCER_FENCED)
        transaction.last_epoch = transaction.epoch if expected else _NO_EPOCH
        if transaction.epoch >= LAST_EPOCH:
            transaction.producer_id, transaction.epoch = self.new_producer().id, 0
        else:
            transaction.epoch += 1
        transaction.state, transaction.timeout_seconds = "empty", timeout_seconds
        return transaction.producer

    def add(self, name: str, producer: ProducerEpoch, keys: Iterable[Partition], now: float) -> bool:
        """Add partitions to the transaction; return whether this begins one."""
        transaction = self._of(name, producer)
        if transaction.is_ending:
            _refuse(KafkaError.CONCURRENT_TRANSACTIONS)
        begins = transaction.state != "ongoing"
        if begins:
            transaction.state, transaction.began_at = "ongoing", now
        transaction.keys.update(dict.fromkeys(keys))
        return begins

    def verify(self, name: str, producer: ProducerEpoch, key: Partition) -> None:
        """Return if a partition is in the transaction: the leader asks before the first record. Source: KIP-890."""
        transaction = self._of(name, producer)
        if transaction.is_ending:
            _refuse(KafkaError.CONCURRENT_TRANSACTIONS)
        if key not in transaction.keys:
            _refuse(KafkaError.TRANSACTION_ABORTABLE)

    def end(self, name: str, producer: ProducerEpoch, *, committed: bool, version: int = 1) -> ProducerEpoch:
        """End the transaction; return the producer in the epoch of its next one. The markers follow.

        A request that repeats the last end is answered as that one was.
        """
        transaction = self._transactions.get(name)
        if transaction is None or transaction.producer_id != producer.id:
            _refuse(KafkaError.INVALID_PRODUCER_ID_MAPPING)
        _check_end(transaction, producer.epoch)
        if transaction.state == "ongoing":
            if version > 1:
                transaction.last_epoch, transaction.epoch = transaction.epoch, transaction.epoch + 1
            transaction.ended_by_version = version
            self._prepare(transaction, "prepare_commit" if committed else "prepare_abort")
            return transaction.producer
        if transaction.state == "empty" or transaction.state.endswith("commit") != committed:
            _refuse(KafkaError.INVALID_TXN_STATE)
        if transaction.is_ending:
            _refuse(KafkaError.CONCURRENT_TRANSACTIONS)
        return transaction.producer

    def abort_if_late(self, name: str, now: float) -> bool:
        """Abort a transaction whose time is over, and fence its producer; return whether it was."""
        transaction = self._transactions[name]
        if transaction.state != "ongoing" or now < transaction.began_at + transaction.timeout_seconds:
            return False
        self._fence(transaction)
        return True

    def marked(self, name: str, key: Partition, marker: EndMarker) -> bool:
        """Record that a partition has its marker; return whether that was the last one."""
        transaction = self._transactions[name]
        if not transaction.is_ending or transaction.marker != marker:
            return False
        transaction.keys.pop(key, None)
        if transaction.keys:
            return False
        transaction.state = "complete_commit" if marker.committed else "complete_abort"
        return True

    def _of(self, name: str, producer: ProducerEpoch) -> CoordinatedTransaction:
        transaction = self._transactions.get(name)
        if transaction is None or transaction.producer_id != producer.id:
            _refuse(KafkaError.INVALID_PRODUCER_ID_MAPPING)
        if transaction.epoch != producer.epoch:
            _refuse(KafkaError.PRODUCER_FENCED)
        return transaction

    def _fence(self, transaction: CoordinatedTransaction) -> None:
        transaction.epoch, transaction.last_epoch = transaction.epoch + 1, _NO_EPOCH
        transaction.ended_by_version = 1
        self._prepare(transaction, "prepare_abort")

    def _prepare(self, transaction: CoordinatedTransaction, state: State) -> None:
        transaction.state = state
        if not transaction.keys:
            transaction.state = "complete_commit" if state == "prepare_commit" else "complete_abort"


def _check_end(transaction: CoordinatedTransaction, epoch: int) -> None:
    """Refuse the end of a transaction by an epoch that may not end it.

    With version 2 a repeated request has the epoch before, and one with the present epoch ends the next transaction.
    """
    expected = transaction.epoch
    if transaction.ended_by_version > 1 and transaction.state not in ("ongoing", "empty"):
        expected -= 1
    if epoch != expected:
        _refuse(KafkaError.PRODUCER_FENCED)


def _refuse(code: int) -> NoReturn:
    raise KafkaException(KafkaError(code))
