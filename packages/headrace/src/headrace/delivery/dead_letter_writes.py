"""Writes the dead letters of deliveries; a record is completed once its dead letter is acknowledged."""

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

from headrace.delivery.lane import Lane
from headrace.delivery.outcomes import DeadLetter, DeadLetterWriter, Outcome, Reply
from headrace.delivery.pump_context import DeadLetterBatch, PumpContext
from headrace.errors import DeadLetterFailed
from headrace.records import Record, RecordBatch
from headrace.runtime.failpoints import reach
from headrace.runtime.telemetry.log_fields import record_fields

log = logging.getLogger(__name__)

_SLOW_SECONDS = 5.0


class DeadLetterWrites:
    """Writes dead letters of all lanes of one pump."""

    def __init__(
        self,
        context: PumpContext,
        writer: DeadLetterWriter | None,
        complete: Callable[[Lane, RecordBatch, Outcome, Sequence[Reply]], None],
    ) -> None:
        """Prepare; without `writer` dead letters are off. `complete` completes records."""
        self._context = context
        self._writer = writer
        self._complete = complete

    async def write(self, lane: Lane, batch: DeadLetterBatch) -> None:
        """Write dead letters; a record is completed by the acknowledgement, and without it the lane backs off."""
        dead_letters = batch.dead_letters
        writer = self._writer
        if self._context.retry.last_retry:
            for record, _, attempts, reply, *_ in dead_letters:  # each is named, because no topic has it
                dropped = f"dropped offset {record.offset} after {attempts} attempts ({reply.error})"
                log.warning("%s: %s; retry.last_retry is on", lane.label, dropped, extra=self._fields(record))
            return self._complete_all(lane, dead_letters, Outcome.DISCARDED)
        if writer is None:
            first = dead_letters[0]
            return lane.stop(
                batch,
                f"offset {first.record.offset} failed {first.attempts} times ({first.reply.error}), and dead letters "
                "are off; repair the destination, or set dead_letter.enabled to true, and restart",
            )
        reach("dead_letter.before")
        result = await self._write(lane, writer, dead_letters)
        reach("dead_letter.after")
        if lane.is_fenced:
            self._context.counts.late_results += len(dead_letters)
            return None
        failure = result if isinstance(result, DeadLetterFailed) else None
        delayed: Collection[int] = () if isinstance(result, DeadLetterFailed) else result
        missing: Collection[int] = ()
        if failure:
            missing = failure.parameters.get("missing", range(len(dead_letters)))
            delayed = failure.parameters.get("delayed", ())
        if len(missing) < len(dead_letters):
            dead = [each for at, each in enumerate(dead_letters) if at not in delayed and at not in missing]
            self._log_written(lane, dead, [dead_letters[at] for at in delayed])
            self._complete_all(lane, dead, Outcome.DEAD_LETTER)
            self._complete_all(lane, [dead_letters[at] for at in delayed], Outcome.DELAYED)
        if failure:
            if lane.condition.reason != failure.description:
                text = "%s is waiting, so that no record is lost: %s"
                log.warning(text, lane.label, failure.description, extra=lane.condition.log_fields)
            lane.back_off(DeadLetterBatch([dead_letters[at] for at in missing]), failure.description)
        return None

    async def _write(
        self, lane: Lane, writer: DeadLetterWriter, dead_letters: Sequence[DeadLetter]
    ) -> DeadLetterFailed | Collection[int]:
        """Write dead letters, and log if that takes long: a write may take minutes before it fails.

        Returns the indexes of those in a retry topic, or why the write failed.
        """
        why = f"dead letters={len(dead_letters)} from offset {dead_letters[0].record.offset} on are not acknowledged"
        if not lane.condition.in_trouble:
            lane.delay(why)
        alarm = self._context.later(_SLOW_SECONDS, lambda: log.warning("%s is waiting: %s yet", lane.label, why))
        try:
            return await writer.write(dead_letters) or ()
        except DeadLetterFailed as failure:
            return failure
        finally:
            alarm.cancel()

    def _log_written(self, lane: Lane, dead: Sequence[DeadLetter], delayed: Sequence[DeadLetter]) -> None:
        what = f"dead letters={len(dead)}" + (f", delayed={len(delayed)}" if delayed else "")
        first = min([*dead, *delayed], key=lambda dead_letter: dead_letter.record.offset)
        level = logging.WARNING if dead else logging.INFO
        offset, error = first.record.offset, first.reply.error
        fields = self._fields(first.record)
        log.log(level, "%s: %s, first offset %d: %s", lane.label, what, offset, error, extra=fields)

    def _complete_all(self, lane: Lane, dead_letters: Sequence[DeadLetter], how: Outcome) -> None:
        if dead_letters:
            replies = [dead_letter.reply for dead_letter in dead_letters]
            self._complete(lane, DeadLetterBatch(dead_letters).records, how, replies)

    def _fields(self, record: Record) -> dict[str, Any]:
        return record_fields(self._context.group, record.topic_partition, record=record)
