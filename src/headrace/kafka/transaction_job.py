"""A transaction that waits or is being written: its records, the offsets that belong to it, and its outcome."""

import asyncio
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import confluent_kafka

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.kafka.error_map import repeat_error, write_error
from headrace.kafka.producer import ProduceResult
from headrace.kafka.producer_limits import Batches, wire_bytes
from headrace.kafka.transaction_offsets import GroupOffsets
from headrace.records import OutgoingRecord, Produced

Receipt = Callable[[list[Produced]], OutgoingRecord]
"""Makes a last record of a transaction from the offsets of the others. Called on a producer's thread."""

_INNOCENT: Final = (confluent_kafka.KafkaError._STATE, confluent_kafka.KafkaError._INVALID_DIFFERENT_RECORD)
"""Errors of records that failed only because another record did."""


class TransactionJob:
    """A transaction to write: the loop owns it until a thread claims it, then that thread until it is posted back."""

    def __init__(
        self,
        records: Sequence[OutgoingRecord],
        receipt: Receipt | None,
        group: GroupOffsets | None = None,
        kafka: KafkaConfig = KafkaConfig(),  # noqa: B008 it never changes
    ) -> None:
        self.records = list(records)
        self.receipt = receipt
        self.group = group
        self.record_count = len(self.records)
        self.results: list[Any] = []
        self.problem: errors.HeadraceError | None = None
        """Why it is certainly not committed, or not known to be."""
        self.in_doubt = False
        self.answer: asyncio.Future[list[ProduceResult]] = asyncio.get_running_loop().create_future()
        self.limit: asyncio.TimerHandle | None = None
        self.kafka = kafka
        self._claimed = threading.Lock()

    def claim(self) -> bool:
        """Return whether the caller is the first, and so owns the request."""
        return self._claimed.acquire(blocking=False)

    def send(self, client: confluent_kafka.Producer, first: int, batches: Batches) -> None:
        """Pass the records from an index on to the client; a refused record gets its error as result."""
        self.results[first:] = [None] * (len(self.records) - first)
        for index, record in enumerate(self.records[first:], first):
            partition, report = record.partition, functools.partial(self._reported, index, batches)
            values: Any = record.topic, record.value, record.key, -1 if partition is None else partition, report, None
            values += record.timestamp_ms, record.headers
            try:
                batches.before(record.topic, wire_bytes(record.key, record.value, record.headers))
                try:
                    client.produce(*values)
                except BufferError:  # the transaction has more than the client's queue
                    client.flush()
                    client.produce(*values)
            except BufferError:
                self.results[index] = errors.ProducerQueueFull(
                    "the transactional client's queue is full: send it again"
                )
                return
            except confluent_kafka.KafkaException as cause:
                if cause.args[0].code() not in _INNOCENT:
                    self.results[index] = write_error(cause, self.kafka, record.topic)
                return

    def _reported(self, index: int, batches: Batches, error: confluent_kafka.KafkaError | None, record: Any) -> None:
        if error is None:
            offset = record.offset()
            self.results[index] = repeat_error(record) if offset is None else Produced(record.partition(), offset)
        elif error.code() not in _INNOCENT:
            self.results[index] = batches.refusal(error, record) or write_error(error, self.kafka, str(record.topic()))

    @property
    def written(self) -> bool:
        """Whether every record is in the log, visible or not."""
        if self.problem or len(self.results) != len(self.records):
            return False
        return all(type(result) is Produced for result in self.results)

    def fail(self, reason: errors.HeadraceError) -> None:
        """Fail every record as certainly not visible: a refused one with its own error, the others with `reason`."""
        self.problem = reason
        found = self.results[: self.record_count] or [None] * self.record_count
        final = [isinstance(result, errors.HeadraceError) and not result.retriable for result in found]
        self.results = [result if own else reason for result, own in zip(found, final, strict=True)]

    def answer_with(self, results: list[ProduceResult]) -> None:
        """Answer once: with a result per record, or with the failure if there are no records."""
        if self.answer.done():
            return
        if self.problem and not self.record_count:
            self.answer.set_exception(self.problem)
        else:
            self.answer.set_result(results[: self.record_count])
