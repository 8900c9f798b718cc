"""A transaction that waits or is being written: its records, its offsets of a group, and its outcome."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from headrace import errors
from headrace.config.kafka import KafkaConfig
from headrace.kafka.client import library
from headrace.kafka.client.access import Right
from headrace.kafka.client.error_map import refusal_error, to_error
from headrace.kafka.commits import to_client
from headrace.kafka.transactions.transactional_client import NotWritten, TransactionalClient, is_innocent
from headrace.kafka.write_request import UNCOUNTED, Results, WriteRequest
from headrace.records import CommitOffsets, Epochs, OutgoingRecord, Produced, WrittenRecords
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


LastRecord = Callable[[Sequence[Produced]], OutgoingRecord]
"""Makes a last record of a transaction from the offsets of the others. Called on a producer's thread."""

OF_BATCH: Final = "of_batch"
"""Parameter of a refusal that may be of another record in the same batch."""
_NAMED: Final = errors.TopicNotFound, errors.PartitionNotFound, errors.KafkaTimeout
"""Errors of a record that may be transient."""


def _error_of(result: object) -> errors.HeadraceError | None:
    found = result.error if type(result) is NotWritten else result
    return found if isinstance(found, errors.HeadraceError) else None


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
        self._requests: list[WriteRequest] = []
        """What the client has got: the records, and then the last one."""
        self._outcome: Sequence[Any] | None = None
        """The results in the end, if they are not those of the requests."""
        self.problem: errors.HeadraceError | None = None
        """Why it is certainly not committed, or not known to be."""
        self.in_doubt = False
        self.response: asyncio.Future[Results] = asyncio.get_running_loop().create_future()
        self.kafka = kafka
        self._names_culprits = names_culprits
        self._claimed = blocking.Lock()

    def claim(self) -> bool:
        """Return whether the caller is the first, and so owns the request."""
        return self._claimed.acquire(blocking=False)

    def restart(self) -> None:
        """Forget what became of the records in an earlier transaction; it says nothing of the next one."""
        self.records = self.records[: self.record_count]
        self.problem, self._outcome, self._requests = None, None, []

    def send(self, client: TransactionalClient, has_failed: Callable[[], bool]) -> None:
        """Pass the records on to the client, and at the next call the last record; none behind a refused one.

        `has_failed` returns whether the transaction, which may have further jobs, can only be aborted.
        """
        if self._requests and self.last_record:
            self.records.append(self.last_record(self.results))
        records = self.records[self.record_count if self._requests else 0 :]
        request = WriteRequest(records, UNCOUNTED, lambda request: None, None, [None] * len(records))
        self._requests.append(request)
        index, cause = client.write(request, has_failed) or (0, None)
        if cause and not (isinstance(cause, library.KafkaException) and is_innocent(cause.args[0])):
            request.refuse(index, refusal_error(cause, self.kafka, request.records[index].topic))

    @property
    def results(self) -> Sequence[Any]:
        """One per record, as far as they are known."""
        if self._outcome is not None:
            return self._outcome
        each = [request.results for request in self._requests]
        return each[0] if len(each) == 1 else [result for results in each for result in results]

    @results.setter
    def results(self, outcome: Sequence[Any]) -> None:
        self._outcome = outcome

    @property
    def written(self) -> bool:
        """Whether every record is in the log, visible or not."""
        return not self.problem and all(
            type(request.results) is WrittenRecords or all(type(result) is Produced for result in request.results)
            for request in self._requests
        )

    @property
    def failures(self) -> list[errors.HeadraceError]:
        """Why records are not written, or not known to be, and why the transaction is not committed."""
        found = [] if self.written else [self.problem, *map(_error_of, self.results)]
        return [each for each in found if each]

    @property
    def has_failed(self) -> bool:
        """Whether a record is certainly not written, so that the transaction will be aborted."""
        return any(not isinstance(each, errors.KafkaTimeout) for each in self.failures)

    @property
    def may_fit_alone(self) -> bool:
        """Whether Kafka refused a batch as too large, so that each of its records may be small enough."""
        refused = any(type(each) is NotWritten and type(each.error) is errors.RecordTooLarge for each in self.results)
        return self.record_count > 1 and refused

    def _mark_neighbours(self) -> None:
        """Mark refusals that may be of another record: those of neighbours in a partition, so perhaps in a batch.

        If exactly one record of a batch is refused, the client reports all of them. Source: KIP-467 in librdkafka.
        """
        last: dict[tuple[str, int], Any] = {}
        for record, result in zip(self.records, self.results, strict=False):
            if type(result) is Produced:
                last[record.topic, result.partition] = None
            elif type(result) is NotWritten:
                refused = result.error if type(result.error) is errors.RecordRefused else None
                before, last[result.partition] = last.get(result.partition), refused
                for each in (before, refused) if before and refused else ():
                    each.parameters[OF_BATCH] = True

    def fail(self, reason: errors.HeadraceError) -> None:
        """Fail every record as certainly not visible: a refused one with its own error, the others with `reason`."""
        self.problem = reason
        kept = _NAMED if self._names_culprits else ()
        if kept:
            self._mark_neighbours()
        found = [_error_of(each) for each in self.results[: self.record_count]] or [None] * self.record_count
        self._outcome = [each if each and (not each.retriable or type(each) in kept) else reason for each in found]

    def respond(self, results: Results) -> None:
        """Respond once: with a result per record, or with the failure if there are no records.

        With `names_culprits` an unknown outcome is a failure too, or it could look like the error of a record.
        """
        if self.response.done():
            return
        unknown = self._names_culprits and isinstance(self.problem, errors.KafkaTimeout)
        if self.problem and (unknown or not self.record_count):
            self.response.set_exception(self.problem)
        else:
            self.response.set_result(results if len(results) == self.record_count else results[: self.record_count])
