"""Dead letters delivered again by the backend of their consumer, a batch per call, without joining its group.

A call is a run of one batch and one attempt, judged by the consumer's policy as its own records are. A dead letter is
saved as ended after its delivery is judged, so a call that dies repeats dead letters and loses none. The endpoint and
its answer are those of light-4j kafka-sidecar.
"""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence, Set
from datetime import datetime
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec

from headrace import errors
from headrace.config.consumers import DeliveryConfig
from headrace.control.dead_letters.ended_offsets import EndedOffsets, dead_letter_lease
from headrace.control.dead_letters.pages import FoundDeadLetter, Scan, ScanOptions
from headrace.control.running_consumer import RunningConsumer, RunningConsumers
from headrace.control.runs.replay import repeats_of
from headrace.control.runs.selection import Selection
from headrace.control.runs.window_run import Limits, Progress, Run, WindowSource
from headrace.delivery.dead_letter import MAX_REDRIVES, Origin, redriven_count, restored
from headrace.delivery.outcomes import DELEGATED, DeadLetter, Delivery, Outcome, Reply
from headrace.delivery.policy import judge, last_error
from headrace.delivery.pump import Pump
from headrace.delivery.pump_context import PumpHooks
from headrace.kafka import Admin
from headrace.records import Committed, Offsets, Produce, Record, TopicPartition
from headrace.runtime import Clock

_READ_SECONDS: Final = 10.0
_MOST_READ_SECONDS: Final = 60.0
_ROUND_SECONDS: Final = 0.5
"""How long the round of reading that has begun when the time is over may take."""
_LEASE_SECONDS: Final = 5.0
_LEFT: Final = (Outcome.ROLL_BACK, Outcome.UNAVAILABLE)
"""What the policy would deliver again for another reason than a record's own failure."""


class RedeliveryRequest(msgspec.Struct, frozen=True):
    """Which dead letters are delivered again; other fields are ignored, as in light-4j kafka-sidecar."""

    group: str | None = None
    """Group of a consumer, to choose it; another name is only repeated in the answer. By default the topics choose."""
    topic: str | None = None
    """Origin topics of the dead letters, with commas between; by default those in the consumer's `topics`."""
    timeout: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How long to read dead letters at most, in milliseconds; 10 s by default, a minute at most."""
    lastretry: bool = False
    """Whether what fails again has ended, instead of being a dead letter once more. Of this call only."""


class RedeliveryAnswer(msgspec.Struct, frozen=True):
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


SaveEnded = Callable[[Sequence[Restored]], Awaitable[None]]
"""Saves that dead letters have ended."""


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
        """Prepare; `consumers` may change at any time, `host` is for the answer."""
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

    async def run(self, request: RedeliveryRequest) -> RedeliveryAnswer:
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
                    if batches := await self._of_topic(topic, consumer, request, unproved):
                        return RedeliveryAnswer(group, self._instance, topics, *_summary(topic, batches, unproved))
        except (errors.KafkaUnavailable, errors.KafkaTimeout, errors.DestinationUnavailable) as cause:
            raise errors.ReadFailed(f"dead letters are not delivered, and none is lost: {cause.description}") from cause
        nothing = (
            f"nothing is left in {', '.join(topics)}, but for dead letters that were redriven {MAX_REDRIVES} times "
            "(lastretry=true takes them): nothing was processed"
        )
        return RedeliveryAnswer(group, self._instance, topics, 0, nothing + _unproved(unproved), "empty")

    async def _of_topic(
        self, topic: str, consumer: RunningConsumer, request: RedeliveryRequest, unproved: Counter[str]
    ) -> "Sequence[OneBatch]":
        if topic in self._busy:
            raise errors.LeaseTaken(
                f"another call delivers dead letters of {topic} just now: call again when it is answered"
            )
        self._busy.add(topic)
        try:
            offsets = await self._admin.topic_offsets(topic, "Read")
            if all(first >= end for first, end in offsets.values()):
                return ()
            async with dead_letter_lease(self._admin, topic, self._clock, _LEASE_SECONDS) as lease:
                ended = EndedOffsets(self._admin, topic)
                await ended.prepare(self._produce)
                await ended.load(settled=True)

                async def save(items: Sequence[Restored]) -> None:
                    by_partition: defaultdict[int, list[int]] = defaultdict(list)
                    for item in items:
                        by_partition[item.record.partition].append(item.record.offset)
                    await ended.save(self._produce, by_partition)

                by_group: defaultdict[str, list[Restored]] = defaultdict(list)
                for item in await self._read(topic, consumer, ended, request, unproved):
                    by_group[item.origin.group].append(item)
                batches = [OneBatch(consumer, own, last_retry=request.lastretry) for own in by_group.values()]
                for batch in batches:
                    await lease.check()
                    await batch.run(self._clock, self._instance, save)
                    if batch.unavailable:
                        if any(each.ended for each in batches):
                            break
                        raise batch.unavailable
                return batches
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


class OneBatch:
    """Delivers dead letters of one group as the records they were, each once: a run without another attempt.

    It is the destination of the run and writes its dead letters. What the policy would deliver again, because the
    backend did not take it or too much failed, is passed over. So it is left.
    """

    def __init__(self, consumer: RunningConsumer, items: Sequence[Restored], *, last_retry: bool) -> None:
        """Prepare; with `last_retry` what fails has ended, and is no dead letter once more."""
        self.items = items
        self.counts = Counter[Outcome]()
        """Records by how they ended."""
        self.ended = 0
        """Dead letters that have ended; a record may have several, as after a crash."""
        self.why = ""
        """Why the others are left."""
        self.unavailable: errors.DestinationUnavailable | None = None
        """Set when the backend does not answer; nothing more is delivered then."""
        self._consumer, self._group, self._last_retry = consumer, items[0].origin.group, last_retry
        self._of: defaultdict[tuple[TopicPartition, int], list[Restored]] = defaultdict(list)
        for item in sorted(items, key=lambda item: item.was.offset):
            self._of[item.was.topic_partition, item.was.offset].append(item)
        self._unsaved: list[Restored] = []
        self._stop = asyncio.Event()

    @property
    def left(self) -> int:
        """Dead letters that have not ended."""
        return len(self.items) - self.ended

    async def run(self, clock: Clock, replay: str, save: SaveEnded) -> None:
        """Deliver, and save what has ended; `replay` is the id that deliveries carry.

        Raises:
            HeadraceError: That of `save`, which is called once more before.
        """
        consumer, flow = self._consumer, self._consumer.flow
        records: defaultdict[TopicPartition, list[Record]] = defaultdict(list)
        for (partition, _), items in self._of.items():
            records[partition].append(items[0].was)

        async def read(*_: Offsets) -> AsyncGenerator[list[Record], None]:
            for own in records.values():
                yield own

        async def save_ended(_: Progress) -> bool:
            if over := list(self._unsaved):
                await save(over)
                del self._unsaved[: len(over)]
            return True

        pump = Pump(
            f"dead letters of {self._group}",
            self._group,
            self,
            self,
            delivery=once(consumer.delivery, last_retry=self._last_retry),
            clock=clock,
            shares_with=consumer.pump,
            hooks=PumpHooks(on_ended=self._on_ended, replay=replay, commit_seconds=0.0),
        )
        source = WindowSource(
            pump,
            {partition: Committed(own[0].offset) for partition, own in records.items()},
            {partition: own[-1].offset + 1 for partition, own in records.items()},
            read=read,
            start_offsets=consumer.admin.start_offsets,
            limits=Limits(flow, repeats_of(flow)),
            clock=clock,
        )
        try:
            await Run(clock, self._check).deliver(pump, source, save_ended, self._stop)
        except errors.DestinationUnavailable as cause:
            self._leave(cause)

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        records = delivery.records
        if self.unavailable:
            return [DELEGATED] * len(records)
        attempts = max(self._of[delivery.partition, record.offset][0].origin.attempts for record in records)
        epoch = delivery.epoch if self._group == self._consumer.group else 0
        try:
            replies = await self._consumer.destination.deliver(delivery._replace(attempt=attempts + 1, epoch=epoch))
        except errors.DeliveryError as cause:
            self._leave(cause)
            return [DELEGATED] * len(records)
        judged = judge(records, replies, self._consumer.delivery.retry, attempt=0)  # as if another attempt were left
        left = {record.offset for how in _LEFT for record, _ in judged.get(how, ())}
        if left:
            rolled_back = Outcome.ROLL_BACK in judged
            self.why = "more failed than the roll-back threshold allows: " * rolled_back + last_error(replies)
        # A dead letter has failed before: that it fails again says nothing new of the backend.
        final = (reply._replace(permanent=True) if reply.error else reply for reply in replies)
        return [DELEGATED if record.offset in left else reply for record, reply in zip(records, final, strict=True)]

    async def write(self, dead_letters: Sequence[DeadLetter]) -> None:
        try:
            if self._consumer.dead_letters is None:
                raise errors.DeadLetterFailed(f"{dead_letters[0].reply.error}, and dead letters are off")
            await self._consumer.dead_letters.write([self._again(dead_letter) for dead_letter in dead_letters])
        except errors.DeadLetterFailed as failure:
            self.why = failure.description
            self._stop.set()
            raise

    def _again(self, dead_letter: DeadLetter) -> DeadLetter:
        origin = self._of[dead_letter.record.topic_partition, dead_letter.record.offset][0].origin
        first = dead_letter.first_failed_at
        with contextlib.suppress(ValueError):
            first = datetime.fromisoformat(origin.text("first_failure")).timestamp()
        return dead_letter._replace(attempts=origin.attempts + 1, first_failed_at=first)

    def _on_ended(
        self, records: Sequence[Record], size_bytes: int, how: Outcome, replies: Sequence[Reply], replay: str
    ) -> None:
        over = [item for record in records for item in self._of[record.topic_partition, record.offset]]
        self.counts[how] += len(records)
        self.ended += len(over)
        self._unsaved += over
        if report := self._consumer.pump.hooks.on_ended:
            report(records, size_bytes, how, replies, replay)

    def _leave(self, cause: errors.DeliveryError) -> None:
        self.why = cause.description
        if isinstance(cause, errors.DestinationUnavailable):
            self.unavailable = cause

    def _check(self) -> None:
        breaker = self._consumer.pump.breaker.status
        if breaker.state == "open":
            raise errors.DestinationUnavailable(breaker.why)


def once(delivery: DeliveryConfig, *, last_retry: bool) -> DeliveryConfig:
    """Return the settings of deliveries without another attempt, a batch of a partition after the other."""
    one: dict[str, Any] = {"attempts": 1, "first_delay_seconds": 0.0, "tiers": [], "keep_key_order": False}
    retry = delivery.retry.model_copy(update={**one, "last_retry": last_retry})
    batch = delivery.batch.model_copy(update={"linger_seconds": 0.0})
    return delivery.model_copy(update={"ordering": "partition", "batch": batch, "retry": retry})


def _summary(
    topic: str, batches: Sequence[OneBatch], unproved: Counter[str]
) -> tuple[int, str, Literal["processed", "rolledBack"]]:
    """Return how many dead letters were delivered, and what became of them."""
    ended, left = sum(batch.ended for batch in batches), sum(batch.left for batch in batches)
    counts: Counter[Outcome] = sum([batch.counts for batch in batches], Counter())
    again, given_up, last = counts[Outcome.DEAD_LETTER], counts[Outcome.GIVEN_UP], batches[-1].items[-1].record
    text = f"{ended} ended" + (f", {again} of them as dead letters once more" if again else "")
    text += f", {given_up} of them failed for the last time" if given_up else ""
    text += _unproved(unproved)
    where = f"up to partition:{last.partition}| offset:{last.offset}"
    if not left:
        return ended, f"success, dead letters of {topic} are processed: {text}; {where}", "processed"
    why = next((batch.why for batch in batches if batch.why), "")
    text = f"processing error and rollback: of {topic} {text}, {left} are left ({why}); {where}"
    return ended + left, text, "rolledBack"


def _takes(one: FoundDeadLetter, consumer: RunningConsumer, others: Set[str], last_retry: bool) -> tuple[bool, bool]:
    """Return whether a dead letter is delivered, and whether its origin is unproved."""
    if one.origin.group in others:
        return False, False
    if not consumer.is_origin(one.origin.partition.topic):
        return False, True
    # A caller repeats the call until nothing is left: a record that always fails must not return forever.
    return last_retry or redriven_count(one.record.headers) < MAX_REDRIVES, False


def _unproved(counts: Counter[str]) -> str:
    left = ", ".join(f"{count} of {topic}" for topic, count in counts.items() if count)
    return f"; dead letters left are {left}, which name an origin that the consumer does not read" if left else ""
