"""Redrive, drop and quarantine as jobs: each is one run over a dead letter topic, and resumes with what is left."""

import asyncio
import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

import msgspec

from headrace.delivery.dead_letter import MAX_REDRIVES
from headrace.errors import InvalidRequest
from headrace.kafka import check_topic, lease_holder
from headrace.runs.dead_letters.completed_offsets import CompletedOffsets, lease_name, lease_taken
from headrace.runs.dead_letters.origins import Origins
from headrace.runs.dead_letters.pages import Scan, ScanOptions
from headrace.runs.jobs import Job, JobRunner, Jobs, JobView, SaveProgress, spec_of
from headrace.runs.redrive import Redrive
from headrace.runs.redrive_spec import Redriven, RedriveOptions, RedriveSpec, Target
from headrace.runs.redrive_writers import Sent
from headrace.runs.replay import RunContext
from headrace.runs.replay_requests import Replays
from headrace.runs.selection import Selection, Window
from headrace.runtime import Deadline

Kind = Literal["redrive", "drop", "quarantine"]
_LOOK_SECONDS = 0.3
_RELEASE_SECONDS = 5.0
_KILLED_SECONDS = 15.0
"""A run that was killed holds its lease for 10 s. A command waits for that; a request is refused before."""
DRY_RUN_SECONDS = 60.0
_SAVE_SECONDS = 0.5
_MOST_SAVED = 500
"""Entries that a job saves of each list and count, because its status is one record."""
_MOST_CHARACTERS = 250


class DeadLetterJobRequest(Selection, frozen=True, kw_only=True, rename="camel"):
    """Which dead letters, where to, and how; an absent field sets no condition."""

    to_consumer: str = ""
    """Of a redrive: send their original records to the backend of this consumer."""
    reason: str = ""
    """Why they are dropped or moved; required for a drop."""
    rate: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Records per second at most."""
    exactly_once: bool = False
    max_redrives: Annotated[int, msgspec.Meta(ge=1)] = MAX_REDRIVES
    """Dead letters whose record was redriven this often are kept back."""
    last_retry: bool = False
    """With `toConsumer`: a record that fails is counted, and does not become a dead letter again."""
    from_origin: bool = False
    """Of a redrive: read the record at its origin where the dead letter holds no full copy of it."""
    stop_at_failures: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    """Of a redrive: stop when more than this percentage fails."""
    dry_run: bool = False

    def selection(self) -> Selection:
        return Selection(**{name: getattr(self, name) for name in Selection.__struct_fields__})


class DryRunReport(Redriven, frozen=True, rename="camel"):
    """The result that a run would have."""

    dry_run: bool = True


class DeadLetterJobs:
    """Starts such jobs, and makes their runners; any process can run them."""

    def __init__(self, context: RunContext, replays: Replays, origins: Origins, on_sent: Sent | None = None) -> None:
        """Prepare; `on_sent` gets records that were written, or not."""
        self.replays = replays
        self._context, self._origins, self._on_sent = context, origins, on_sent

    def make(self, job: Job) -> JobRunner | None:
        """Return the runner of a job; None for a replay or redrive whose target does not run here."""
        if job.kind == "replay" or "window" in job.spec:
            return self.replays.make(job)
        spec: RedriveSpec = spec_of(job, RedriveSpec)
        return functools.partial(run_redrive, functools.partial(self._redrive, spec), self._context.clock.monotonic)

    async def begin(
        self, jobs: Jobs, kind: Kind, topic: str, request: DeadLetterJobRequest, by: str
    ) -> JobView | DryRunReport:
        """Start a job, or report what it would do.

        Raises:
            InvalidRequest: The request is not valid; the text says why.
            TopicNotFound, PartitionNotFound: The topic or partition does not exist.
            NotFound: The consumer does not exist.
            Conflict, LeaseTaken: Another run is working on the topic.
        """
        spec = self._spec(kind, check_topic(topic), request, by)
        replay = None
        if request.to_consumer:
            replay = await self.replays.redrive_spec(
                topic, spec.select, request.to_consumer, request.rate, request.last_retry
            )
            spec = msgspec.structs.replace(spec, select=replay.select or spec.select)
        if request.dry_run:
            return await self._dry_run(spec, request.to_consumer)
        spec.check()
        await self._check_ready(topic, spec.select, _RELEASE_SECONDS)
        if replay:
            limit = None if request.last_retry else request.max_redrives
            replay = msgspec.structs.replace(replay, redrives_below=limit)
        else:
            window = await Window.resolve(self._context.admin, topic, spec.select, cut_until=False)
            ends = {number: end for number, (_, end) in window.ranges.items()}
            spec = msgspec.structs.replace(spec, topic_id=window.topic_id, ends=ends)
        return await jobs.create(kind, msgspec.to_builtins(replay or spec, str_keys=True), by)

    async def redrive(self, kind: Kind, topic: str, request: DeadLetterJobRequest, by: str) -> Redrive:
        """Return a run without a job, or a dry run.

        Raises:
            InvalidRequest, TopicNotFound, PartitionNotFound, LeaseTaken: See `begin`.
        """
        spec = self._spec(kind, check_topic(topic), request, by)
        if not request.dry_run:
            spec.check()
            await self._check_ready(topic, spec.select, _KILLED_SECONDS)
        return self._redrive(spec)

    async def _dry_run(self, spec: RedriveSpec, consumer: str) -> DryRunReport:
        try:
            async with asyncio.timeout(DRY_RUN_SECONDS):
                found = msgspec.structs.asdict(await self._redrive(spec).run(asyncio.Event()))
        except TimeoutError:
            raise InvalidRequest(
                f"timed out: reading these dead letters takes longer than {DRY_RUN_SECONDS:g} s; select a partition, "
                "offsets or a start, or use the command headrace dlq redrive --dry-run"
            ) from None
        if consumer:
            found["targets"] = {consumer: found["records"]}
        return DryRunReport(**found)

    async def _check_ready(self, topic: str, selection: Selection, seconds: float) -> None:
        """Return if a job can start: no other run is working on the topic, and a dead letter is found at once.

        A run that has just finished or was killed releases its lease soon, so this waits for some seconds.

        Raises:
            LeaseTaken: Another run is working on the topic.
            InvalidRequest: Nothing is selected, or the topic has no dead letters.
        """
        admin, clock = self._context.admin, self._context.clock
        deadline = Deadline(clock, seconds)
        while holder := await lease_holder(admin, lease_name(topic)):
            if deadline.passed:
                raise lease_taken(topic, holder)
            await clock.sleep(_LOOK_SECONDS)
        completed = CompletedOffsets(admin, topic)
        await completed.load()
        scan = Scan(admin, topic, completed, clock, ScanOptions("oldest", state="left"))
        async with contextlib.aclosing(scan.dead_letters(selection)) as dead_letters:
            async for _ in dead_letters:
                return
        if selection.has_conditions and not scan.remaining:
            raise InvalidRequest(f"nothing matches: no dead letter left in {topic} is selected", topic=topic)

    def _spec(self, kind: Kind, topic: str, request: DeadLetterJobRequest, by: str) -> RedriveSpec:
        if request.to_consumer and kind != "redrive":
            raise InvalidRequest("toConsumer is only for a redrive: remove it")
        if (request.from_origin or request.stop_at_failures) and (request.to_consumer or kind != "redrive"):
            raise InvalidRequest("fromOrigin and stopAtFailures are only for a redrive to topics: remove them")
        if request.to_consumer and request.exactly_once:
            raise InvalidRequest("exactlyOnce is only for topics: remove it, or toConsumer")
        if request.last_retry and not request.to_consumer:
            raise InvalidRequest("lastRetry is only for a backend: name its consumer in toConsumer, or remove it")
        if kind == "drop" and not request.reason:
            raise InvalidRequest("reason is missing: dropped dead letters are not delivered, so give the reason")
        target = Target() if kind == "redrive" else Target(kind, reason=request.reason)
        options = RedriveOptions(
            dry_run=request.dry_run,
            exactly_once=request.exactly_once,
            rate_records=request.rate,
            max_redrives=request.max_redrives,
            from_origin=request.from_origin,
            stop_at_percent=None if request.dry_run else request.stop_at_failures,
            by=by,
        )
        return RedriveSpec(topic, request.selection(), target, options)

    def _redrive(self, spec: RedriveSpec, resumes: bool = False) -> Redrive:
        context = self._context
        admin, produce, clock = context.admin, context.produce, context.clock
        return Redrive(admin, produce, clock, spec, self._origins, resumes=resumes, on_sent=self._on_sent)


async def run_redrive(
    make: Callable[[bool], Redrive],
    now: Callable[[], float],
    progress: Mapping[str, Any],
    save_progress: SaveProgress,
    stop: asyncio.Event,
) -> str:
    """See `JobRunner`. The numbers are those of this run, without what earlier runs completed.

    `make` makes the run; its argument is whether it resumes an earlier one.
    """
    reached = {"done": 0}
    saved_at = now()
    await save_progress(reached)

    async def on_progress(done: int, total: int) -> None:
        nonlocal reached, saved_at
        reached = {"done": done, "total": total}
        if now() - saved_at >= _SAVE_SECONDS:
            await save_progress(reached)
            saved_at = now()

    done = await make(bool(progress)).run(stop, on_progress)
    found = {name: _first(value) for name, value in msgspec.to_builtins(done).items()}
    await save_progress({**reached, **found})
    notes = [f"{count} dead letters left: {why}" for why, count in done.unproved.items()]
    notes += [f"{done.kept_back} dead letters kept back: redriven too often"] if done.kept_back else []
    notes += [f"stopped: {done.stopped}"] if done.stopped else []
    return "; ".join([*notes, *(f"not sent: {line}" for line in done.too_large[:10])])


def _first(value: Any) -> Any:
    if isinstance(value, dict):
        return {name[:_MOST_CHARACTERS]: count for name, count in itertools.islice(value.items(), _MOST_SAVED)}
    return value[:_MOST_SAVED] if isinstance(value, list) else value
