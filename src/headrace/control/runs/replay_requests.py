"""Requests for replays, checked and made into jobs. Nothing starts unless all of it can."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from headrace import errors
from headrace.control.running_consumer import RunningConsumer, RunningConsumers, find_consumer
from headrace.control.runs.jobs import Job, JobRunner, Jobs, JobView, spec_of
from headrace.control.runs.replay import TO_TOPIC_FLOW, ReplayJob, ReplaySpec, RunContext, repeats_of
from headrace.control.runs.selection import Moment, Selection, Span, Window
from headrace.kafka import Admin, check_topic
from headrace.kafka.internal_topics import InternalTopics


class Offsets(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A window of one partition: from `start` to before `end`."""

    start: int
    end: int


class Times(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A window of time, ISO 8601 with a zone: from `since` to before `until`."""

    since: Moment | None = None
    until: Moment | None = None


class ReplayTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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
    to: ReplayTarget
    rate: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Records per second at most."""
    last_retry: bool = False
    """What fails is counted, and no dead letter again."""
    dry_run: bool = False
    """Say what would be replayed, and start nothing."""


class DryRun(msgspec.Struct, frozen=True, rename="camel"):
    """What a replay would do."""

    total: int
    """Offsets in all."""
    spec: dict[str, Any]
    dry_run: bool = True


class ReplayMetadata(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What `POST /adm/messagereplaymetadata` takes, as light-4j kafka-sidecar does."""

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
    """Starts replays, and makes what runs them."""

    def __init__(
        self, context: RunContext, consumers: RunningConsumers, internal: InternalTopics, *, producing: bool = True
    ) -> None:
        """Prepare; `consumers` are those of this process and may change, nothing is replayed to `internal` topics.

        `begin_by_metadata` needs `producing`.
        """
        self._context, self._consumers, self._producing = context, consumers, producing
        self._internal = internal

    def make(self, job: Job) -> JobRunner | None:
        """Return what runs a replay, or None if its target does not run in this process."""
        spec: ReplaySpec = spec_of(job, ReplaySpec)
        if "topic" not in spec.to and self._target_of(spec.to) is None:
            return None
        return ReplayJob(job, spec, self._context, self._target_of).run

    def _target_of(self, to: Mapping[str, str]) -> RunningConsumer | None:
        return find_consumer(self._consumers.values(), *next(iter(to.items()), ("", "")))

    async def begin(self, jobs: Jobs, request: ReplayRequest, by: str) -> JobView | DryRun:
        """Start a replay and return its job, or say what it would be.

        Raises:
            InvalidRequest: The request makes no sense, and why.
            NotFound: There is no such topic, partition, consumer or function.
            JobConflict: It runs already.
        """
        spec = await self._spec(request)
        if request.dry_run:
            return DryRun(spec.window.total, msgspec.to_builtins(spec, str_keys=True))
        return await jobs.create("replay", msgspec.to_builtins(spec, str_keys=True), by)

    async def redrive_spec(
        self, topic: str, selection: Selection, consumer: str, rate: float | None, last_retry: bool
    ) -> ReplaySpec:
        """Return what redrives selected dead letters to a consumer: those of its group unless groups are selected.

        Raises:
            NotFound: There is no such consumer, topic or partition.
            InvalidRequest: They are not the consumer's, or the window holds none.
        """
        target = self._target("consumer", consumer)
        if not self._check(target, topic, f"consumer {consumer}"):
            raise errors.InvalidRequest(f"{topic} is a topic that consumer {consumer} reads, and no dead letter topic")
        selection = msgspec.structs.replace(selection, groups=selection.groups or [target.group])
        return ReplaySpec(
            window=await self._window(target.admin, topic, selection, cut_until=False),
            to={"consumer": consumer},
            rate=rate,
            last_retry=last_retry,
            dead_letters=True,
            select=selection,
            repeats_at_most=repeats_of(target.flow),
        )

    async def begin_by_metadata(self, jobs: Jobs, metadata: ReplayMetadata, by: str) -> JobView | DryRun:
        """Start the replay that the metadata describes and return its job.

        Raises:
            ProducerNotEnabled: Producing is off.
            ReplayMetadataInvalid: The request makes no sense, and why in one line.
            JobConflict: It runs already.
        """
        if not self._producing:
            raise errors.ProducerNotEnabled()
        try:
            return await self.begin(jobs, self._as_request(metadata), by)
        except (errors.JobConflict, errors.ReplayMetadataInvalid):
            raise
        except errors.RequestError as error:
            raise errors.ReplayMetadataInvalid(error.description) from error

    def _as_request(self, metadata: ReplayMetadata) -> ReplayRequest:
        topic, group = metadata.topic_name[:249], metadata.consumer_group[:100]
        readers = [each for each in self._consumers.values() if each.reads(metadata.topic_name)]
        chosen = [each for each in readers if each.group == metadata.consumer_group]
        if not any(each.group == metadata.consumer_group for each in self._consumers.values()):
            chosen = readers  # a group of the caller's own, which light-4j kafka-sidecar advises: it stays unused
        several = len(chosen) > 1 and (metadata.dlq_indicator or not metadata.streaming_app)
        problems = {
            "topicName is missing": not topic,
            "partition must be 0 or greater": metadata.partition < 0,
            "startOffset and endOffset must be 0 or greater": min(metadata.start_offset, metadata.end_offset) < 0,
            "startOffset must be less than endOffset": metadata.start_offset >= metadata.end_offset,
            "consumerGroup is missing": not group,
            f"topicName {topic} is read by no consumer here": not readers,
            f"topicName {topic} is not read by the group {group}": not chosen,
            f"topicName {topic} is read by several groups: set consumerGroup to one of them": several,
            "destinationTopic is missing, and streamingApp is true": metadata.streaming_app
            and not metadata.destination_topic,
        }
        if problem := next((text for text, holds in problems.items() if holds), ""):
            raise errors.ReplayMetadataInvalid(problem)
        target, dead_letters = chosen[0], None
        if metadata.dlq_indicator and (dead_letters := target.dead_letters) is None:
            raise errors.ReplayMetadataInvalid(f"the group {target.group} has no dead letters")
        kind = "consumer" if target.kind == "reactive" else "function"
        to = {"topic": metadata.destination_topic} if metadata.streaming_app else {kind: target.name}
        return ReplayRequest(
            topic=dead_letters.topic_for(metadata.topic_name) if dead_letters else metadata.topic_name,
            partition=metadata.partition,
            offsets=Offsets(metadata.start_offset, metadata.end_offset),
            to=ReplayTarget(**to),
            last_retry=metadata.last_retry,
        )

    async def _spec(self, request: ReplayRequest) -> ReplaySpec:
        to: dict[str, str] = msgspec.to_builtins(request.to)
        if len(to) != 1:
            raise errors.InvalidRequest("name one destination in to: a consumer, a function or a topic")
        if request.offsets and request.time:
            raise errors.InvalidRequest("name offsets or time, not both")
        ((kind, name),) = to.items()
        target = self._target(kind, name) if kind != "topic" else None
        topic, admin, holds_dead_letters = check_topic(request.topic), self._context.admin, False
        if request.dead_letter:
            if not (target and target.dead_letters):
                raise errors.InvalidRequest(
                    "deadLetter needs a consumer or function that has dead letters: name their topic"
                )
            topic = target.dead_letters.topic_for(topic)
        if target:
            admin, holds_dead_letters = target.admin, self._check(target, topic, f"{kind} {name}")
        elif topic == name:
            raise errors.InvalidRequest(
                f"{topic} is where the records come from: replay it to another topic", topic=topic
            )
        else:
            if self._internal.kind_of(check_topic(name)):
                raise errors.InvalidRequest(f"{name} is internal: only Headrace writes there, so name another topic")
            await admin.describe_topic(name, "Write")
        return ReplaySpec(
            window=await self._window(admin, topic, self._span(request)),
            to=to,
            rate=request.rate,
            last_retry=request.last_retry,
            dead_letters=holds_dead_letters,
            repeats_at_most=repeats_of(target.flow if target else TO_TOPIC_FLOW),
        )

    def _span(self, request: ReplayRequest) -> Span:
        """Return the part of a topic that a request names."""
        times, offsets = request.time or Times(), request.offsets
        if times.until is not None and times.until.timestamp() > self._context.clock.time():
            raise errors.InvalidRequest("the window ends in the future: leave until out to go up to what is there now")
        if offsets is None:
            return Span(partition=request.partition, since=times.since, until=times.until)
        if request.partition is None:
            raise errors.InvalidRequest("offsets need a partition: they count within one")
        if offsets.start < 0 or offsets.start >= offsets.end:
            what = "empty" if offsets.start == offsets.end else "reversed or negative"
            raise errors.InvalidRequest(
                f"offsets {offsets.start} to {offsets.end} are {what}: end is one more than the last"
            )
        return Span(partition=request.partition, first=offsets.start, last=offsets.end - 1)

    async def _window(self, admin: Admin, topic: str, span: Span, *, cut_until: bool = True) -> Window:
        """Return a window that holds an offset."""
        window = await Window.resolve(admin, topic, span, self._context.clock.time(), cut_until=cut_until)
        ranges = {number: bounds for number, bounds in window.ranges.items() if bounds[0] < bounds[1]}
        if not ranges:
            raise errors.InvalidRequest(f"the window is empty: {topic} holds no record in it", topic=topic)
        return msgspec.structs.replace(window, ranges=ranges)

    def _target(self, kind: str, name: str) -> RunningConsumer:
        if target := find_consumer(self._consumers.values(), kind, name):
            return target
        running = [each for each in self._consumers.values() if (each.kind == "function") == (kind == "function")]
        names = sorted({each.name for each in running}.union(each.function for each in running) - {""})
        known = ", ".join(names) or "none"
        raise errors.NotFound(f"there is no {kind} {name[:100]!r} in this process: known are {known}")

    def _check(self, target: RunningConsumer, topic: str, label: str) -> bool:
        """Return whether a topic holds dead letters of a target, which else reads it."""
        if target.no_replay:
            raise errors.InvalidRequest(f"{label} takes no replay: {target.no_replay}")
        if target.reads(topic):
            return False
        if target.writes_dead_letters_to(topic):
            return True
        raise errors.InvalidRequest(
            f"{label} does not read {topic}, and its dead letters do not go there: replay one of its topics"
        )


def conflict(one: Job, other: Job) -> bool:
    """Whether two jobs must not run at the same time: they would send the same records to the same target."""
    try:
        if topic := _dead_letter_topic(one):
            return topic == _dead_letter_topic(other)
        if one.kind != "replay" or other.kind != "replay":
            return False
        first, second = spec_of(one, ReplaySpec), spec_of(other, ReplaySpec)
    except (errors.InvalidRequest, LookupError, TypeError):  # a job that cannot be read cannot run
        return False
    return bool(first.to == second.to and first.window.overlaps(second.window))


def _dead_letter_topic(job: Job) -> str:
    """Return the topic whose dead letters a job ends; empty for a replay."""
    if job.kind == "replay":
        return ""
    return str(job.spec.get("topic") or job.spec["window"]["topic"])
