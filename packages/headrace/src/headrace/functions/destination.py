"""A function as a destination: deliveries become frames of work, and results become outputs and replies."""

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence, Set
from itertools import repeat

from headrace import errors
from headrace.config.format_list import SCHEMA_TYPES
from headrace.config.topic_names import kind_by_name
from headrace.delivery.dead_letter import REFUSALS
from headrace.delivery.outcomes import (
    ACK,
    AWAITING_ACK,
    NOT_BEGUN,
    REPLAY,
    Delivery,
    PartitionListener,
    Reply,
    in_turn,
    not_taken,
)
from headrace.formats.plain import schema_id_of
from headrace.formats.registry import RegisteredSchema, SchemaRegistry
from headrace.framing import encode_frame
from headrace.functions import protocol
from headrace.functions.allocator import PartitionWorkers, worker_of_key
from headrace.functions.call_spans import CallSpans
from headrace.functions.held_outputs import HeldOutputs
from headrace.functions.suspects import Suspects
from headrace.functions.triggers.trigger import Trigger
from headrace.functions.worker_log import FailureLog
from headrace.functions.workers import FunctionService
from headrace.kafka import TopicDirectory
from headrace.records import (
    OutgoingRecord,
    Produce,
    Produced,
    Record,
    RecordBatch,
    TopicPartition,
    WrittenRecords,
    is_reserved,
)
from headrace.runtime import Clock, Deadline
from headrace.runtime.telemetry import tracing

_QUEUE_FULL_PAUSE_SECONDS = 0.1
_LEAST_WAIT_SECONDS = 0.1
"""Of a request for a worker: an idle worker needs a moment to begin it."""


class FrameSchemas:
    """Reads each schema once from the registry, for the formats of one trigger."""

    def __init__(self, registry: SchemaRegistry, trigger: Trigger) -> None:
        self._registry = registry
        self._trigger = trigger
        self._known: dict[int, protocol.Schema] = {}

    async def of(self, records: RecordBatch) -> dict[int, protocol.Schema]:
        """Return the schemas that these records name and the registry has.

        Raises:
            DestinationUnavailable: The registry failed to return a schema.
        """
        ids: set[int] = set()
        if self._trigger.value_format in SCHEMA_TYPES:
            ids |= _schema_ids(records.values)
        if self._trigger.key_format in SCHEMA_TYPES:
            ids |= _schema_ids(records.keys)
        for schema_id in ids - self._known.keys():
            try:
                schema = await self._registry.by_id(schema_id)
                texts = await self._texts_of(schema)
            except errors.SchemaNotFound:
                continue  # the worker finds no schema for the record, which becomes a dead letter
            except errors.HeadraceError as cause:
                text = f"schema {schema_id} cannot be read: {cause.description}"
                raise errors.DestinationUnavailable(text, schema_id=schema_id) from cause
            self._known[schema_id] = protocol.Schema(schema_id, schema.type, schema.text, texts)
        return {schema_id: self._known[schema_id] for schema_id in ids if schema_id in self._known}

    async def _texts_of(self, schema: RegisteredSchema) -> dict[str, str]:
        try:
            return await self._registry.texts_of(schema.references)
        except errors.SchemaNotFound:
            return {}  # the worker names the type that no text defines


def _schema_ids(framed: Iterable[bytes | None]) -> set[int]:
    """Return the ids in the registry's framing; the worker judges bytes without it."""
    heads = {data[:5] for data in framed if data}
    return {schema_id for head in heads if (schema_id := schema_id_of(head)) is not None}


class FunctionOutputs:
    """Writes the outputs of one trigger, or holds them for its transaction, and returns the reply for each record."""

    def __init__(
        self,
        function: str,
        trigger: Trigger,
        clock: Clock,
        produce: Produce,
        kind_of: Callable[[str], str],
        held: HeldOutputs | None,
    ) -> None:
        """Prepare; with `held` the outputs are not written but held for a transaction."""
        self._trigger = trigger
        self._clock = clock
        self._produce = produce
        self._kind_of = kind_of
        """Returns the kind of an internal topic, which no handler may write; empty for others."""
        self._held = held
        self._failures = FailureLog(function, trigger.name, clock)

    async def settle(
        self,
        records: RecordBatch,
        results: Sequence[protocol.AnyResult],
        mode: str = "disable",
        request: str = "",
        spans: CallSpans | None = None,
        bodies: Sequence[bytes] = (),
    ) -> list[Reply]:
        """Write the outputs of a frame and return how each record ended.

        Args:
            results: One per record; empty if none has failed or has an output, or if there are `bodies`.
            mode: The `explicitAckMode` that counts for these records.
            request: The id of the request, if the record is one.
            spans: Of the calls, if they are traced.
            bodies: One output per record.

        Raises:
            DestinationUnavailable: Kafka did not take any of the outputs.
        """
        replies = [AWAITING_ACK if mode == "explicitOnly" else ACK] * len(records)
        outgoing = [*map(OutgoingRecord, repeat(self._trigger.output_topic), records.keys, bodies)]
        owners = [*range(len(bodies))]
        plain = [protocol.Result([protocol.Output(each, [])]) if isinstance(each, bytes) else each for each in results]
        emitted = {output.topic for result in plain if result for output in result.outputs if output.topic}
        internal = {each for each in emitted if self._kind_of(each)}
        for index, (key, result) in enumerate(zip(records.keys, plain, strict=False)):
            if result is None:
                continue
            if result.error:
                replies[index] = _reply(result)
            elif result.held and mode == "enable":
                replies[index] = AWAITING_ACK
            if result.stack:
                self._failures.add(records[index], result, request)
            if internal and (refused := [output.topic for output in result.outputs if output.topic in internal]):
                text = f"the handler emits to {refused[0]}, an internal topic that only Headrace or Kafka writes"
                replies[index] = Reply("TopicInternal", text, permanent=True)
                continue
            outgoing += [self._outgoing(key, output) for output in result.outputs]
            owners += [index] * len(result.outputs)
        if not outgoing:
            return replies
        outgoing = spans.traced(owners, outgoing) if spans else outgoing
        return self._judge(replies, owners, outgoing, await self._write(records, owners, outgoing))

    def _outgoing(self, key: bytes | None, output: protocol.Output) -> OutgoingRecord:
        # Often the headers of the event: Headrace's own among them are not the output's.
        headers = [header for header in output.headers if not is_reserved(header[0])]
        own = key if output.key is None else output.key
        return OutgoingRecord(output.topic or self._trigger.output_topic, own, output.body, headers or None)

    def _judge(
        self,
        replies: list[Reply],
        owners: Sequence[int],
        outgoing: Sequence[OutgoingRecord],
        results: Sequence[Produced | errors.HeadraceError],
    ) -> list[Reply]:
        """Return the replies of records, by the results of their outputs; raise if Kafka took none of these."""
        if type(results) is WrittenRecords or {*map(type, results)} == {Produced}:
            return replies
        written = zip(owners, outgoing, results, strict=True)
        problems = [(index, to, problem) for index, to, problem in written if not isinstance(problem, Produced)]
        trouble: errors.DestinationUnavailable | None = None
        for index, record, problem in reversed(problems):  # the first problem of a record counts
            if isinstance(problem, REFUSALS):
                replies[index] = Reply(type(problem).__name__, f"its output: {problem.description}")
            else:
                # Kafka or the topic is to blame, not the record. If attempts counted, every record that is received
                # meanwhile would become a dead letter. So the record waits, and its handler runs again.
                trouble = _unavailable(problem, record.topic)
                replies[index] = not_taken(trouble)
        if trouble and (len(replies) == 1 or len(problems) == len(outgoing)):
            raise trouble
        return in_turn(replies) if trouble and self._trigger.ordering == "partition" else replies

    async def _write(
        self, records: RecordBatch, owners: Sequence[int], outgoing: Sequence[OutgoingRecord]
    ) -> Sequence[Produced | errors.HeadraceError]:
        """Write or hold the outputs of records with these indexes, and return a result for each."""
        if self._held:
            offsets = [records.offsets[index] for index in owners]
            return self._held.hold(records.topic_partition, offsets, outgoing)
        while True:
            try:
                return await self._produce(outgoing)
            except errors.ProducerQueueFull:
                # The handler has finished, so wait for the producer instead of calling the handler again.
                await self._clock.sleep(_QUEUE_FULL_PAUSE_SECONDS)
            except errors.HeadraceError as cause:
                raise _unavailable(cause, ", ".join(sorted({record.topic for record in outgoing}))) from cause


def _unavailable(cause: errors.HeadraceError, topic: str) -> errors.DestinationUnavailable:
    return errors.DestinationUnavailable(f"outputs to {topic} are not acknowledged: {cause.description}", topic=topic)


def _reply(result: protocol.Result) -> Reply:
    return Reply(
        result.error,
        result.reason,
        stack=result.stack,
        reached=not result.undecodable,
        permanent=result.undecodable,
        shared=result.shared,
    )


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
        self._batch_size = trigger.batch.batch_size if trigger.batch.mode == "enable" else 0
        """The most records of one call; 0 if each call has one."""
        self._suspects = Suspects(self._batch_size or 1)

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
            part = records[len(replies) :] if replies else records
            if self._suspects:
                part = self._suspects.part_of(delivery.partition, part)
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
            with contextlib.suppress(TimeoutError, errors.HeadraceError):  # the caller's credentials have ended
                await asyncio.wait_for(gone(), max(seconds, _LEAST_WAIT_SECONDS))
            self._ending.add(partition)
            self._workers.stop_partitions([partition])

        request.trigger, waiting = self._trigger_index, self._workers.spawn(give_up(), "wait for a worker")
        frame = encode_frame(request)
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
        tracer = tracing.tracer
        spans = CallSpans(tracer, self._workers.spec.name, delivery, records, self._batch_size) if tracer else None
        headers = spans.headers() if spans else records.headers
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
        frame = encode_frame(work)
        handled = self._workers.metrics.handled[self._trigger.name]
        try:
            response = await self._workers.serve(workers, partition, frame, len(records), schemas, ending)
        except errors.WorkerLost as lost:
            handled["failure"] += 1
            if spans:
                spans.lost(min(lost.parameters["begun"], len(records)))
            return self._blame(partition, records, lost)
        results: Sequence[protocol.AnyResult] = ()
        if spans:
            spans.end(response)
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
        if self._suspects:
            self._suspects.ended(partition, records.offsets)
        mode = "disable" if delivery.replay else self._trigger.explicit_ack_mode
        bodies = response.bodies if isinstance(response, protocol.Done) else ()
        return await self._outputs.settle(records, results, mode, spans=spans, bodies=bodies)

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
