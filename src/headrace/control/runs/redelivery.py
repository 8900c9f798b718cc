"""Dead letters delivered again by the backend of their consumer, a batch per call, without joining its group.

Each is delivered once, and judged by the consumer's policy as its own records are. A dead letter is saved as ended
after its delivery is judged, so a call that dies repeats dead letters and loses none. The endpoint and its response are
those of light-4j kafka-sidecar.
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
from headrace.control.dead_letters.ended_offsets import EndedOffsets, dead_letter_lease
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
"""How long the round of reading that has begun when the time is over may take."""
_LEASE_SECONDS: Final = 5.0


class RedeliveryRequest(msgspec.Struct, frozen=True):
    """Which dead letters are delivered again; other fields are ignored, as in light-4j kafka-sidecar."""

    group: str | None = None
    """Group of a consumer, to choose it; another is only repeated in the response. By default the topics choose."""
    topic: str | None = None
    """Origin topics of the dead letters, with commas between; by default those in the consumer's `topics`."""
    timeout: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How long to read dead letters at most, in milliseconds; 10 s by default, a minute at most."""
    lastretry: bool = False
    """Whether what fails again has ended, instead of being a dead letter once more. Of this call only."""


class RedeliveryResponse(msgspec.Struct, frozen=True):
    """What became of a batch of dead letters; call again until there are no records."""

    group: str
    instance: str
    topics: list[str]
    """Dead letter topics that were searched."""
    records: int
    """Dead letters that were delivered to the backend."""
    description: str
    status: Literal["empty", "processed", "rolledBack"]
    """`rolledBack` when some or all of them have not ended and will be delivered again."""


class Restored(NamedTuple):
    """A dead letter, its history, and the record it was."""

    record: Record
    origin: Origin
    was: Record


@dataclasses.dataclass(slots=True)
class Redelivered:
    """What became of a batch of dead letters."""

    last: Restored
    ended: int = 0
    again: int = 0
    """Those of them that are dead letters once more."""
    given_up: int = 0
    """Those of them that failed for the last time."""
    left: int = 0
    """Dead letters that were delivered and have not ended."""
    why: str = ""
    """Why they are left."""


class _Passed(NamedTuple):
    """How far calls of one kind found no dead letter to deliver, while topic and consumers stay the same."""

    scope: object
    """What decides which dead letters the consumer gets."""
    cursor: str = ""
    unproved: int = 0
    """Dead letters before the cursor whose origin the consumer does not read."""


class Redelivery:
    """Serves the calls."""

    def __init__(self, admin: Admin, consumers: RunningConsumers, produce: Produce, clock: Clock, host: str) -> None:
        """Prepare; `consumers` may change at any time, `host` is for the response."""
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
                    f"{name[:249]} is consumed by no reactive consumer{group} here: name topics as they stand in its "
                    "topics, without the ending of their dead letter topic"
                )
        return found

    async def run(self, request: RedeliveryRequest) -> RedeliveryResponse:
        """Deliver one batch of dead letters that are left, of the first topic that has any.

        Raises:
            InvalidTopicName: See `chosen`.
            InvalidRequest: The backend keeps offsets.
            LeaseTaken: Another run works on the dead letters of the topic.
            ReadFailed: Kafka or the backend does not answer; what had not ended is left.
        """
        chosen = self.chosen(request)
        if kept := next((c.group for _, c in chosen if c.no_replay), ""):
            raise errors.InvalidRequest(
                f"the backend of group {kept} keeps the group's offsets (backend.offsets_path), and a dead letter "
                "would move them back: redrive its dead letters instead (headrace dlq redrive)"
            )
        searched = {(c.group, c.dead_letter.topic_for(name)): c for name, c in chosen}
        topics = list(dict.fromkeys(topic for _, topic in searched))
        group = request.group or next((group for group, _ in searched), "")
        unproved = Counter[str]()
        try:
            for (_, topic), consumer in searched.items():
                with contextlib.suppress(errors.TopicNotFound):
                    if done := await self._of_topic(topic, consumer, request, unproved):
                        return self._answer(group, topics, topic, done, unproved)
        except (errors.KafkaUnavailable, errors.KafkaTimeout, errors.DestinationUnavailable) as cause:
            raise errors.ReadFailed(f"dead letters are not delivered, and none is lost: {cause.description}") from cause
        nothing = (
            f"nothing is left in {', '.join(topics)}, but for dead letters that were redriven {MAX_REDRIVES} times "
            "(lastretry=true takes them): nothing was processed"
        )
        return RedeliveryResponse(group, self._instance, topics, 0, nothing + _unproved(unproved), "empty")

    async def _of_topic(
        self, topic: str, consumer: RunningConsumer, request: RedeliveryRequest, unproved: Counter[str]
    ) -> Redelivered | None:
        if topic in self._busy:
            raise errors.LeaseTaken(
                f"another call delivers dead letters of {topic} just now: call again when it is answered"
            )
        self._busy.add(topic)
        try:
            offsets = await self._admin.topic_offsets(topic, "Read")
            if all(first >= end for first, end in offsets.values()):
                return None
            async with dead_letter_lease(self._admin, topic, self._clock, _LEASE_SECONDS) as lease:
                ended = EndedOffsets(self._admin, topic)
                await ended.prepare(self._produce)
                await ended.load(settled=True)
                items = await self._read(topic, consumer, ended, request, unproved)
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
                    await ended.save(self._produce, by_partition)
                return done
        finally:
            self._busy.discard(topic)

    async def _read(
        self,
        topic: str,
        consumer: RunningConsumer,
        ended: EndedOffsets,
        request: RedeliveryRequest,
        unproved: Counter[str],
    ) -> list[Restored]:
        """Return dead letters that are left: one batch of the consumer at most.

        Those of origins that the consumer does not read are counted and passed over. The next call resumes behind them.
        """
        limits, found, size = consumer.delivery.batch, list[Restored](), 0
        others = {each.group for each in self._consumers.values() if each.kind == "reactive"} - {consumer.group}
        key, scope = (topic, consumer.group, request.lastretry), (consumer, others, ended.topic_id)
        passed = self._passed.get(key, _Passed(scope))
        if passed.scope != scope:
            passed = _Passed(scope)
        unproved[topic] += passed.unproved
        seconds = min(request.timeout / 1000, _MOST_READ_SECONDS) if request.timeout else _READ_SECONDS
        options = ScanOptions("oldest", passed.cursor, "left", limit_records=2**31, limit_seconds=seconds)
        scan = Scan(self._admin, topic, ended, self._clock, options)
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
        except (TimeoutError, errors.InvalidRequest):  # or the topic holds other records only
            pass
        finally:
            self._passed[key] = passed
        if not found and scan.remaining:
            resumes = f"{_unproved(unproved)}: call again, and reading resumes behind them" if unproved[topic] else ""
            raise errors.KafkaUnavailable(f"no dead letter of {topic} arrived within {seconds:g} s{resumes}")
        return found

    def _answer(
        self, group: str, topics: list[str], topic: str, done: Redelivered, unproved: Counter[str]
    ) -> RedeliveryResponse:
        last = done.last.record
        where = f"partition:{last.partition}| offset:{last.offset}"
        counts = f"{done.ended} ended" + (f", {done.again} of them as dead letters once more" if done.again else "")
        counts += f", {done.given_up} of them failed for the last time" if done.given_up else ""
        counts += _unproved(unproved)
        if done.left:
            text = (
                f"processing error and rollback: of {topic} {counts}, {done.left} are left ({done.why}); up to {where}"
            )
            return RedeliveryResponse(group, self._instance, topics, done.ended + done.left, text, "rolledBack")
        text = f"success, dead letters of {topic} are processed: {counts}; up to {where}"
        return RedeliveryResponse(group, self._instance, topics, done.ended, text, "processed")


class PartitionRedelivery:
    """Delivers dead letters of one original partition and group, each once."""

    def __init__(
        self, consumer: RunningConsumer, delivery: Delivery, done: Redelivered, clock: Clock, *, last_retry: bool
    ) -> None:
        """Prepare; `delivery` is what all have in common, `done` is added to; `last_retry`: what fails has ended."""
        self._consumer, self._delivery, self._done = consumer, delivery, done
        self._clock, self._last_retry = clock, last_retry
        self._slots = SharedSlots(consumer.pump.breaker.limit)
        # One attempt, but a threshold looks at what another attempt would be for.
        self._policy = consumer.delivery.retry.model_copy(update={"attempts": 2, "deadline_seconds": None})

    async def deliver(self, items: Sequence[Restored]) -> list[Restored]:
        """Deliver dead letters and return those that have ended.

        A record that has several dead letters, as after a crash, is delivered once for all of them.

        Raises:
            DestinationUnavailable: The backend does not answer, or its response is about itself.
        """
        by_offset: defaultdict[int, list[Restored]] = defaultdict(list)
        for item in items:
            by_offset[item.was.offset].append(item)
        ended = await self._deliver([by_offset[offset][0] for offset in sorted(by_offset)])
        every = [copy for item in ended for copy in by_offset[item.was.offset]]
        self._done.ended += len(every)
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

        delivered, skipped = found(Outcome.DELIVERED), found(Outcome.SKIPPED)
        ended = [of[record.offset][0] for record in (*delivered, *skipped)]
        self._report(delivered, Outcome.DELIVERED)
        self._report(skipped, Outcome.SKIPPED, [of[record.offset][1] for record in skipped])
        failed = [*found(Outcome.RETRY), *found(Outcome.DEAD_LETTER)]
        ended += await self._bury([of[record.offset] for record in failed], now)
        self._leave([of[record.offset][0] for record in found(Outcome.UNAVAILABLE)], why)
        together = [of[record.offset][0] for record in found(Outcome.SPLIT)]
        middle = len(together) // 2
        for half, rest in ((together[:middle], together[middle:]), (together[middle:], [])):
            try:
                ended += await self._deliver(half) if half else []
            except errors.DestinationUnavailable as cause:
                if not ended:
                    raise
                self._leave([*half, *rest], cause.description)
                break
        return ended

    async def _bury(self, failed: Sequence[tuple[Restored, Reply]], now: float) -> list[Restored]:
        """Write what failed as dead letters once more, or give it up; return what has ended."""
        if not failed:
            return []
        writer, why = self._consumer.dead_letters, ""
        missing: Container[int] = ()
        if self._last_retry:
            for item, reply in failed:
                what = f"{item.was.topic_partition} offset {item.was.offset}"
                log.warning("dead letter of %s failed at its last retry (%s) and has ended", what, reply.error)
        elif writer is None:
            missing, why = range(len(failed)), f"{failed[0][1].error}, and dead letters are off"
        else:
            try:
                await writer.write([_again(item, reply, self._delivery.group, now) for item, reply in failed])
            except errors.DeadLetterFailed as failure:
                missing, why = failure.parameters.get("missing", range(len(failed))), failure.description
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
    # A caller repeats the call until nothing is left: a record that always fails must not return forever.
    return last_retry or redriven_count(one.record.headers) < MAX_REDRIVES, False


def _again(item: Restored, reply: Reply, group: str, now: float) -> DeadLetter:
    try:
        first = datetime.fromisoformat(item.origin.text("first_failure")).timestamp()
    except ValueError:
        first = now
    return DeadLetter(item.was, group, item.origin.attempts + 1, reply, first, now)


def _unproved(counts: Counter[str]) -> str:
    left = ", ".join(f"{count} of {topic}" for topic, count in counts.items() if count)
    return f"; dead letters left are {left}, which name an origin that the consumer does not read" if left else ""
