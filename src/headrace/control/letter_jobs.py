"""Redrive, drop and quarantine as jobs: one run over letters each, which goes on where marks say that it was."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from headrace.config.internal_topics import InternalTopics
from headrace.config.kafka import KafkaConfig
from headrace.config.model import HeadraceConfig
from headrace.control.jobs import Job, Jobs, JobView, Tell, Work, spec_of
from headrace.control.letter_scan import Scan, ScanOptions
from headrace.control.marks import Marks
from headrace.control.origins import Origins
from headrace.control.redrive import Redrive, Redriven, RedriveOptions, Sender, Sent
from headrace.control.redrive_target import Target
from headrace.control.replays import Replays
from headrace.control.selection import Selection
from headrace.delivery.dead_letter import MAX_REDRIVES
from headrace.errors import InvalidRequest, LeaseTaken
from headrace.kafka import Admin, check_topic, lease_holder
from headrace.lifecycle import Clock, Deadline
from headrace.lifecycle.supervisor import first_of

Kind = Literal["redrive", "drop", "quarantine"]
_LOOK_SECONDS, _LET_GO_SECONDS = 0.3, 5.0
_WAIT_SECONDS = 20.0
"""For the lease of a run that was killed."""
_DRY_RUN_SECONDS = 60.0


class LettersRequest(Selection, frozen=True, kw_only=True, rename="camel"):
    """Which dead letters, where to, and how; what is left out sets no condition."""

    to_consumer: str = ""
    """Of a redrive: the backend of this consumer, as the records they were."""
    reason: str = ""
    """Why they are dropped or moved; needed to drop."""
    rate: Annotated[float, msgspec.Meta(gt=0)] | None = None
    """Records per second at most."""
    exactly_once: bool = False
    max_redrives: Annotated[int, msgspec.Meta(ge=1)] = MAX_REDRIVES
    """Dead letters whose record was redriven so often are kept back."""
    last_retry: bool = False
    """With `toConsumer`: what fails is counted, and no dead letter again."""
    dry_run: bool = False

    def selection(self) -> Selection:
        """Return the part of the request that selects dead letters."""
        return Selection(**{name: getattr(self, name) for name in Selection.__struct_fields__})


class LettersReport(Redriven, frozen=True, rename="camel"):
    """What a run would do."""

    dry_run: bool = True


class _Spec(msgspec.Struct, frozen=True, omit_defaults=True):
    topic: str
    select: Selection
    target: Target
    options: RedriveOptions


class LetterJobs:
    """Begins such jobs, and makes what runs them; any process can."""

    on_sent: Sent | None = None
    """Told of records that are written, or not."""

    def __init__(
        self,
        kafka: KafkaConfig,
        admin: Admin,
        sender: Sender,
        clock: Clock,
        replays: Replays,
        origins: Origins | None = None,
    ) -> None:
        """Prepare; `origins` knows the consumers whose dead letters may go back."""
        self._origins = origins or Origins(InternalTopics(HeadraceConfig()))
        self._kafka, self._admin, self._sender, self._clock = kafka, admin, sender, clock
        self._replays = replays

    def make(self, job: Job) -> Work | None:
        """Return what runs a job; None for a replay, or a redrive, to something that is not here."""
        if job.kind == "replay" or "window" in job.spec:
            return self._replays.make(job)
        return _LetterWork(self._redrive(spec_of(job, _Spec)), self._clock)

    async def begin(
        self, jobs: Jobs, kind: Kind, topic: str, asked: LettersRequest, by: str
    ) -> JobView | LettersReport:
        """Begin a job, or say what it would do.

        Raises:
            InvalidRequest: What is asked for makes no sense, and why.
            TopicNotFound, PartitionNotFound: There is no such place.
            NotFound: There is no such consumer.
            JobConflict, LeaseTaken: Letters of the topic are worked on already.
        """
        check_topic(topic)
        if asked.to_consumer and kind != "redrive":
            raise InvalidRequest("toConsumer is for a redrive only: leave it out")
        if asked.to_consumer and asked.exactly_once:
            raise InvalidRequest("exactlyOnce is for topics: leave it out, or toConsumer")
        if asked.last_retry and not asked.to_consumer:
            raise InvalidRequest("lastRetry is for a backend: name its consumer in toConsumer, or leave it out")
        made = self._spec(kind, topic, asked, by)
        if asked.to_consumer:
            spec = await self._replays.letters_spec(topic, made.select, asked.to_consumer, asked.rate, asked.last_retry)
            assert spec.select is not None
            made = msgspec.structs.replace(made, select=spec.select)
            if not asked.dry_run:
                await self._refuse(topic, made.select)
                limit = None if asked.last_retry else asked.max_redrives
                spec = msgspec.structs.replace(spec, redrives_below=limit)
                return await jobs.create(kind, msgspec.to_builtins(spec, str_keys=True), by)
        if asked.dry_run:
            try:
                async with asyncio.timeout(_DRY_RUN_SECONDS):
                    found = msgspec.structs.asdict(await self._redrive(made).run())
            except TimeoutError:
                raise InvalidRequest(
                    f"looking at all these letters takes longer than {_DRY_RUN_SECONDS:g} s: narrow it by partition, "
                    "offsets or a start, or ask where nobody waits for an answer: headrace dlq redrive --dry-run"
                ) from None
            if asked.to_consumer:
                found["targets"] = {asked.to_consumer: found["records"]}
            return LettersReport(**found)
        made.target.check(topic)
        await self._refuse(topic, made.select)
        return await jobs.create(kind, msgspec.to_builtins(made), by)

    async def _refuse(self, topic: str, selection: Selection) -> None:
        """Return if a job would find what it needs: nobody else at work, and a letter, as far as is read at once."""
        deadline = Deadline(self._clock, _LET_GO_SECONDS)  # one that is done has let go of it in a moment
        while holder := await lease_holder(self._admin, f"redrive.{topic}"):
            if deadline.passed:
                raise LeaseTaken(f"{topic} is worked on by {holder}: let it end, and ask again", topic=topic)
            await self._clock.sleep(_LOOK_SECONDS)
        marks = Marks(self._kafka, self._admin, topic)
        await marks.load()
        scan = Scan(self._kafka, self._admin, topic, marks, self._clock, ScanOptions("oldest", state="left"))
        async with contextlib.aclosing(scan.letters(selection)) as letters:
            async for _ in letters:
                return
        if selection.has_conditions and not scan.remaining:
            raise InvalidRequest(f"nothing matches: no letter of {topic} that is left is selected", topic=topic)

    def _spec(self, kind: Kind, topic: str, asked: LettersRequest, by: str) -> _Spec:
        if kind == "drop" and not asked.reason:
            raise InvalidRequest("reason is missing: letters that are dropped go nowhere, so say why")
        target = Target() if kind == "redrive" else Target(kind, reason=asked.reason)
        options = RedriveOptions(
            dry_run=asked.dry_run,
            exactly_once=asked.exactly_once,
            rate_records=asked.rate,
            max_redrives=asked.max_redrives,
            wait_seconds=_WAIT_SECONDS,
            by=by,
        )
        return _Spec(topic, asked.selection(), target, options)

    def _redrive(self, spec: _Spec) -> Redrive:
        redrive = Redrive(
            self._kafka,
            self._admin,
            spec.topic,
            self._sender,
            self._clock,
            selection=spec.select,
            target=spec.target,
            options=spec.options,
        )
        redrive.origins = self._origins
        redrive.on_sent = self.on_sent
        return redrive


class _LetterWork:
    def __init__(self, redrive: Redrive, clock: Clock) -> None:
        self._redrive, self._clock = redrive, clock
        self._result: Redriven | None = None
        self._progress = {"done": 0}

    async def run(self, progress: Mapping[str, Any], tell: Tell, stop: asyncio.Event) -> str:
        """See `Work`. Numbers are those of this run: what earlier ones did is marked, and is not met again."""
        self._redrive.goes_on = bool(progress)
        await tell(self._progress)
        await first_of(self._all_of_it(), self._tell_often(tell, stop))
        if self._result is None:
            return ""
        done = self._result
        await tell({**self._progress, "records": done.records, "targets": dict(done.targets)})
        said = [f"{count} dead letters left: {why}" for why, count in done.unproved.items()]
        said += [f"{done.kept_back} letters kept back: redriven too often"] if done.kept_back else []
        return "; ".join([*said, *(f"not sent: {line}" for line in done.too_large[:10])])

    async def _all_of_it(self) -> None:
        self._result = await self._redrive.run(self._note)

    def _note(self, done: int, total: int) -> None:
        self._progress = {"done": done, "total": total}

    async def _tell_often(self, tell: Tell, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await tell(self._progress)
            await self._clock.sleep(0.5)
