"""Dead letters delivered again by the backend of their consumer, a batch per call, without joining its group.

A letter is marked as ended after its delivery is judged, so a call that dies repeats letters and loses none.
Source: sidecar.md 8.3 and defects 26 and 46.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

import msgspec

from headrace.config.kafka import KafkaConfig
from headrace.control.redelivered import Letter, OneOrigin, Redelivered
from headrace.control.running_consumer import RunningConsumer
from headrace.delivery.dead_letter import MAX_REDRIVES, origin_of, redriven_count, restored, write_all
from headrace.delivery.protocols import Delivery
from headrace.errors import (
    DestinationUnavailable,
    InvalidRequest,
    InvalidTopicName,
    KafkaTimeout,
    KafkaUnavailable,
    LeaseTaken,
    ReadFailed,
    TopicNotFound,
)
from headrace.kafka import Admin, Lease, read_records
from headrace.lifecycle import Clock, Service
from headrace.records import OutgoingRecord, TopicPartition

log = logging.getLogger(__name__)

_READ_SECONDS: Final = 10.0
_MOST_READ_SECONDS: Final = 60.0
_ENDED_RECORDS: Final = 5_000
_IDLE_SECONDS: Final = 2.0
_WAIT_SECONDS: Final = 5.0
"""For a lease: longer than another process keeps one that it does not use."""
_SWEEP_SECONDS: Final = 1.0


class Marks(Protocol):
    """Which letters of one topic have ended."""

    async def prepare(self) -> None:
        """Make what keeps the marks."""

    async def load(self, *, settled: bool = False) -> None:
        """Read them anew."""

    def is_ended(self, partition: int, offset: int) -> bool:
        """Return whether a letter has ended."""

    def first_left(self, partition: int, start: int, end: int) -> int:
        """Return the first offset from `start` to before `end` that has not ended; `end` if all have."""

    def records_for(self, partition: int, offsets: Iterable[int]) -> list[OutgoingRecord]:
        """Mark letters as ended, and return the records that say so."""


class RedeliveryRequest(msgspec.Struct, frozen=True):
    """Which dead letters are delivered again; other fields are ignored, as in the original."""

    group: str | None = None
    """Group of a consumer, to choose it; any other name is only told back. By default the topics choose."""
    topic: str | None = None
    """Topics that the letters came from, with commas between; by default those in the consumer's `topics`."""
    timeout: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """How long to read letters at most, in milliseconds; 10 s by default, a minute at most."""
    lastretry: bool = False
    """Whether what fails again has ended, instead of being a dead letter once more. Of this call only."""


class RedeliveryAnswer(msgspec.Struct, frozen=True):
    """What became of a batch of dead letters; ask again until there are no records."""

    group: str
    instance: str
    topics: list[str]
    """Dead letter topics that were looked into."""
    records: int
    """Letters that were delivered to the backend."""
    description: str
    status: Literal["empty", "processed", "rolledBack"]
    """`rolledBack` when some or all of them have not ended and will come again."""


class Looked(NamedTuple):
    """A dead letter topic and whose letters in it are meant."""

    consumer: RunningConsumer
    topic: str


class _Passed:
    """How far calls for one consumer found no dead letter to deliver, as long as the consumers stay the same."""

    def __init__(self, scope: object) -> None:
        """Prepare; `scope` is what decides which dead letters are the consumer's."""
        self.scope = scope
        self.positions: dict[TopicPartition, int] = {}
        """Next offsets to read."""
        self.unproved = 0
        """Dead letters before them whose origin the consumer does not read."""


class _Kept(NamedTuple):
    lease: Lease
    marks: Marks
    used: float
    passed: dict[tuple[str, bool], _Passed]
    """By group, and by whether `lastretry` was set."""

    def passed_for(self, scope: object, group: str, last_retry: bool) -> _Passed:
        """Return how far calls came with this scope."""
        passed = self.passed.get((group, last_retry))
        if passed is None or passed.scope != scope:
            passed = self.passed[group, last_retry] = _Passed(scope)
        return passed


class Redelivery(Service):
    """Serves the calls; keeps a topic's lease for some seconds after one, because the next usually follows."""

    def __init__(
        self,
        kafka: KafkaConfig,
        admin: Admin,
        consumers: Mapping[str, RunningConsumer],
        produce: Callable[[Sequence[OutgoingRecord]], Awaitable[Sequence[Any]]],
        marks_of: Callable[[str], Marks],
        clock: Clock,
        host: str,
    ) -> None:
        """Prepare; `consumers` may come and go, `marks_of` tells what has ended, `host` is for the answer."""
        super().__init__("dead letter redelivery")
        self._kafka, self._admin, self._consumers, self._produce = kafka, admin, consumers, produce
        self._marks_of, self._clock = marks_of, clock
        self._instance = f"Reactive-Replay-{host}"
        self._kept: dict[str, _Kept] = {}
        self._busy: set[str] = set()

    async def start(self) -> None:
        self.spawn(self._sweep(), "sweep")

    async def stop(self) -> None:
        for topic in [*self._kept]:
            await self._kept.pop(topic).lease.release()

    def chosen(self, request: RedeliveryRequest) -> list[tuple[str, RunningConsumer]]:
        """Return the topics whose dead letters are meant, each with every consumer that reads it.

        Raises:
            InvalidTopicName: No consumer of this process reads one of the topics.
        """
        consumers = [each for each in self._consumers.values() if each.kind == "reactive"]
        of_group = [consumer for consumer in consumers if consumer.group == request.group]
        consumers = of_group or consumers
        asked = [name.strip() for name in (request.topic or "").split(",") if name.strip()]
        found: list[tuple[str, RunningConsumer]] = []
        for name in dict.fromkeys(asked or [topic for consumer in consumers for topic in consumer.topics]):
            reads = [consumer for consumer in consumers if consumer.reads(name)]
            found += [(name, consumer) for consumer in reads]
            if not reads:
                group = f" of group {request.group}" if of_group else ""
                raise InvalidTopicName(
                    f"{name[:249]} is consumed by no reactive consumer{group} here: name topics as they stand in its "
                    "topics, without the ending of their dead letter topic"
                )
        return found

    async def run(self, request: RedeliveryRequest) -> RedeliveryAnswer:
        """Deliver one batch of letters that are left, of the first topic that has any.

        Raises:
            InvalidTopicName: See `chosen`.
            InvalidRequest: The backend keeps offsets.
            LeaseTaken: Others work on the letters of the topic.
            ReadFailed: Kafka or the backend does not answer; what had not ended is left.
        """
        chosen = self.chosen(request)
        if kept := next((c.group for _, c in chosen if c.no_replay), ""):
            raise InvalidRequest(
                f"the backend of group {kept} keeps the group's offsets (backend.offsets_path), and a letter would "
                "move them back: redrive its letters instead (headrace dlq redrive)"
            )
        places = [(consumer, consumer.dead_letter.topic_for(name)) for name, consumer in chosen]
        looked = {(consumer.group, topic): Looked(consumer, topic) for consumer, topic in places}
        topics = list(dict.fromkeys(topic for _, topic in looked))
        group, unproved = request.group or next((group for group, _ in looked), ""), Counter[str]()
        try:
            for look in looked.values():
                with contextlib.suppress(TopicNotFound):
                    if done := await self._of_topic(look, request, unproved):
                        return RedeliveryAnswer(group, self._instance, topics, *_told(done, look.topic, unproved))
        except (KafkaUnavailable, KafkaTimeout, DestinationUnavailable) as cause:
            raise ReadFailed(f"dead letters are not delivered, and none is lost: {cause.description}") from cause
        nothing = (
            f"nothing is left in {', '.join(topics)}, but for letters whose record came back {MAX_REDRIVES} times "
            "(lastretry=true takes them): nothing was processed"
        ) + _said(unproved)
        return RedeliveryAnswer(group, self._instance, topics, 0, nothing, "empty")

    async def _of_topic(self, look: Looked, request: RedeliveryRequest, unproved: Counter[str]) -> Redelivered | None:
        topic = look.topic
        if topic in self._busy:
            raise LeaseTaken(f"another call delivers letters of {topic} just now: call again when it is answered")
        self._busy.add(topic)
        try:
            offsets = await self._admin.topic_offsets(topic)
            if all(first >= end for first, end in offsets.values()):
                return None
            kept = await self._keep(topic)
            letters = await self._read(look, offsets, kept, request, unproved)
            return await self._deliver(look, kept, letters, request.lastretry) if letters else None
        finally:
            if topic in self._kept:
                self._kept[topic] = self._kept[topic]._replace(used=self._clock.monotonic())
            self._busy.discard(topic)

    async def _deliver(self, look: Looked, kept: _Kept, letters: Sequence[Letter], last_retry: bool) -> Redelivered:
        """Deliver letters by origin, and mark what has ended after each."""
        done = Redelivered(letters[-1])
        by_origin: defaultdict[tuple[str, TopicPartition], list[Letter]] = defaultdict(list)
        for letter in letters:
            by_origin[letter.origin.group, letter.origin.partition].append(letter)
        for (group, partition), own in by_origin.items():
            await kept.lease.check()
            epoch = look.consumer.pump.epoch_of(partition) if group == look.consumer.group else 0
            delivery = Delivery(group, partition, epoch, [], 1, self._instance)
            ended = await OneOrigin(look.consumer, delivery, done, last_retry, self._clock).deliver(own)
            marks: list[OutgoingRecord] = []
            for number in {letter.record.partition for letter in ended}:
                marks += kept.marks.records_for(
                    number, [e.record.offset for e in ended if e.record.partition == number]
                )
            try:
                await write_all(self._produce, marks, "marks") if marks else None
            except BaseException:
                self._kept.pop(look.topic, None)
                await kept.lease.release()  # what it believes of the marks is not so
                raise
        return done

    async def _read(
        self,
        look: Looked,
        offsets: Mapping[TopicPartition, tuple[int, int]],
        kept: _Kept,
        request: RedeliveryRequest,
        unproved: Counter[str],
    ) -> list[Letter]:
        """Return letters that are left: one batch of the consumer at most; count those of origins it does not read."""
        consumer = look.consumer
        others = {each.group for each in self._consumers.values() if each.kind == "reactive"} - {consumer.group}
        passed = kept.passed_for((consumer, others), consumer.group, request.lastretry)
        unproved[look.topic] += passed.unproved
        ahead = {place: max(first, passed.positions.get(place, first)) for place, (first, _) in offsets.items()}
        ends = {place: end for place, (_, end) in offsets.items()}
        limits, found, size = consumer.delivery.batch, list[Letter](), 0
        stops: dict[TopicPartition, int] = {}
        seconds = min(request.timeout / 1000, _MOST_READ_SECONDS) if request.timeout else _READ_SECONDS
        try:
            async with (
                asyncio.timeout(seconds),
                contextlib.aclosing(self._left(others, ahead, ends, kept.marks)) as letters,
            ):
                async for letter in letters:
                    place = letter.record.topic_partition
                    if not consumer.is_origin(letter.was.topic):
                        unproved[look.topic] += 1
                        passed.unproved += place not in stops
                        continue
                    if redriven_count(letter.was.headers) > MAX_REDRIVES and not request.lastretry:
                        continue  # kept back, or a caller that loops would never come to an end
                    stops.setdefault(place, letter.record.offset)
                    size += letter.record.size_bytes
                    if found and size > limits.max_bytes:
                        break
                    found.append(letter)
                    if len(found) == limits.max_records:
                        break
        except TimeoutError:
            if not found:
                behind = f"{_said(unproved)}: call again within {_IDLE_SECONDS:g} s, and reading resumes behind them"
                none = f"no letter of {look.topic} came within {seconds:g} s"
                raise KafkaUnavailable(none + (behind if unproved[look.topic] else "")) from None
        finally:
            passed.positions = ahead | stops
        return found

    async def _left(
        self, others: Set[str], ahead: dict[TopicPartition, int], ends: Mapping[TopicPartition, int], marks: Marks
    ) -> AsyncGenerator[Letter, None]:
        """Yield letters that are left and no other consumer's; where many have ended, they are gone past unread.

        `ahead` is where to begin, and is kept at the next offset of each partition.
        """
        ended = _ENDED_RECORDS
        while ended >= _ENDED_RECORDS:
            ended = 0
            for place, first in ahead.items():
                ahead[place] = marks.first_left(place.partition, first, ends[place])
            async with contextlib.aclosing(read_records(self._kafka, dict(ahead), ends)) as reader:
                async for records in reader:
                    for record in records:
                        ahead[record.topic_partition] = record.offset + 1
                        if marks.is_ended(record.partition, record.offset):
                            ended += 1
                        elif (origin := origin_of(record.headers)) and origin.group not in others:
                            yield Letter(record, origin, restored(record))
                    if ended >= _ENDED_RECORDS:
                        break

    async def _keep(self, topic: str) -> _Kept:
        """Return the lease and the marks of a topic, taken now if they are not held."""
        kept = self._kept.get(topic)
        if kept and not kept.lease.lost.is_set():
            return kept
        if kept:
            await self._kept.pop(topic).lease.release()
        lease = Lease(self._kafka, self._admin, f"redrive.{topic}", self._clock, source=topic)
        if not await lease.acquire(_WAIT_SECONDS):
            raise LeaseTaken(f"{lease.holder} works on the letters of {topic}: wait until it is done, or end it")
        marks = self._marks_of(topic)
        try:
            await marks.prepare()
            await marks.load(settled=True)
        except BaseException:
            await lease.release()
            raise
        kept = self._kept[topic] = _Kept(lease, marks, self._clock.monotonic(), {})
        return kept

    async def _sweep(self) -> None:
        while True:
            await self._clock.sleep(_SWEEP_SECONDS)
            old = self._clock.monotonic() - _IDLE_SECONDS
            for topic, kept in [*self._kept.items()]:
                if topic not in self._busy and kept.used < old:
                    del self._kept[topic]
                    await kept.lease.release()


def _said(unproved: Counter[str]) -> str:
    left = (f"{count} of {topic}" for topic, count in unproved.items())
    return (
        f"; dead letters left are {', '.join(left)}, which name an origin that the consumer does not read"
        if unproved
        else ""
    )


def _told(done: Redelivered, topic: str, unproved: Counter[str]) -> tuple[int, str, Literal["processed", "rolledBack"]]:
    """Return the last fields of an answer. Source: sidecar.md 8.3 (the end of the text)."""
    last = done.last.record
    where = f"partition:{last.partition}| offset:{last.offset}"
    counts = f"{done.ended} ended" + (f", {done.again} of them as dead letters once more" if done.again else "")
    counts += f", {done.given_up} of them failed for the last time" if done.given_up else ""
    counts += _said(unproved)
    if done.left:
        text = f"processing error and rollback: of {topic} {counts}, {done.left} are left ({done.why}); up to {where}"
        return done.ended + done.left, text, "rolledBack"
    return done.ended, f"success, letters of {topic} are processed: {counts}; up to {where}", "processed"
