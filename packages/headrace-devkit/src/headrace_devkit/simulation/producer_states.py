"""What the leader of a partition knows of each producer: epoch, last sequence number, and its last batches.

Pure. Source: Apache Kafka, `ProducerAppendInfo`, `ProducerStateEntry`; KIP-98.
"""

from collections import deque
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException

from headrace_devkit.simulation.transaction_coordinator import ProducerEpoch

_KEPT_BATCHES = 5
NO_SEQUENCE = -1


class AppendedBatch(NamedTuple):
    """A batch in the log, by which a repeated one is recognised."""

    first_sequence: int
    last_sequence: int
    offset: int


class _ProducerState:
    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.batches: deque[AppendedBatch] = deque(maxlen=_KEPT_BATCHES)

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE


class ProducerStates:
    """The producers of one partition."""

    def __init__(self) -> None:
        self._states: dict[int, _ProducerState] = {}

    def check(self, producer: ProducerEpoch, first_sequence: int, count: int) -> int | None:
        """Return the offset of a batch that is in the log already; None if the batch is the next one.

        Raises:
            KafkaException: The producer is fenced, or a batch before is missing.
        """
        state = self._states.get(producer.id)
        if state is None:
            return None  # of a producer that is not known any sequence number is accepted
        if producer.epoch < state.epoch:
            raise KafkaException(KafkaError(KafkaError.INVALID_PRODUCER_EPOCH))
        if producer.epoch > state.epoch:
            expected = 0
        else:
            for batch in state.batches:
                if (batch.first_sequence, batch.last_sequence) == (first_sequence, first_sequence + count - 1):
                    return batch.offset
            expected = state.last_sequence + 1
        if first_sequence != expected:
            raise KafkaException(KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER))
        return None

    def check_epoch(self, producer: ProducerEpoch) -> None:
        """Return if a producer is not fenced here.

        Raises:
            KafkaException: A later epoch is known.
        """
        state = self._states.get(producer.id)
        if state is not None and producer.epoch < state.epoch:
            raise KafkaException(KafkaError(KafkaError.INVALID_PRODUCER_EPOCH))

    def appended(self, producer: ProducerEpoch, batch: AppendedBatch) -> None:
        """Record that a batch was appended."""
        self._of(producer).batches.append(batch)

    def marked(self, producer: ProducerEpoch) -> None:
        """Record the end of a transaction, whose epoch fences earlier ones.

        Raises:
            KafkaException: A later epoch is known.
        """
        self.check_epoch(producer)
        self._of(producer)

    def _of(self, producer: ProducerEpoch) -> _ProducerState:
        state = self._states.get(producer.id)
        if state is None or state.epoch != producer.epoch:
            state = self._states[producer.id] = _ProducerState(producer.epoch)
        return state
