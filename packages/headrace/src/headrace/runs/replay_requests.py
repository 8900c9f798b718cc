"""Requests for replays: checked, then made into jobs. Nothing starts unless the whole request is valid."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from headrace import errors
from headrace.consumers.running_consumer import RunningConsumer, RunningConsumers, find_consumer
from headrace.kafka import Admin, check_topic
from headrace.kafka.internal_topics import InternalTopics
from headrace.runs.jobs import Job, JobRunner, Jobs, JobView, spec_of
from headrace.runs.replay import TO_TOPIC_FLOW, ReplayJob, ReplaySpec, RunContext, repeats_of
from headrace.runs.selection import Selection, Span, Window


class ReplayTarget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Exactly one destination, by its name."""

    consumer: str = ""
    function: str = ""
    topic: str = ""


class ReplayRequest(Span, frozen=True, kw_only=True):
    """A part of a topic, and where to deliver it again."""

    topic: str
    to: ReplayTarget
    rate: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Records per second at most."""
    last_retry: bool = False
    """A record that fails is counted, and does not become a dead letter."""
    dry_run: bool = False
    """Report what would be replayed, and start nothing."""


class DryRun(msgspec.Struct, frozen=True, rename="camel"):
    """What a replay would do."""

    total: int
    """Number of offsets."""
    spec: dict[str, Any]
    dry_run: bool = True


class Replays:
    """Starts replays, and makes their runners."""

    def __init__(self, context: RunContext, consumers: RunningConsumers, internal: InternalTopics) -> None:
        """Prepare; `consumers` are those of this process and may change, nothing is replayed to `internal` topics."""
        self._context = context
        self._consumers = consumers
        self._internal = internal

    def make(self, job: Job) -> JobRunner | None:
        """Return the runner of a replay, or None if its target does not run in this process."""
        spec: ReplaySpec = spec_of(job, ReplaySpec)
        if "topic" not in spec.to and self._target_of(spec.to) is None:
            return None
        return ReplayJob(job, spec, self._context, self._target_of).run

    def _target_of(self, to: Mapping[str, str]) -> RunningConsumer | None:
        return find_consumer(self._consumers.values(), *next(iter(to.items()), ("", "")))

    async def begin(self, jobs: Jobs, request: ReplayRequest, by: str) -> JobView | DryRun:
        """Start a replay and return its job, or the result of a dry run.

        Raises:
            InvalidRequest: The request is not valid; the text says why.
            NotFound: The topic, partition, consumer or function does not exist.
            Conflict: It is already running.
        """
        spec = await self._spec(request)
        if request.dry_run:
            return DryRun(spec.window.total, msgspec.to_builtins(spec, str_keys=True))
        return await jobs.create("replay", msgspec.to_builtins(spec, str_keys=True), by)

    async def redrive_spec(
        self, topic: str, selection: Selection, consumer: str, rate: float | None, last_retry: bool
    ) -> ReplaySpec:
        """Return the job that redrives dead letters to a consumer: those of its group unless groups are selected.

        Raises:
            NotFound: The consumer, topic or partition does not exist.
            InvalidRequest: They are not the consumer's, or the window has none.
        """
        target = self._target("consumer", consumer)
        if not self._check(target, topic, f"consumer {consumer}"):
            raise errors.InvalidRequest(f"consumer {consumer} reads {topic}, so it is not a dead letter topic")
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

    async def _spec(self, request: ReplayRequest) -> ReplaySpec:
        to: dict[str, str] = msgspec.to_builtins(request.to)
        if len(to) != 1:
            raise errors.InvalidRequest("set exactly one destination in to: consumer, function or topic")
        if request.until is not None and request.until.timestamp() > self._context.clock.time():
            raise errors.InvalidRequest("the window ends in the future: omit until to replay up to the newest record")
        ((kind, name),) = to.items()
        target = self._target(kind, name) if kind != "topic" else None
        topic = check_topic(request.topic)
        admin = self._context.admin
        holds_dead_letters = False
        if target:
            admin = target.admin
            holds_dead_letters = self._check(target, topic, f"{kind} {name}")
        elif topic == name:
            raise errors.InvalidRequest(f"{topic} is also the source: replay it to another topic", topic=topic)
        else:
            if self._internal.kind_of(check_topic(name)):
                raise errors.InvalidRequest(f"{name} is internal, only Headrace writes to it: choose another topic")
            await admin.describe_topic(name, "Write")
        return ReplaySpec(
            window=await self._window(admin, topic, request),
            to=to,
            rate=request.rate,
            last_retry=request.last_retry,
            dead_letters=holds_dead_letters,
            repeats_at_most=repeats_of(target.flow if target else TO_TOPIC_FLOW),
        )

    async def _window(self, admin: Admin, topic: str, span: Span, *, cut_until: bool = True) -> Window:
        """Return a window that is not empty."""
        window = await Window.resolve(admin, topic, span, cut_until=cut_until)
        ranges = {number: bounds for number, bounds in window.ranges.items() if bounds[0] < bounds[1]}
        if not ranges:
            raise errors.InvalidRequest(f"the window is empty: {topic} has no records in it", topic=topic)
        return msgspec.structs.replace(window, ranges=ranges)

    def _target(self, kind: str, name: str) -> RunningConsumer:
        if target := find_consumer(self._consumers.values(), kind, name):
            return target
        running = [each for each in self._consumers.values() if (each.kind == "function") == (kind == "function")]
        names = sorted({each.name for each in running}.union(each.function for each in running) - {""})
        known = ", ".join(names) or "none"
        raise errors.NotFound(f"{kind} {name[:100]!r} does not run in this process; running: {known}")

    def _check(self, target: RunningConsumer, topic: str, label: str) -> bool:
        """Return whether a topic has the dead letters of a target; False if the target reads it."""
        if target.no_replay:
            raise errors.InvalidRequest(f"{label} does not accept replays: {target.no_replay}")
        if target.reads(topic):
            return False
        if target.writes_dead_letters_to(topic):
            return True
        raise errors.InvalidRequest(
            f"{label} neither reads {topic} nor writes its dead letters there: replay one of its topics"
        )


def conflict(one: Job, other: Job) -> bool:
    """Return whether two jobs must not run at the same time: they would send the same records to the same target."""
    try:
        if topic := _dead_letter_topic(one):
            return topic == _dead_letter_topic(other)
        if one.kind != "replay" or other.kind != "replay":
            return False
        first, second = spec_of(one, ReplaySpec), spec_of(other, ReplaySpec)
    except (errors.InvalidRequest, LookupError, TypeError):  # such a job of another version does not run
        return False
    return bool(first.to == second.to and first.window.overlaps(second.window))


def _dead_letter_topic(job: Job) -> str:
    """Return the topic whose dead letters a job completes; empty for a replay."""
    if job.kind == "replay":
        return ""
    return str(job.spec.get("topic") or job.spec["window"]["topic"])
