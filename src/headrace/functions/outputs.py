"""The outputs of a function: what the results of a frame write, and how each record ended."""

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from headrace import errors
from headrace.delivery.dead_letter import REFUSALS
from headrace.delivery.outcomes import ACK, AWAITING_ACK, Reply, in_turn, not_taken
from headrace.functions import protocol
from headrace.functions.held_outputs import HeldOutputs
from headrace.functions.triggers.trigger import Trigger
from headrace.functions.worker_log import FailureLog
from headrace.records import OutgoingRecord, Produce, Produced, RecordBatch, TopicPartition, is_reserved
from headrace.runtime import Clock

_QUEUE_FULL_PAUSE_SECONDS = 0.1


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
        self, records: RecordBatch, results: Sequence[protocol.AnyResult], mode: str = "disable", request: str = ""
    ) -> list[Reply]:
        """Write the outputs of a frame and return how each record ended; `results` are empty if none has an output.

        Args:
            mode: The `explicitAckMode` that counts for these records.
            request: The id of the request, if the record is one.

        Raises:
            DestinationUnavailable: Kafka did not take any of the outputs.
        """
        replies = [AWAITING_ACK if mode == "explicitOnly" else ACK] * len(records)
        outgoing: list[OutgoingRecord] = []
        owners: list[int] = []
        topic = self._trigger.output_topic
        if {*map(type, results)} == {bytes}:  # as in most frames with outputs, which need no loop
            bodies: Any = results
            outgoing = [*map(OutgoingRecord, repeat(topic), records.keys, bodies)]
            owners = [*range(len(bodies))]
            results = ()
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
            for output in result.outputs:
                # Often the headers of the event: Headrace's own among them are not the output's.
                headers = [header for header in output.headers if not is_reserved(header[0])]
                own = key if output.key is None else output.key
                outgoing.append(OutgoingRecord(output.topic or topic, own, output.body, headers or None))
                owners.append(index)
        if not outgoing:
            return replies
        offsets = [records.offsets[index] for index in owners]
        return self._judge(replies, owners, outgoing, await self._write(records.topic_partition, offsets, outgoing))

    def _judge(
        self,
        replies: list[Reply],
        owners: Sequence[int],
        outgoing: Sequence[OutgoingRecord],
        results: Sequence[Produced | errors.HeadraceError],
    ) -> list[Reply]:
        """Return the replies of records, by the results of their outputs; raise if Kafka took none of these."""
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
        self, partition: TopicPartition, offsets: Sequence[int], outgoing: Sequence[OutgoingRecord]
    ) -> Sequence[Produced | errors.HeadraceError]:
        """Write or hold outputs of the records with these offsets, and return a result for each."""
        if self._held:
            return self._held.hold(partition, offsets, outgoing)
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
