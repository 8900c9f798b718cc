"""What operators ask of replays, checked and made into jobs. Nothing is begun unless all of it can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from headrace.config.internal_topics import InternalTopics
from headrace.control.jobs import Job, Jobs, JobView, Work, spec_of
from headrace.control.replay_run import TO_TOPIC_FLOW, Place, ReplaySpec, ReplayWork, repeats_of
from headrace.control.running_consumer import RunningConsumer, find_consumer
from headrace.control.selection import Moment, Selection, Span, Window
from headrace.errors import (
    InvalidRequest,
    JobConflict,
    NotFound,
    ProducerNotEnabled,
    ReplayMetadataInvalid,
    RequestError,
)
from headrace.kafka import Admin, check_topic

_LETTER_KINDS = ("redrive", "drop", "quarantine")


class Offsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A window of one partition: from `start` to before `end`."""

    start: int
    end: int


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A window of time, ISO 8601 with a zone: from `since` to before `until`."""

    since: Moment | None = None
    until: Moment | None = None


class Destination(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Where to: one of them by its name."""

    consumer: str = ""
    function: str = ""
    topic: str = ""


class ReplayRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    """A window of a topic, and where to deliver it once more."""

    topic: str
    dead_letter: bool = False
    """The dead letters of that topic instead."""
    partition: Annotated[int, msgspec.Meta(ge=0)] | None = None
    offsets: Offsets | None = None
    time: Times | None = None
    to: Destination
    rate: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Records per second at most."""
    last_retry: bool = False
    """What fails is counted, and no dead letter again."""
    dry_run: bool = False
    """Say what would be replayed, and begin nothing."""


class DryRun(msgspec.Struct, frozen=True, rename="camel"):
    """What would be done, and is not."""

    total: int
    """Offsets or letters in all."""
    spec: dict[str, Any]
    dry_run: bool = True


class ReplayMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What `POST /adm/messagereplaymetadata` takes. Source: sidecar.md 8.6."""

    topic_name: str = ""
    dlq_indicator: bool = False
    partition: int = -1
    start_offset: int = -1
    end_offset: int = -1
    consumer_group: str = ""
    timeout: int = 0
    streaming_app: bool = False
    destination_topic: str = ""
    last_retry: bool = False


class Replays:
    """Begins replays, and makes what runs them."""

    def __init__(
        self,
        place: Place,
        consumers: Mapping[str, RunningConsumer],
        internal: InternalTopics,
        *,
        producing: bool = True,
    ) -> None:
        """Prepare.

        Args:
            place: Kafka, a producer and a clock.
            consumers: The consumers of this process by name; registered ones come and go.
            internal: Topics that nothing is replayed to.
            producing: Whether producing is on, which the seed's endpoint needs as it always did.
        """
        self._place, self._consumers, self._producing = place, consumers, producing
        self._internal = internal

    def make(self, job: Job) -> Work | None:
        """Return what runs a replay, or None if this process has not what it delivers to."""
        spec: ReplaySpec = spec_of(job, ReplaySpec)
        if "topic" not in spec.to and self._target_of(spec.to) is None:
            return None
        return ReplayWork(job, spec, self._place, self._target_of)

    def _target_of(self, to: Mapping[str, str]) -> RunningConsumer | None:
        return find_consumer(self._consumers.values(), *next(iter(to.items()), ("", "")))

    async def begin(self, jobs: Jobs, request: ReplayRequest, by: str) -> JobView | DryRun:
        """Begin a replay and return its job, or say what it would be.

        Raises:
            InvalidRequest: What is asked for makes no sense, and why.
            NotFound: There is no such topic, partition, consumer or function.
            JobConflict: It runs already.
        """
        spec = await self._spec(request)
        if request.dry_run:
            return DryRun(spec.window.total, msgspec.to_builtins(spec, str_keys=True))
        return await jobs.create("replay", msgspec.to_builtins(spec, str_keys=True), by)

    async def letters_spec(
        self, topic: str, selection: Selection, consumer: str, rate: float | None, last_retry: bool
    ) -> ReplaySpec:
        """Return what redrives selected dead letters to the backend of a consumer: those of its group, or as asked.

        Raises:
            NotFound: There is no such consumer, topic or partition.
            InvalidRequest: They are not the consumer's, or the window holds none.
        """
        target = self._target("consumer", consumer)
        if not self._check(target, topic, f"consumer {consumer}"):
            raise InvalidRequest(f"{topic} is a topic that consumer {consumer} reads, and no dead letter topic")
        selection = msgspec.structs.replace(selection, groups=selection.groups or [target.group])
        return ReplaySpec(
            window=await self._window(target.admin, topic, selection, cut_until=False),
            to={"consumer": consumer},
            rate=rate,
            last_retry=last_retry,
            letters=True,
            select=selection,
            repeats_at_most=repeats_of(target.flow),
        )

    async def begin_as_seed(self, jobs: Jobs, asked: ReplayMetadata, by: str) -> JobView | DryRun:
        """Begin the replay that the seed's endpoint describes and return its job.

        Raises:
            ProducerNotEnabled: Producing is off.
            ReplayMetadataInvalid: What is asked for makes no sense, and why in one line.
            JobConflict: It runs already.
        """
        if not self._producing:
            raise ProducerNotEnabled()
        try:
            return await self.begin(jobs, self._as_request(asked), by)
        except (JobConflict, ReplayMetadataInvalid):
            raise
        except RequestError as error:
            raise ReplayMetadataInvalid(error.description) from error

    def _as_request(self, asked: ReplayMetadata) -> ReplayRequest:
        topic, group = asked.topic_name[:249], asked.consumer_group[:100]
        readers = [each for each in self._consumers.values() if each.reads(asked.topic_name)]
        chosen = [each for each in readers if each.group == asked.consumer_group]
        if not any(each.group == asked.consumer_group for each in self._consumers.values()):
            chosen = readers  # a group of the caller's own, which the original advises: it stays unused
        several = len(chosen) > 1 and (asked.dlq_indicator or not asked.streaming_app)
        problems = {
            "topicName is missing": not topic,
            "partition must be 0 or greater": asked.partition < 0,
            "startOffset and endOffset must be 0 or greater": min(asked.start_offset, asked.end_offset) < 0,
            "startOffset must be less than endOffset": asked.start_offset >= asked.end_offset,
            "consumerGroup is missing": not group,
            f"topicName {topic} is read by no consumer here": not readers,
            f"topicName {topic} is not read by the group {group}": not chosen,
            f"topicName {topic} is read by several groups: set consumerGroup to one of them": several,
            "destinationTopic is missing, and streamingApp is true": asked.streaming_app
            and not asked.destination_topic,
        }
        if problem := next((text for text, holds in problems.items() if holds), ""):
            raise ReplayMetadataInvalid(problem)
        target, letters = chosen[0], None
        if asked.dlq_indicator and (letters := target.dead_letters) is None:
            raise ReplayMetadataInvalid(f"the group {target.group} has no dead letters")
        kind = "consumer" if target.kind == "reactive" else "function"
        to = {"topic": asked.destination_topic} if asked.streaming_app else {kind: target.name}
        return ReplayRequest(
            topic=letters.topic_for(asked.topic_name) if letters else asked.topic_name,
            partition=asked.partition,
            offsets=Offsets(asked.start_offset, asked.end_offset),
            to=Destination(**to),
            last_retry=asked.last_retry,
        )

    async def _spec(self, request: ReplayRequest) -> ReplaySpec:
        to: dict[str, str] = msgspec.to_builtins(request.to)
        if len(to) != 1:
            raise InvalidRequest("name one destination in to: a consumer, a function or a topic")
        if request.offsets and request.time:
            raise InvalidRequest("name offsets or time, not both")
        ((kind, name),) = to.items()
        target = self._target(kind, name) if kind != "topic" else None
        topic, admin, of_letters = check_topic(request.topic), self._place.admin, False
        if request.dead_letter:
            if not (target and target.dead_letters):
                raise InvalidRequest("deadLetter needs a consumer or function that has dead letters: name their topic")
            topic = target.dead_letters.topic_for(topic)
        if target:
            admin, of_letters = target.admin, self._check(target, topic, f"{kind} {name}")
        elif topic == name:
            raise InvalidRequest(f"{topic} is where the records come from: replay it to another topic", topic=topic)
        else:
            if self._internal.kind_of(check_topic(name)):
                raise InvalidRequest(f"{name} is internal: only Headrace writes there, so name another topic")
            await admin.describe_topic(name)
        return ReplaySpec(
            window=await self._window(admin, topic, self._span(request)),
            to=to,
            rate=request.rate,
            last_retry=request.last_retry,
            letters=of_letters,
            repeats_at_most=repeats_of(target.flow if target else TO_TOPIC_FLOW),
        )

    def _span(self, request: ReplayRequest) -> Span:
        """Return the part of a topic that a request names."""
        times, offsets = request.time or Times(), request.offsets
        if times.until is not None and times.until.timestamp() > self._place.clock.time():
            raise InvalidRequest("the window ends in the future: leave until out to go up to what is there now")
        if offsets is None:
            return Span(partition=request.partition, since=times.since, until=times.until)
        if request.partition is None:
            raise InvalidRequest("offsets need a partition: they count within one")
        if offsets.start < 0 or offsets.start >= offsets.end:
            what = "empty" if offsets.start == offsets.end else "reversed or negative"
            raise InvalidRequest(f"offsets {offsets.start} to {offsets.end} are {what}: end is one more than the last")
        return Span(partition=request.partition, first=offsets.start, last=offsets.end - 1)

    async def _window(self, admin: Admin, topic: str, span: Span, *, cut_until: bool = True) -> Window:
        """Return a window that holds an offset."""
        window = await Window.resolve(admin, topic, span, self._place.clock.time(), cut_until=cut_until)
        ranges = {number: bounds for number, bounds in window.ranges.items() if bounds[0] < bounds[1]}
        if not ranges:
            raise InvalidRequest(f"the window is empty: {topic} holds no record in it", topic=topic)
        return msgspec.structs.replace(window, ranges=ranges)

    def _target(self, kind: str, name: str) -> RunningConsumer:
        if target := find_consumer(self._consumers.values(), kind, name):
            return target
        running = [each for each in self._consumers.values() if (each.kind == "function") == (kind == "function")]
        known = (
            ", ".join(sorted({each.name for each in running}.union(each.function for each in running) - {""})) or "none"
        )
        raise NotFound(f"there is no {kind} {name[:100]!r} in this process: known are {known}")

    def _check(self, target: RunningConsumer, topic: str, label: str) -> bool:
        """Return whether a topic holds dead letters of a target, which else reads it."""
        if target.no_replay:
            raise InvalidRequest(f"{label} takes no replay: {target.no_replay}")
        if target.reads(topic):
            return False
        if target.writes_dead_letters_to(topic):
            return True
        raise InvalidRequest(
            f"{label} does not read {topic}, and its dead letters do not go there: replay one of its topics"
        )


def conflict(one: Job, other: Job) -> bool:
    """Whether two jobs must not run beside each other: they would send the same records to the same place."""
    try:
        if letters := _letters_topic(one):
            return letters == _letters_topic(other)
        if one.kind != "replay" or other.kind != "replay":
            return False
        first, second = spec_of(one, ReplaySpec), spec_of(other, ReplaySpec)
    except (InvalidRequest, LookupError, TypeError):  # nobody can run what nobody can read
        return False
    return bool(first.to == second.to and first.window.overlaps(second.window))


def _letters_topic(job: Job) -> str:
    """Return the dead letter topic whose letters a job ends."""
    if job.kind not in _LETTER_KINDS:
        return ""
    return str(job.spec.get("topic") or job.spec["window"]["topic"])
