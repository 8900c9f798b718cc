"""A function as a destination: deliveries become frames of work, and their results become replies and outputs."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence, Set

from headrace import errors
from headrace.config.topic_names import kind_by_name
from headrace.delivery.outcomes import (
    ACK,
    NOT_BEGUN,
    REPLAY,
    Delivery,
    Destination,
    PartitionListener,
    Reply,
    not_taken,
)
from headrace.formats.registry import SchemaRegistry
from headrace.functions import protocol
from headrace.functions.allocator import PartitionWorkers, worker_of_key
from headrace.functions.frame_schemas import FrameSchemas
from headrace.functions.held_outputs import HeldOutputs
from headrace.functions.outputs import FunctionOutputs
from headrace.functions.suspects import Suspects
from headrace.functions.triggers.trigger import Trigger
from headrace.functions.workers import FunctionService
from headrace.kafka import TopicDirectory
from headrace.records import Produce, Record, RecordBatch, TopicPartition
from headrace.runtime import Clock, Deadline

_LEAST_WAIT_SECONDS = 0.1
"""Of a request for a worker: an idle worker needs a moment to begin it."""


class FunctionDestination(PartitionListener):
    """Delivers records to a function's workers, and their outputs to its output topic.

    A record is completed when the handler has returned and Kafka has acknowledged its outputs. An exception, or a
    status of 400 or more, is a failure. A record that was at work when its worker died is delivered again alone; after
    the third death it becomes a dead letter.
    """

    def __init__(
        self,
        workers: FunctionService,
        trigger: Trigger,
        clock: Clock,
        *,
        produce: Produce,
        registry: SchemaRegistry,
        topics: TopicDirectory,
        kind_of: Callable[[str], str] = kind_by_name,
        held: HeldOutputs | None = None,
    ) -> None:
        """Prepare; with `held` the outputs are not written but held for a transaction."""
        self._workers = workers
        self._trigger = trigger
        self._trigger_index = workers.triggers.index(trigger)
        self._partition_workers = PartitionWorkers(len(workers.workers))
        self._topics = topics
        self._schemas = FrameSchemas(registry, trigger)
        self._held = held
        self._outputs = FunctionOutputs(workers.spec.name, trigger, clock, produce, kind_of, held)
        self._attempts = _attempts_in_order(trigger)
        self._ending: set[TopicPartition] = set()
        """Partitions that are about to be revoked."""
        batch = trigger.batch
        self._suspects = Suspects(batch.batch_size if batch.mode == "enable" else 1)

    @property
    def frame_records(self) -> int:
        """How many records a delivery may have now, so that its frames take about 50 ms."""
        return self._workers.pace.records * (len(self._workers.workers) if self._trigger.allocation == "key" else 1)

    def assigned(self, partitions: Collection[TopicPartition]) -> None:
        """Choose the workers of partitions that are assigned from now on."""
        self._partition_workers.assigned(partitions)
        self._ending.difference_update(partitions)

    def draining(self, partitions: Collection[TopicPartition]) -> None:
        """Begin no more records of partitions that are about to be revoked."""
        self._ending.update(partitions)
        self._workers.stop_partitions(partitions)

    async def drained(self, partitions: Collection[TopicPartition], deadline: Deadline) -> None:
        """Complete the work for these partitions, and run the drain callbacks; return by the deadline."""
        self._partition_workers.given_up(partitions)  # first: after a loss they may be assigned again meanwhile
        await self._workers.give_up(partitions, deadline)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        records, partition = RecordBatch.of(delivery.records), delivery.partition
        if self._trigger.allocation == "pool":
            return await self._deliver_to(self._workers.workers, delivery, records)
        if self._trigger.allocation == "static":
            return await self._deliver_to((self._partition_workers.worker_of(partition),), delivery, records)
        indexes: dict[int, list[int]] = {}
        for index, key in enumerate(records.keys):
            worker = worker_of_key(key, partition, len(self._workers.workers))
            indexes.setdefault(worker, []).append(index)
        parts = [self._deliver_to((worker,), delivery, records.select(chosen)) for worker, chosen in indexes.items()]
        return _in_order(len(records), indexes.values(), await asyncio.gather(*parts, return_exceptions=True))

    async def _deliver_to(self, workers: Sequence[int], delivery: Delivery, records: RecordBatch) -> Sequence[Reply]:
        """Deliver records to one of these workers and return a reply for each: `NOT_BEGUN` for those left out."""
        replies: list[Reply] = []
        ending = frozenset[TopicPartition]() if delivery.replay else self._ending
        while len(replies) < len(records) and delivery.partition not in ending:
            part = self._suspects.part_of(delivery.partition, records[len(replies) :] if replies else records)
            try:
                completed = await self._attempt(workers, delivery, part, ending)
            except errors.DeliveryError as cause:
                if not replies:
                    raise
                return replies + [not_taken(cause)] * (len(records) - len(replies))
            replies += completed
            if self._must_stop(delivery, completed):
                break
        return replies + [NOT_BEGUN] * (len(records) - len(replies))

    def _must_stop(self, delivery: Delivery, replies: Sequence[Reply]) -> bool:
        """Return whether no further record of a delivery may begin after these replies."""
        if replies.count(ACK) == len(replies):
            return False
        # Kafka takes the outputs of the last record later; in order, no record overtakes it.
        last = replies[-1]
        in_turn = self._trigger.ordering == "partition"
        waits = in_turn and last.error and not (last.reached or last.permanent)
        failed = any(reply.error and not reply.permanent for reply in replies)
        return bool(waits) or (failed and self._is_in_order(delivery))

    def _is_in_order(self, delivery: Delivery) -> bool:
        """Return whether no record may begin after one that failed, because that one is delivered again.

        After the last attempt a record becomes a dead letter, and the others need not wait for it.
        """
        return delivery.attempt < self._attempts

    async def answer(
        self, request: protocol.Work, seconds: float, gone: Callable[[], Awaitable[None]]
    ) -> tuple[Reply, protocol.Output | None]:
        """Let a worker serve a request, and write what it emits; return the reply, and the response if there is one.

        Args:
            seconds: The longest wait for a worker.
            gone: Returns when the client has disconnected; then the wait ends.

        Raises:
            WorkerLost: The worker ended while it served the request.
            DestinationUnavailable: No worker was up or free in time, or Kafka did not take what the handler emitted.
        """
        # No topic has this name, so stopping it stops no records.
        partition, end = TopicPartition(f"{self._trigger.name} requests", request.partition), "failure"

        async def give_up() -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gone(), max(seconds, _LEAST_WAIT_SECONDS))
            self._ending.add(partition)
            self._workers.stop_partitions([partition])

        request.trigger, waiting = self._trigger_index, self._workers.spawn(give_up(), "wait for a worker")
        frame = protocol.encode_frame(request)
        try:
            response = await self._workers.serve(self._workers.workers, partition, frame, 1, {}, self._ending)
            result = response.results[0] if isinstance(response, protocol.Results) and response.results else None
            if not isinstance(result, protocol.Result):
                raise errors.DestinationUnavailable(f"no worker was free within {seconds:g} s")
            end = "failure" if result.error else "success"
        finally:
            waiting.cancel()
            self._ending.discard(partition)
            self._workers.metrics.handled[self._trigger.name][end] += 1
        output = result.outputs.pop() if result.outputs else None
        record = Record(partition.topic, partition.partition, 0, request.timestamps_ms[0], None, None)
        request_id = (request.keys[0] or b"").decode(errors="replace")
        [reply] = await self._outputs.settle(RecordBatch.of([record]), [result], request=request_id)
        return reply, output if result.error or not reply.error else None

    async def _attempt(
        self, workers: Sequence[int], delivery: Delivery, records: RecordBatch, ending: Set[TopicPartition]
    ) -> Sequence[Reply]:
        """Deliver records as one frame. Return replies for the first of them; the others have to be delivered again."""
        partition = delivery.partition
        schemas = await self._schemas.of(records)
        headers = records.headers
        if delivery.replay:
            replay = (REPLAY, delivery.replay.encode())
            headers = [[*(each or ()), replay] for each in headers or [None] * len(records)]
        work = protocol.Work(
            *partition,
            await self._count_partitions(partition.topic),
            records.offsets,
            records.timestamps_ms,
            records.keys,
            records.values,
            headers,
            self._trigger_index,
            self._is_in_order(delivery),
        )
        frame = protocol.encode_frame(work)
        handled = self._workers.metrics.handled[self._trigger.name]
        try:
            response = await self._workers.serve(workers, partition, frame, len(records), schemas, ending)
        except errors.WorkerLost as lost:
            handled["failure"] += 1
            return self._blame(partition, records, lost)
        results: Sequence[protocol.AnyResult] = ()
        if isinstance(response, protocol.Results):
            results = response.results
            records = records[: len(results)]
        if not len(records):
            return []
        failures = len([1 for result in results if type(result) is protocol.Result and result.error])
        handled["failure"] += failures
        handled["success"] += len(records) - failures
        if self._held:
            await self._held.begin(records)
        self._suspects.ended(partition, records.offsets)
        mode = "disable" if delivery.replay else self._trigger.explicit_ack_mode
        return await self._outputs.settle(records, results, mode)

    def _blame(self, partition: TopicPartition, records: RecordBatch, lost: errors.WorkerLost) -> Sequence[Reply]:
        """Count the death of a worker. Return the reply of the only record if it is to blame, else none."""
        deaths = self._suspects.died(partition, records, min(lost.parameters["begun"], len(records)))
        if not deaths:
            return []
        text = f"{deaths} workers in a row died of it: {lost.description}"
        return [Reply(lost.parameters["error"] or "WorkerLost", text, permanent=True, calls=deaths)]

    async def _count_partitions(self, topic: str) -> int:
        try:
            return await self._topics.partitions_of(topic)
        except errors.HeadraceError as cause:
            text = f"the number of partitions of {topic} is not known: {cause.description}"
            raise errors.DestinationUnavailable(text) from cause


def _in_order(
    count: int, parts: Iterable[Sequence[int]], ended: Sequence[Sequence[Reply] | BaseException]
) -> Sequence[Reply]:
    """Return the replies of all records, from parts with these indexes; raise if every part failed."""
    replies, failures = [ACK] * count, 0
    for indexes, result in zip(parts, ended, strict=True):
        if isinstance(result, BaseException):
            failures += 1
            if failures == len(ended) or not isinstance(result, errors.DeliveryError):
                raise result
            result = [not_taken(result)] * len(indexes)
        for index, reply in zip(indexes, result, strict=True):
            replies[index] = reply
    return replies


def _attempts_in_order(trigger: Trigger) -> float:
    """Return the number of attempts before whose last one no later record may begin."""
    retry = trigger.retry
    if trigger.ordering != "partition" or "retry" not in (retry.action_of_error(""), *retry.errors.values()):
        return 0
    return math.inf if trigger.on_failure == "stop" else retry.attempts


class RecordSizeLimit:
    """Passes records up to a size to a destination; a larger one fails for good, so the failure policy decides.

    Kafka's client cannot skip such a record, because a broker always sends the first batch of a partition.
    """

    def __init__(self, destination: Destination, most_bytes: int) -> None:
        self._destination = destination
        self._most_bytes = most_bytes

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        records = RecordBatch.of(delivery.records)
        small = [index for index, size in enumerate(records.sizes) if size <= self._most_bytes]
        if len(small) == len(records):
            return await self._destination.deliver(delivery)
        text = f"key and value have %d bytes, more than fetchMax ({self._most_bytes})"
        replies = [Reply("RecordTooLarge", text % size, reached=False, permanent=True) for size in records.sizes]
        if small:
            others = await self._destination.deliver(delivery._replace(records=records.select(small)))
            for index, reply in zip(small, others, strict=True):
                replies[index] = reply
        return replies
