"""Dead letters delivered again to the backend of their consumer, a batch per call, without joining its group.

Each is delivered once, and the consumer's policy decides the outcome. A dead letter is saved as completed after that,
so a call that is interrupted repeats dead letters and loses none. The endpoint and its response are those of light-4j
kafka-sidecar.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections import Counter, defaultdict
from collections.abc import Container, Sequence, Set
from datetime import datetime
from typing import Annotated, Final, Literal, NamedTuple

import msgspec

from headrace import errors
from headrace.control.dead_letters.completed_offsets import CompletedOffsets, dead_letter_lease
from headrace.control.dead_letters.pages import FoundDeadLetter, Scan, ScanOptions
from headrace.control.running_consumer import RunningConsumer, RunningConsumers
from headrace.control.runs.selection import Selection
from headrace.delivery.dead_letter import MAX_REDRIVES, Origin, redriven_count, restored
from headrace.delivery.limit import SharedSlots
from headrace.delivery.outcomes import DeadLetter, Delivery, Outcome, Reply
from headrace.delivery.policy import judge, last_error
from headrace.kafka import Admin
from headrace.records import Produce, Record, TopicPartition
from headrace.runtime import Clock

log = logging.getLogger(__name__)

_READ_SECONDS: Final = 10.0
_MOST_READ_SECONDS: Final = 60.0
_ROUND_SECONDS: Final = 0.5
"""How long the round of reading that is running at the timeout may take."""
_LEASE_SECONDS: Final = 5.0


class RedeliveryRequest(msgspec.Struct, frozen=True):
    """Which dead letters are delivered again; other fields are ignored, as in light-4j kafka-sidecar."""

    group: str | None = None
    """Selects the consumer of this group; any other name is only repeated in the response."""
    topic: str | None = None
    """Origin topics of the dead letters, separated by commas; by default those in the consumer's `topics`."""
    timeout: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Maximum time for reading dead letters, in milliseconds; 10 s by default, a minute at most."""
    lastretry: bool = False
    """In this call, a dead letter that fails again is completed, and does not become a dead letter again."""


class RedeliveryResponse(msgspec.Struct, frozen=True):
    """The outcome of a batch of dead letters; call again until `records` is 0."""

    group: str
    instance: str
    topics: list[str]
    """Dead letter topics that were searched."""
    records: int
    """Dead letters that were delivered to the backend."""
    description: str
    status: Literal["empty", "processed", "rolledBack"]
    """`rolledBack` when some or all of them are not completed and will be delivered again."""


class Restored(NamedTuple):
    """A dead letter, its history, and its original record."""

    record: Record
    origin: Origin
    was: Record


@dataclasses.dataclass(slots=True)
class Redelivered:
    """The outcome of a batch of dead letters."""

    last: Restored
    completed: int = 0
    again: int = 0
    """Those of them that failed and became dead letters again."""
    given_up: int = 0
    """Those of them that failed at their last retry."""
    left: int = 0
    """Dead letters that were delivered and are not completed."""
    why: str = ""
    """Why they are left."""


class _Passed(NamedTuple):
    """The part of a topic in which earlier calls found no dead letter to deliver; the next call skips it."""

    scope: object
    """Topic and consumers at that time; with others, nothing is skipped."""
    cursor: str = ""
    unproved: int = 0
    """Dead letters before the cursor whose origin the consumer does not read."""


class Redelivery:
    """Serves the calls."""

    def __init__(self, admin: Admin, consumers: RunningConsumers, produce: Produce, clock: Clock, host: str) -> None:
        """Prepare; `consumers` may change at any time, `host` is shown in the response."""
        self._admin, self._consumers, self._produce, self._clock = admin, consumers, produce, clock
        self._instance = f"Reactive-Replay-{host}"
        self._busy: set[str] = set()
        self._passed: dict[tuple[str, str, bool], _Passed] = {}

    def chosen(self, request: RedeliveryRequest) -> list[tuple[str, RunningConsumer]]:
        """Return the topics whose dead letters are requested, each with every consumer that reads it.

        Raises:
            InvalidTopicName: No consumer of this process reads one of the topics.
        """
        consumers = [each for each in self._consumers.values() if each.kind == "reactive"]
        of_group = [consumer for consumer in consumers if consumer.group == request.group]
        consumers = of_group or consumers
        names = [name.strip() for name in (request.topic or "").split(",") if name.strip()]
        found: list[tuple[str, RunningConsumer]] = []
        for name in dict.fromkeys(names or [topic for consumer in consumers for topic in consumer.topics]):
            readers = [consumer for consumer in consumers if consumer.reads(name)]
            found += [(name, consumer) for consumer in readers]
            if not readers:
                group = f" of group {request.group}" if of_group else ""
                raise errors.InvalidTopicName(
                    f"no reactive consumer{group} here reads {name[:249]}: pass topics as in its setting topics, not "
                    "their dead letter topics"
                )
        return found

    async def run(self, request: RedeliveryRequest) -> RedeliveryResponse:
        """Deliver one batch of dead letters that are left, of the first topic that has any.

        Raises:
            InvalidTopicName: See `chosen`.
            InvalidRequest: The backend keeps offsets.
            LeaseTaken: Another run is working on the dead letters of the topic.
            ReadFailed: Kafka or the backend does not respond; what was not completed is left.
        """
        chosen = self.chosen(request)
        if kept := next((c.group for _, c in chosen if c.no_replay), ""):
            raise errors.InvalidRequest(
                f"the backend of group {kept} keeps the group's offsets (backend.offsets_path), and a dead letter "
                "would reset them: redrive its dead letters instead (headrace dlq redrive)"
            )
        searched = {(c.group, c.dead_letter.topic_for(name)): c for name, c in chosen}
        topics = list(dict.fromkeys(topic for _, topic in searched))
        group = request.group or next((group for group, _ in searched), "")
        unproved = Counter[str]()
        try:
            for (_, topic), consumer in searched.items():
                with contextlib.suppress(errors.TopicNotFound):
                    if done := await self._of_topic(topic, consumer, request, unproved):
                        return self._response(group, topics, topic, done, unproved)
        except (errors.KafkaUnavailable, errors.KafkaTimeout, errors.DestinationUnavailable) as cause:
            raise errors.ReadFailed(f"dead letters were not delivered, none is lost: {cause.description}") from cause
        nothing = (
            f"nothing was processed: nothing is left in {', '.join(topics)}, except dead letters that were redriven "
            f"{MAX_REDRIVES} times (lastretry=true delivers them)"
        )
        return RedeliveryResponse(group, self._instance, topics, 0, nothing + _unproved(unproved), "empty")

    async def _of_topic(
        self, topic: str, consumer: RunningConsumer, request: RedeliveryRequest, unproved: Counter[str]
    ) -> Redelivered | None:
        if topic in self._busy:
            raise errors.LeaseTaken(
                f"another call is delivering dead letters of {topic}: call again when it has returned"
            )
        self._busy.add(topic)
        try:
            offsets = await self._admin.topic_offsets(topic, "Read")
            if all(first >= end for first, end in offsets.values()):
                return None
            async with dead_letter_lease(self._admin, topic, self._clock, _LEASE_SECONDS) as lease:
                completed = CompletedOffsets(self._admin, topic)
                await completed.prepare(self._produce)
                await completed.load(settled=True)
                items = await self._read(topic, consumer, completed, request, unproved)
                if not items:
                    return None
                done = Redelivered(items[-1])
                by_origin: defaultdict[tuple[str, TopicPartition], list[Restored]] = defaultdict(list)
                for item in items:
                    by_origin[item.origin.group, item.origin.partition].append(item)
                for (group, partition), own in by_origin.items():
                    await lease.check()
                    epoch = consumer.pump.epoch_of(partition) if group == consumer.group else 0
                    delivery = Delivery(group, partition, epoch, [], 1, self._instance)
                    over = await PartitionRedelivery(
                        consumer, delivery, done, self._clock, last_retry=request.lastretry
                    ).deliver(own)
                    by_partition: defaultdict[int, list[int]] = defaultdict(list)
                    for item in over:
                        by_partition[item.record.partition].append(item.record.offset)
                    await completed.save(self._produce, by_partition)
                return done
        finally:
            self._busy.discard(topic)

    async def _read(
        self,
        topic: str,
        consumer: RunningConsumer,
        completed: CompletedOffsets,
        request: RedeliveryRequest,
        unproved: Counter[str],
    ) -> list[Restored]:
        """Return dead letters that are left: at most one batch of the consumer.

        Those of origins that the consumer does not read are counted and skipped. The next call resumes after them.
        """
        limits = consumer.delivery.batch
        found: list[Restored] = []
        size = 0
        others = {each.group for each in self._consumers.values() if each.kind == "reactive"} - {consumer.group}
        key = (topic, consumer.group, request.lastretry)
        passed = self._passed_before(key, (consumer, others, completed.topic_id))
        unproved[topic] += passed.unproved
        seconds = min(request.timeout / 1000, _MOST_READ_SECONDS) if request.timeout else _READ_SECONDS
        options = ScanOptions("oldest", passed.cursor, "left", limit_records=2**31, limit_seconds=seconds)
        scan = Scan(self._admin, topic, completed, self._clock, options)
        try:
            async with (
                asyncio.timeout(seconds + _ROUND_SECONDS),
                contextlib.aclosing(scan.dead_letters(Selection())) as dead_letters,
            ):
                async for one in dead_letters:
                    takes, is_unproved = _takes(one, consumer, others, request.lastretry)
                    unproved[topic] += is_unproved
                    if not takes:
                        if not found:
                            passed = passed._replace(cursor=scan.cursor, unproved=passed.unproved + is_unproved)
                        continue
                    size += one.record.size_bytes
                    if found and size > limits.max_bytes:
                        break
                    found.append(Restored(one.record, one.origin, restored(one.record)))
                    if len(found) == limits.max_records:
                        break
        except (TimeoutError, errors.InvalidRequest):  # the second: none of the topic's records is a dead letter
            pass
        finally:
            self._passed[key] = passed
        if not found and scan.remaining:
            resumes = f"{_unproved(unproved)}: call again to resume after them" if unproved[topic] else ""
            raise errors.KafkaUnavailable(f"no dead letter of {topic} arrived within {seconds:g} s{resumes}")
        return found

    def _passed_before(self, key: tuple[str, str, bool], scope: object) -> _Passed:
        passed = self._passed.get(key)
        return passed if passed and passed.scope == scope else _Passed(scope)

    def _response(
        self, group: str, topics: list[str], topic: str, done: Redelivered, unproved: Counter[str]
    ) -> RedeliveryResponse:
        last = done.last.record
        where = f"partition:{last.partition}| offset:{last.offset}"
        counts = f"{done.completed} completed"
        if done.again:
            counts += f", {done.again} of them as dead letters again"
        if done.given_up:
            counts += f", {done.given_up} of them dropped at their last retry"
        counts += _unproved(unproved)
        if done.left:
            text = f"processing error and rollback: of {topic} {counts}, {done.left} left ({done.why}); up to {where}"
            return RedeliveryResponse(group, self._instance, topics, done.completed + done.left, text, "rolledBack")
        text = f"success, processed dead letters of {topic}: {counts}; up to {where}"
        return RedeliveryResponse(group, self._instance, topics, done.completed, text, "processed")


class PartitionRedelivery:
    """Delivers dead letters of one original partition and group, each once."""

    def __init__(
        self, consumer: RunningConsumer, delivery: Delivery, done: Redelivered, clock: Clock, *, last_retry: bool
    ) -> None:
        """Prepare; all deliveries are like `delivery`, and `done` counts them.

        With `last_retry` a dead letter that fails is completed.
        """
        self._consumer, self._delivery, self._done = consumer, delivery, done
        self._clock, self._last_retry = clock, last_retry
        self._slots = SharedSlots(consumer.pump.breaker.limit)
        # Each is delivered once. The roll-back threshold counts only what may be retried, hence two attempts.
        self._policy = consumer.delivery.retry.model_copy(update={"attempts": 2, "deadline_seconds": None})

    async def deliver(self, items: Sequence[Restored]) -> list[Restored]:
        """Deliver dead letters and return those that are completed.

        A record that has several dead letters, as after a crash, is delivered once for all of them.

        Raises:
            DestinationUnavailable: The backend does not respond, or reports that it is unavailable.
        """
        by_offset: defaultdict[int, list[Restored]] = defaultdict(list)
        for item in items:
            by_offset[item.was.offset].append(item)
        completed = await self._deliver([by_offset[offset][0] for offset in sorted(by_offset)])
        every = [copy for item in completed for copy in by_offset[item.was.offset]]
        self._done.completed += len(every)
        return every

    async def _deliver(self, items: Sequence[Restored]) -> list[Restored]:
        records = [item.was for item in items]
        attempt = 1 + max(item.origin.attempts for item in items)
        try:
            async with self._slots.slot():
                delivery = self._delivery._replace(records=records, attempt=attempt)
                replies = await self._consumer.destination.deliver(delivery)
        except errors.DestinationRefused as refusal:
            return self._leave(items, refusal.description)
        now = self._clock.time()
        judged, why = judge(records, replies, self._policy), last_error(replies)
        if Outcome.ROLL_BACK in judged:
            return self._leave(items, f"more failed than the roll-back threshold allows: {why}")
        of = {item.was.offset: (item, reply) for item, reply in zip(items, replies, strict=True)}

        def found(outcome: Outcome) -> list[Record]:
            return [record for record, _ in judged.get(outcome, ())]

        delivered = found(Outcome.DELIVERED)
        skipped = found(Outcome.SKIPPED)
        completed = [of[record.offset][0] for record in (*delivered, *skipped)]
        self._report(delivered, Outcome.DELIVERED)
        self._report(skipped, Outcome.SKIPPED, [of[record.offset][1] for record in skipped])
        failed = [*found(Outcome.RETRY), *found(Outcome.DEAD_LETTER)]
        completed += await self._bury([of[record.offset] for record in failed], now)
        self._leave([of[record.offset][0] for record in found(Outcome.UNAVAILABLE)], why)
        together = [of[record.offset][0] for record in found(Outcome.SPLIT)]
        middle = len(together) // 2
        for half, rest in ((together[:middle], together[middle:]), (together[middle:], [])):
            try:
                completed += await self._deliver(half) if half else []
            except errors.DestinationUnavailable as cause:
                if not completed:
                    raise
                self._leave([*half, *rest], cause.description)
                break
        return completed

    async def _bury(self, failed: Sequence[tuple[Restored, Reply]], now: float) -> list[Restored]:
        """Write what failed as dead letters again, or drop it at the last retry; return what is completed."""
        if not failed:
            return []
        writer = self._consumer.dead_letters
        why = ""
        missing: Container[int] = ()
        if self._last_retry:
            for item, reply in failed:
                what = f"{item.was.topic_partition} offset {item.was.offset}"
                log.warning("dropped the dead letter of %s at its last retry (%s)", what, reply.error)
        elif writer is None:
            missing = range(len(failed))
            why = f"{failed[0][1].error}, and dead letters are off"
        else:
            try:
                await writer.write([_again(item, reply, self._delivery.group, now) for item, reply in failed])
            except errors.DeadLetterFailed as failure:
                missing = failure.parameters.get("missing", range(len(failed)))
                why = failure.description
        self._leave([item for index, (item, _) in enumerate(failed) if index in missing], why)
        over = [pair for index, pair in enumerate(failed) if index not in missing]
        if self._last_retry:
            self._done.given_up += len(over)
        else:
            self._done.again += len(over)
        how = Outcome.GIVEN_UP if self._last_retry else Outcome.DEAD_LETTER
        self._report([item.was for item, _ in over], how, [reply for _, reply in over])
        return [item for item, _ in over]

    def _report(self, records: Sequence[Record], how: Outcome, replies: Sequence[Reply] = ()) -> None:
        if records and (on_completed := self._consumer.pump.hooks.on_completed):
            size_bytes = sum([record.size_bytes for record in records])
            on_completed(records, size_bytes, how, replies, self._delivery.replay)

    def _leave(self, items: Sequence[Restored], why: str) -> list[Restored]:
        self._done.left += len(items)
        self._done.why = why if items else self._done.why
        return []


def _takes(one: FoundDeadLetter, consumer: RunningConsumer, others: Set[str], last_retry: bool) -> tuple[bool, bool]:
    """Return whether a dead letter is delivered, and whether its origin is unproved."""
    if one.origin.group in others:
        return False, False
    if not consumer.is_origin(one.origin.partition.topic):
        return False, True
    # Callers repeat the call until nothing is left, so a record that always fails must not return forever.
    return last_retry or redriven_count(one.record.headers) < MAX_REDRIVES, False


def _again(item: Restored, reply: Reply, group: str, now: float) -> DeadLetter:
    try:
        first = datetime.fromisoformat(item.origin.text("first_failure")).timestamp()
    except ValueError:
        first = now
    return DeadLetter(item.was, group, item.origin.attempts + 1, reply, first, now)


def _unproved(counts: Counter[str]) -> str:
    left = ", ".join(f"{count} of {topic}" for topic, count in counts.items() if count)
    return f"; {left} left: they name an origin that the consumer does not read" if left else ""
