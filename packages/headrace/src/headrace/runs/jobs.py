"""Jobs: long work that an operator starts at any process, and that another process resumes when one dies.

A job is two entries of the control table. `job/<id>` is its desired state, written by the process that gets the
request. `job/<id>/report` is its status, written by the process that runs it. A lease ensures that one process at a
time runs it. When its status is not updated any more, another process that has its target takes it over. A status has
the number of its run, so that a late status of an earlier run is ignored.
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from headrace.commands.reconciler import Reconciler
from headrace.delivery.dead_letter import iso
from headrace.errors import Conflict, HeadraceError, InternalError, InvalidRequest, LeaseLost, NotFound
from headrace.kafka import CompactedTable, Lease
from headrace.runtime import Clock, Deadline, chance

log = logging.getLogger(__name__)

_PREFIX = "job/"
_REPORT = "/report"
_COUNTS_OF_0_2 = {"given_up": "discarded"}
"""Names of counts in what a version before this one has stored."""
_LOOK_SECONDS = 1.0
_SILENT_SECONDS = 5.0
"""After this time without a new status of a job, other processes try to get its lease."""
_AT_ONCE = 10
"""Jobs that a process runs at a time; the others wait, because each may buffer as many records as a consumer."""
_KEPT_SECONDS = 7 * 86_400.0
_KEPT_JOBS = 100
_SAVE_AGAIN_SECONDS = 0.5

DesiredState = Literal["run", "pause", "stop"]
State = Literal["waiting", "running", "paused", "stopped", "done", "failed"]
FINISHED: tuple[State, ...] = ("stopped", "done", "failed")
_REACHED: Mapping[DesiredState, State] = {"run": "waiting", "pause": "paused", "stop": "stopped"}


class Job(msgspec.Struct, frozen=True, rename="camel"):
    """A job and its desired state. Times are ISO 8601, UTC."""

    id: str
    kind: str
    spec: dict[str, Any]
    """The request, in full."""
    by: str
    """Who requested it."""
    since: str
    desired: DesiredState = "run"
    desired_by: str = ""
    """Who last paused, stopped or resumed it."""
    desired_at: str = ""


class JobStatus(msgspec.Struct, frozen=True, rename="camel"):
    """Its state and progress."""

    state: State = "waiting"
    run: int = 0
    owner: str = ""
    progress: dict[str, Any] = {}
    message: str = ""
    at: str = ""


class JobView(Job, frozen=True, rename="camel", kw_only=True):
    """A job as people see it."""

    state: State
    message: str
    """Why it waits or failed, or a remark on its result."""
    owner: str
    """The process that runs it, or last ran it."""
    updated: str
    """When its status was written last."""
    progress: dict[str, Any]


class SaveProgress(Protocol):
    """Writes progress and returns whether that succeeded; the caller may retry."""

    async def __call__(self, progress: Mapping[str, Any], *, message: str = "") -> bool:
        """Write it; `message` says why the job stalls, and is empty while it does not."""


JobRunner = Callable[[Mapping[str, Any], SaveProgress, asyncio.Event], Awaitable[str]]
"""Resumes a job from earlier progress until it is done or the event is set; returns a remark or "".

It saves its progress, and raises HeadraceError if the job failed permanently.
"""


class _KnownJob:
    """A job as this process knows it."""

    stop: asyncio.Event | None = None
    """Set to stop its run; None while it does not run here."""
    requested = False
    """Whether this process got the request, so that it starts at once."""
    is_foreign = False
    """Whether its last status is of another version, so that its progress is not known here."""
    is_overwritten = False
    """Whether a late status of an earlier run is the last one in the table."""

    def __init__(self, job: Job, updated_at: float) -> None:
        self.job, self.updated_at = job, updated_at
        self.status = JobStatus()

    @property
    def state(self) -> State:
        if self.status.state in FINISHED:
            return self.status.state
        if self.job.desired != "run":
            return _REACHED[self.job.desired]
        return "running" if self.status.state == "running" else "waiting"

    @property
    def finished_at(self) -> str:
        """When a finished job was last written."""
        return max(self.job.since, self.job.desired_at, self.status.at)

    def end_run(self) -> None:
        """Stop its run, if it runs here."""
        if self.stop:
            self.stop.set()


class Jobs(Reconciler):
    """Runs jobs, and shows all jobs of the deployment."""

    def __init__(
        self,
        table: CompactedTable[Any],
        lease_of: Callable[[str], Lease],
        make: Callable[[Job], JobRunner | None],
        conflict: Callable[[Job, Job], bool],
        clock: Clock,
    ) -> None:
        """Prepare; `make` makes the runner of a job, or None if this process does not have its target.

        `conflict` returns whether two jobs must not run at the same time. After a temporary failure a job waits and
        runs again.
        """
        super().__init__("jobs", table, clock)
        self._lease_of, self._make, self._conflict = lease_of, make, conflict
        self._owner = f"{socket.gethostname()} process {os.getpid()}"
        self._known: dict[str, _KnownJob] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = self._removing = False

    async def start(self) -> None:
        self.watch(_PREFIX, self._on_change)
        await super().start()

    async def drain(self, deadline: Deadline) -> None:
        """Stop the runs here; other processes resume them, or this one after its restart."""
        self._draining = True
        for known in self._known.values():
            known.end_run()
        await asyncio.wait_for(self._idle.wait(), deadline.remaining_seconds)

    async def create(self, kind: str, spec: dict[str, Any], by: str) -> JobView:
        """Start a job and return it.

        Raises:
            Conflict: A job that must not run at the same time is not finished.
            KafkaError: It is not, or perhaps not, written.
        """
        job = Job(f"{kind}-{chance.token_hex(5)}", kind, spec, by, self._now())
        self._refuse_conflict(job)
        await self.table.put(_PREFIX + job.id, msgspec.to_builtins(job, str_keys=True))
        try:
            self._refuse_conflict(job)  # another process got a request at the same time, earlier in the log
        except Conflict:
            await self.table.put(_PREFIX + job.id, None)
            raise
        self._find(job.id).requested = True
        self.wake()
        return self.show(job.id)

    async def change(self, name: str, desired: DesiredState, by: str) -> JobView:
        """Pause a job, stop it permanently, or resume it; return it.

        Raises:
            NotFound: The job does not exist.
            Conflict: It is finished.
            KafkaError: The table cannot be read, or the desired state is not, or perhaps not, written.
        """
        await self.table.catch_up()  # another process may have started or changed it just before
        known = self._find(name)
        if known.state in FINISHED:
            raise Conflict(f"job {name} is already {known.state}: start another one", job=name)
        job = msgspec.structs.replace(known.job, desired=desired, desired_by=by, desired_at=self._now())
        await self.table.put(_PREFIX + name, msgspec.to_builtins(job, str_keys=True))
        if desired == "run":
            known.requested = True
            self.wake()
        return self.show(name)

    def entry_of(self, name: str) -> int:
        """Return the offset of a job's entry in the table."""
        return self.table.offset_of(_PREFIX + name)

    def list(self) -> list[JobView]:
        """Return every job, the newest first.

        Raises:
            KafkaUnavailable: The table is not read.
        """
        self.table.require()
        newest = sorted(self._known.values(), key=lambda known: known.job.since, reverse=True)
        return [self.show(known.job.id) for known in newest]

    def show(self, name: str) -> JobView:
        """Return a job as people see it, or raise NotFound."""
        known = self._find(name)
        job, status = known.job, known.status
        silent = self._clock.monotonic() - known.updated_at > 2 * _SILENT_SECONDS
        state, message = known.state, status.message
        if state in ("running", "waiting") and silent:
            state = "waiting"
            message = message or "no process runs it: waiting for one that has its target and is below its job limit"
        progress = {name: value for name, value in status.progress.items() if name != "positions"}
        seen: dict[str, Any] = {
            "state": state,
            "message": message,
            "owner": status.owner,
            "updated": status.at,
            "progress": progress,
        }
        return JobView(**msgspec.structs.asdict(job), **seen)

    def _now(self) -> str:
        return iso(self._clock.time())

    def _find(self, name: str) -> _KnownJob:
        self.table.require()
        if name not in self._known:
            raise NotFound(f"job {name[:60]!r} does not exist: see headrace jobs show", job=name[:60])
        return self._known[name]

    def _refuse_conflict(self, job: Job) -> None:
        self.table.require()
        for other in self._known.values():
            if other.job.id == job.id:
                return  # jobs later in the log yield to it
            if other.state not in FINISHED and self._conflict(job, other.job):
                raise Conflict(
                    f"job {other.job.id} already does that ({other.state}, requested by {other.job.by}): wait for it, "
                    f"or stop it (headrace jobs stop {other.job.id})",
                    job=other.job.id,
                )

    def _on_change(self, key: str, entry: Mapping[str, Any] | None) -> None:
        name = key.removeprefix(_PREFIX).removesuffix(_REPORT)
        known = self._known.get(name)
        try:
            if key.endswith(_REPORT):
                if known:
                    self._take_status(known, entry)
            elif entry is not None:
                self._take(msgspec.convert(entry, Job))
            elif known:
                del self._known[name]
                known.end_run()
        except msgspec.ValidationError as cause:
            log.error("entry %s of the control table is not a job and is ignored: %s", key, cause)

    def _take(self, job: Job) -> None:
        known = self._known.get(job.id)
        if known is None:
            known = self._known[job.id] = _KnownJob(job, self._clock.monotonic())
            self._take_status(known, self.table.get(_PREFIX + job.id + _REPORT))  # it may precede its job in the log
        known.job, known.updated_at = job, self._clock.monotonic()
        if job.desired != "run":
            known.end_run()

    def _take_status(self, known: _KnownJob, entry: Mapping[str, Any] | None) -> None:
        try:
            status = msgspec.convert(entry or {}, JobStatus)
            counts = msgspec.convert(status.progress.get("counts", {}), dict[str, int])
        except msgspec.ValidationError as cause:
            known.is_foreign = True
            self._set_message(known, InvalidRequest(f"its status was written by another version: {cause}"))
            return
        if counts:
            counts = {_COUNTS_OF_0_2.get(name, name): count for name, count in counts.items()}
            status = msgspec.structs.replace(status, progress={**status.progress, "counts": counts})
        if status.run >= known.status.run:
            known.status, known.updated_at, known.is_foreign = status, self._clock.monotonic(), False
        elif entry is not None and known.status.state != "running" and not known.is_foreign:
            known.is_overwritten = True

    def reconcile(self) -> float:
        """Start each job that no process runs, and remove old ones."""
        running = sum([1 for known in self._known.values() if known.stop])
        for known in list(self._known.values()):
            if known.is_overwritten:
                known.is_overwritten = False
                self.keep(functools.partial(self._write_again, known), f"{known.job.id} status")
            if running < _AT_ONCE and self._is_free(known) and (runner := self._runner_of(known)):
                running += 1
                known.stop = asyncio.Event()
                self._idle.clear()
                self.spawn(self._carry(known, runner), known.job.id)
        if self._old_jobs() and not self._removing:
            self._removing = True
            self.keep(self._remove_old_jobs, "remove old jobs")
        return _LOOK_SECONDS

    async def _write_again(self, known: _KnownJob) -> None:
        """Write a status again, or a process that starts later would see that of the earlier run and repeat the job."""
        try:
            await self.table.put(_PREFIX + known.job.id + _REPORT, msgspec.to_builtins(known.status))
        except HeadraceError:
            known.is_overwritten = True

    def _runner_of(self, known: _KnownJob) -> JobRunner | None:
        try:
            return self._make(known.job)
        except HeadraceError as error:  # another version may have written it
            self._set_message(known, error)
            return None

    def _set_message(self, known: _KnownJob, error: HeadraceError) -> None:
        known.status = msgspec.structs.replace(known.status, message=error.description)

    def _is_free(self, known: _KnownJob) -> bool:
        if self._draining or known.stop or known.is_foreign:
            return False
        if known.job.desired != "run" or known.status.state in FINISHED:
            return False
        return known.requested or self._clock.monotonic() - known.updated_at > _SILENT_SECONDS

    async def _carry(self, known: _KnownJob, runner: JobRunner) -> None:
        job, stop = known.job, known.stop
        assert stop
        lease = self._lease_of(f"job.{job.id}")
        try:
            if await lease.acquire():
                known.requested = False
                await self.table.catch_up()  # the previous process may have saved progress or finished it just before
                if not stop.is_set() and known.status.state not in FINISHED:
                    await self._run(known, runner, lease, stop)
        except Exception as cause:  # boundary: the status says why, and the job is retried later
            error = cause if isinstance(cause, HeadraceError) else InternalError(repr(cause))
            log.warning("failed to run job %s, will retry: %s", job.id, error.description, exc_info=error is not cause)
            self._set_message(known, error)
            known.requested = False
        finally:
            await lease.release()
            known.stop, known.updated_at = None, self._clock.monotonic()
            if not any(other.stop for other in self._known.values()):
                self._idle.set()

    async def _run(self, known: _KnownJob, runner: JobRunner, lease: Lease, stop: asyncio.Event) -> None:
        """Run a job under its lease; any failure ends the job and nothing else."""
        number = known.status.run + 1
        before = known.status.progress
        last = dict(before)

        async def save(progress: Mapping[str, Any], state: State = "running", *, message: str = "") -> bool:
            last.update(progress)
            status = JobStatus(state, number, self._owner, last, message, self._now())
            try:
                await lease.check()
                await self.table.put(f"{_PREFIX}{known.job.id}{_REPORT}", msgspec.to_builtins(status))
            except LeaseLost:
                stop.set()
                return False
            except HeadraceError as error:
                log.warning("job %s failed to save its progress, will retry: %s", known.job.id, error.description)
                await self._clock.sleep(_SAVE_AGAIN_SECONDS)
                return False
            return True

        log.info("job %s runs here", known.job.id)
        watch = self.spawn(_stop_if(lease.lost, stop), f"{known.job.id} lease")
        end: tuple[State, str]
        try:
            await save(before)
            message = await runner(before, save, stop)
            end = (_REACHED[known.job.desired], "") if stop.is_set() else ("done", message)
        except Exception as cause:  # boundary: the status says that it failed, and why
            end = _end_of(cause)
            log.error("job %s: %s", known.job.id, end[1], exc_info=None if isinstance(cause, HeadraceError) else cause)
        finally:
            watch.cancel()
        log.info("job %s is %s here %s", known.job.id, *end)
        while not await save({}, end[0], message=end[1]) and not (lease.lost.is_set() or self._draining):
            pass

    def _old_jobs(self) -> Sequence[str]:
        """Return the jobs that finished long ago."""
        finished = [known for known in self._known.values() if known.state in FINISHED and not known.stop]
        finished.sort(key=lambda known: known.finished_at, reverse=True)
        oldest = iso(self._clock.time() - _KEPT_SECONDS)
        return [known.job.id for n, known in enumerate(finished) if n >= _KEPT_JOBS or known.finished_at < oldest]

    async def _remove_old_jobs(self) -> None:
        # The job first: without its status it would run again.
        keys = [_PREFIX + name + end for name in self._old_jobs() for end in ("", _REPORT)]
        with contextlib.suppress(HeadraceError):
            await self.table.put_all(dict.fromkeys(keys))
        self._removing = False


def _end_of(cause: Exception) -> tuple[State, str]:
    """Return the state after an error: after a temporary one, such as an unreachable broker, the job is retried."""
    if not isinstance(cause, HeadraceError):
        return "failed", f"{type(cause).__name__}: {cause}"
    return "waiting" if cause.retriable else "failed", cause.description


async def _stop_if(lost: asyncio.Event, stop: asyncio.Event) -> None:
    await lost.wait()
    stop.set()


def spec_of(job: Job, kind: type[msgspec.Struct]) -> Any:
    """Return a job's spec as its kind reads it.

    Raises:
        InvalidRequest: It is not one of this version.
    """
    try:
        return msgspec.convert(job.spec, kind, str_keys=True)
    except (ValueError, OverflowError) as cause:
        raise InvalidRequest(f"job {job.id} was written by another version: {cause}") from cause
