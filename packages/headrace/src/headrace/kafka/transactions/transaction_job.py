"""A transaction that waits or is being written: its records, its offsets of a group, and its outcome."""

import asyncio
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.kafka.client import library
from headrace.kafka.client.access import Right
from headrace.kafka.client.error_map import repeat_error, to_error, write_error
from headrace.kafka.commits import to_client
from headrace.kafka.transactions.transactional_client import TransactionalClient, flush
from headrace.kafka.write_request import ProduceResult
from headrace.records import CommitOffsets, Epochs, OutgoingRecord, Produced
from headrace.runtime import blocking

_FRAME: Final = b"CGMDv2:"
"""Precedes the generation in a member's metadata, as the client writes it."""
_MEMBER_GONE: Final = {
    library.KafkaError.UNKNOWN_MEMBER_ID,
    library.KafkaError.FENCED_INSTANCE_ID,
    library.KafkaError.FENCED_MEMBER_EPOCH,
}
_GENERATION_OVER: Final = {
    library.KafkaError.ILLEGAL_GENERATION,
    library.KafkaError.REBALANCE_IN_PROGRESS,
    library.KafkaError.STALE_MEMBER_EPOCH,
}


def metadata_in(member: tuple[bytes, Epochs], epochs: Epochs) -> Any:
    """Return the metadata of a member with these partitions in these epochs, or None if it did not have them.

    The result is None without a generation too, because Kafka would then accept offsets of any member.
    """
    metadata, assigned = member
    generation = int.from_bytes(metadata[len(_FRAME) :][:4], sys.byteorder, signed=True)
    current = all(assigned.get(partition) == epoch for partition, epoch in epochs.items())
    return metadata if current and metadata.startswith(_FRAME) and generation >= 0 else None


class GroupOffsets(NamedTuple):
    """Offsets that a transaction commits for a consumer group."""

    offsets: CommitOffsets
    member: Callable[[], Any]
    """Returns the client's object for the member and its generation, or None if it no longer has the partitions. Called
    on the producer's thread. Kafka refuses the offsets after another generation began."""

    kafka: KafkaConfig = KafkaConfig()
    """The settings of its client."""
    group: str = ""

    def send(self, client: TransactionalClient) -> errors.HeadraceError | None:
        """Add the offsets to the transaction of a client, on its thread; return why Kafka refuses them."""
        if not (member := self.member()):
            return errors.CommitRefused(f"{', '.join(map(str, self.offsets))}: no longer assigned to this member")
        try:
            client.send_offsets(to_client(self.offsets), member)
        except library.KafkaException as cause:
            return self._error_of(cause, f"commit {', '.join(map(str, self.offsets))} in a transaction")
        return None

    def _error_of(self, cause: library.KafkaException, doing: str) -> errors.HeadraceError:
        """Return our error for offsets that a transaction could not commit.

        A member of an earlier generation may still have its partitions: its consumer knows that at the retry.
        """
        code = cause.args[0].code()
        if code in _MEMBER_GONE:
            return errors.CommitRefused(
                f"{doing}: the instance is no longer a member of its group; nothing was written"
            )
        if code in _GENERATION_OVER:
            why = f"{doing}: the group is rebalancing; nothing was written"
            return errors.TransactionAborted(f"{why}: send it again", cause=why)
        topics = {partition.topic for partition in self.offsets}
        return to_error(
            cause, doing, self.kafka, Right("Read", "group", self.group), *(Right("Read", "topic", t) for t in topics)
        )


LastRecord = Callable[[list[Produced]], OutgoingRecord]
"""Makes a last record of a transaction from the offsets of the others. Called on a producer's thread."""

OF_BATCH: Final = "of_batch"
"""Parameter of a refusal that may be of another record in the same batch."""
_NAMED: Final = errors.TopicNotFound, errors.PartitionNotFound, errors.KafkaTimeout
"""Errors of a record that may be transient."""
_INNOCENT: Final = (
    library.KafkaError._STATE,
    library.KafkaError._INVALID_DIFFERENT_RECORD,
    library.KafkaError._PURGE_QUEUE,
)
"""Errors of records that failed only because another record did."""


class TransactionJob:
    """A transaction to write: the loop owns it until a thread claims it, then that thread until it is posted back."""

    def __init__(
        self,
        records: Sequence[OutgoingRecord],
        last_record: LastRecord | None,
        group: GroupOffsets | None = None,
        kafka: KafkaConfig = KafkaConfig(),  # noqa: B008 it never changes
        *,
        names_culprits: bool = False,
    ) -> None:
        """Prepare; with `names_culprits` each record keeps its own error, even if it may be sent again."""
        self.records = list(records)
        self.last_record = last_record
        self.group = group
        self.record_count = len(self.records)
        self.results: list[Any] = []
        self.problem: errors.HeadraceError | None = None
        """Why it is certainly not committed, or not known to be."""
        self.in_doubt = False
        self.response: asyncio.Future[list[ProduceResult]] = asyncio.get_running_loop().create_future()
        self.kafka = kafka
        self._names_culprits = names_culprits
        self._partitions: dict[int, tuple[str, int]] = {}
        """Topic and partition of records that are reported as not written."""
        self._claimed = blocking.Lock()

    def claim(self) -> bool:
        """Return whether the caller is the first, and so owns the request."""
        return self._claimed.acquire(blocking=False)

    def send(self, client: library.Producer, first: int, has_failed: Callable[[], bool]) -> None:
        """Pass the records from an index on to the client; a refused record gets its error as result.

        `has_failed` returns whether the transaction, which may have further jobs, can only be aborted.
        """
        self.results[first:] = [None] * (len(self.records) - first)
        for index, record in enumerate(self.records[first:], first):
            to = -1 if record.partition is None else record.partition
            report = functools.partial(self._reported, index)
            values: Any = record.topic, record.value, record.key, to, report, None, record.timestamp_ms, record.headers
            try:
                try:
                    client.produce(*values)
                except BufferError:  # the transaction has more than the client's queue
                    flush(client, has_failed)
                    client.produce(*values)
            except BufferError:
                self.results[index] = errors.ProducerQueueFull(
                    "the transactional client's queue is full: send it again"
                )
                return
            except library.KafkaException as cause:
                if cause.args[0].code() not in _INNOCENT:
                    self.results[index] = write_error(cause, self.kafka, record.topic)
                return

    def _reported(self, index: int, error: library.KafkaError | None, record: Any) -> None:
        if error is None:
            offset, partition = record.offset(), record.partition()
            unknown = offset is None
            self.results[index] = repeat_error(record.topic(), partition) if unknown else Produced(partition, offset)
            return
        self._partitions[index] = str(record.topic()), record.partition()
        if error.code() not in _INNOCENT:
            self.results[index] = write_error(error, self.kafka, str(record.topic()))

    def _mark_neighbours(self) -> None:
        """Mark refusals that may be of another record: those of neighbours in a partition, so perhaps in a batch.

        If exactly one record of a batch is refused, the client reports all of them. Source: KIP-467 in librdkafka.
        """
        last: dict[tuple[str, int], int] = {}
        for index, (record, result) in enumerate(zip(self.records, self.results, strict=False)):
            partition = (record.topic, result.partition) if type(result) is Produced else self._partitions.get(index)
            if partition is None:
                continue
            before, last[partition] = last.get(partition, index), index
            if before != index and all(type(self.results[at]) is errors.RecordRefused for at in (before, index)):
                for at in (before, index):
                    self.results[at].parameters[OF_BATCH] = True

    @property
    def may_fit_alone(self) -> bool:
        """Whether Kafka refused a batch as too large, so that each of its records may be small enough."""
        refused = [self.results[index] for index in self._partitions if index < len(self.results)]
        return self.record_count > 1 and any(type(result) is errors.RecordTooLarge for result in refused)

    @property
    def has_failed(self) -> bool:
        """Whether a record is certainly not written, so that the transaction will be aborted."""
        return any(
            isinstance(result, errors.HeadraceError) and not isinstance(result, errors.KafkaTimeout)
            for result in self.results
        )

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
        kept = _NAMED if self._names_culprits else ()
        if kept:
            self._mark_neighbours()
        final = [
            isinstance(each, errors.HeadraceError) and (not each.retriable or type(each) in kept) for each in found
        ]
        self.results = [result if own else reason for result, own in zip(found, final, strict=True)]

    def respond(self, results: list[ProduceResult]) -> None:
        """Respond once: with a result per record, or with the failure if there are no records.

        With `names_culprits` an unknown outcome is a failure too, or it could look like the error of a record.
        """
        if self.response.done():
            return
        unknown = self._names_culprits and isinstance(self.problem, errors.KafkaTimeout)
        if self.problem and (unknown or not self.record_count):
            self.response.set_exception(self.problem)
        else:
            self.response.set_result(results[: self.record_count])
