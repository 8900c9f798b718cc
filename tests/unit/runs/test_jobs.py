"""Jobs: their states, which process runs them, and what they report; table and leases in memory, time virtual."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

import msgspec
import pytest

from headrace.delivery.dead_letter import iso
from headrace.errors import Conflict, InvalidRequest, KafkaUnavailable, LeaseLost
from headrace.kafka import JSON_OBJECTS
from headrace.records import OutgoingRecord, Record
from headrace.runs.jobs import Job, Jobs, SaveProgress
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster
from tests.staged import staged


class JobsHarness:
    """Processes with jobs, their leases, and the work that is done under these."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster({"c": 1})
        self.clock = ManualClock(1_000_000.0)
        self.holders: dict[str, Lease] = {}
        self.runs: list[tuple[str, str, Mapping[str, Any]]] = []
        self.end: Callable[[SaveProgress, asyncio.Event], Awaitable[str]] = until_stopped
        self.processes: list[Jobs] = []

    @property
    def log(self) -> list[Record]:
        return self.cluster.records("c")

    async def process(self, name: str) -> Jobs:
        def make(job: Job) -> Any:
            return Runner(self, name, job).run

        table = self.cluster.table("c", JSON_OBJECTS, self.clock)
        self.cluster.follow(table)
        jobs = Jobs(
            table,
            lambda lease: Lease(self, lease),  # type: ignore[arg-type,return-value]
            make,
            lambda one, other: one.spec["place"] == other.spec["place"],
            self.clock,
        )
        self.processes.append(jobs)
        await jobs.start()
        return jobs

    async def create(self, jobs: Jobs) -> str:
        """Return the id of a new job."""
        return (await jobs.create("replay", {"place": 1}, "ann")).id

    async def begin(self) -> tuple[Jobs, str]:
        """Start a process, and a job in it."""
        jobs = await self.process("a")
        return jobs, await self.create(jobs)

    async def wait(self, condition: Callable[[], bool]) -> None:
        for _ in range(200):
            if condition():
                return
            await asyncio.sleep(0)
            await self.clock.advance(0.5)
        raise AssertionError("the condition was not reached")

    def put(self, key: str, entry: Any) -> None:
        """Write an entry as somebody else."""
        self.cluster.write(OutgoingRecord("c", key.encode(), msgspec.json.encode(entry)))


class Lease:
    def __init__(self, harness: JobsHarness, name: str) -> None:
        self.harness, self.name, self.lost = harness, name, asyncio.Event()

    async def acquire(self, limit_seconds: float = 0.0) -> bool:
        return self.harness.holders.setdefault(self.name, self) is self

    async def check(self) -> None:
        if self.harness.holders.get(self.name) is not self:
            self.lost.set()
            raise LeaseLost("gone")

    async def release(self) -> None:
        if self.harness.holders.get(self.name) is self:
            del self.harness.holders[self.name]


class Runner:
    def __init__(self, harness: JobsHarness, process: str, job: Job) -> None:
        self.harness, self.process, self.job = harness, process, job

    async def run(self, progress: Mapping[str, Any], save: SaveProgress, stop: asyncio.Event) -> str:
        self.harness.runs.append((self.job.id, self.process, dict(progress)))
        return await self.harness.end(save, stop)


async def until_stopped(save: SaveProgress, stop: asyncio.Event) -> str:
    await save({"done": 5})
    await stop.wait()
    return ""


async def at_once(save: SaveProgress, stop: asyncio.Event) -> str:
    await save({"done": 9, "positions": {"0": [9, ""]}})
    return "all of it"


def run(test: Callable[[JobsHarness], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        harness = JobsHarness()
        try:
            await test(harness)
        finally:
            for jobs in harness.processes:
                await jobs.stop()

    asyncio.run(asyncio.wait_for(main(), 30))


@staged(run)
async def test_who_lost_the_lease_writes_nothing_more(harness: JobsHarness, /) -> None:
    """A process that slept finds another run there, whose word counts, also if its own comes later."""
    jobs, job = await harness.begin()
    await harness.wait(lambda: harness.runs != [] and bool(jobs.show(job).progress))
    sleeper = harness.holders.pop(f"job.{job}")
    late = jobs.table.get(f"job/{job}/report")
    other = await harness.process("b")
    harness.end = at_once
    await harness.wait(lambda: other.show(job).state == "done")
    sleeper.lost.set()
    await harness.clock.settle()
    harness.put(f"job/{job}/report", late)
    assert {jobs.show(job).state, other.show(job).state} == {"done"}
    await harness.wait(lambda: jobs.table.get(f"job/{job}/report")["state"] == "done")
    runs, later = len(harness.runs), await harness.process("c")  # which reads the last status only
    await harness.clock.advance(30)
    assert (later.show(job).state, len(harness.runs)) == ("done", runs)


def test_a_failure_ends_the_job_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    """Whatever it is; the process goes on and takes the next one. Only of a defect the log has a traceback."""

    async def test(harness: JobsHarness) -> None:
        jobs = await harness.process("a")
        for cause, said in (
            (InvalidRequest("the topic is gone"), "the topic is gone"),
            (ZeroDivisionError("by 0"), "ZeroDivisionError: by 0"),
        ):

            async def fail(save: SaveProgress, stop: asyncio.Event, cause: Exception = cause) -> str:
                raise cause

            harness.end = fail
            job = await harness.create(jobs)
            await harness.wait(lambda job=job: jobs.show(job).state == "failed")  # type: ignore[misc]
            assert (jobs.show(job).message, jobs.death) == (said, None)

    run(test)
    assert [bool(line.exc_info) for line in caplog.records if line.levelname == "ERROR"] == [False, True]


@staged(run)
async def test_the_same_again_is_refused_while_it_runs(harness: JobsHarness, /) -> None:
    """At any process, also for two requests at one time: the first in the table wins. Later it is allowed."""
    jobs, other = await harness.process("a"), await harness.process("b")
    first = (await jobs.create("replay", {"place": 1}, "ann")).id
    with pytest.raises(Conflict, match=f"job {first} already does that"):
        await other.create("replay", {"place": 1}, "bob")
    await other.create("replay", {"place": 2}, "bob")
    await jobs.change(first, "stop", "ann")

    put = other.table.put

    async def slow(key: str, entry: Any) -> int:
        other.table.put = put  # type: ignore[method-assign]
        await jobs.create("replay", {"place": 1}, "ann")
        return await put(key, entry)

    other.table.put = slow  # type: ignore[method-assign]
    with pytest.raises(Conflict):
        await other.create("replay", {"place": 1}, "bob")
    assert [job.by for job in jobs.list() if job.spec == {"place": 1} and job.state != "stopped"] == ["ann"]


@staged(run)
async def test_what_is_not_written_down_is_told_again(harness: JobsHarness, /) -> None:
    """The end of a job must be known, or it would run once more."""
    ended = asyncio.Event()

    async def end(save: SaveProgress, stop: asyncio.Event) -> str:
        harness.cluster.producer.refusal = lambda record: KafkaUnavailable("no broker answers")
        ended.set()
        return ""

    harness.end = end
    jobs, job = await harness.begin()
    await harness.wait(ended.is_set)
    await harness.clock.advance(30)
    assert jobs.show(job).state != "done"
    harness.cluster.producer.refuse()
    await harness.wait(lambda: jobs.show(job).state == "done")


@staged(run)
async def test_old_jobs_are_taken_away(harness: JobsHarness, /) -> None:
    """Those that ended a week ago, and all but the newest hundred; what has not ended, or not for so long, stays."""

    def put(name: str, days: float, desired: str) -> None:
        since = iso(harness.clock.time() - days * 86_400)
        entry = {"id": name, "kind": "replay", "spec": {}, "by": "ann", "since": since, "desired": desired}
        harness.put(f"job/{name}", entry)

    put("old", 8, "stop")
    put("paused", 8, "pause")
    put("long", 8, "run")
    now = iso(harness.clock.time())
    harness.put("job/long/report", {"state": "done", "run": 1, "at": now})
    for n in range(100):
        put(f"new-{n}", 1 + n / 1000, "stop")
    jobs = await harness.process("a")
    await harness.wait(lambda: len(jobs.list()) == 101)
    left = {job.id for job in jobs.list()}
    assert left == {"paused", "long", *(f"new-{n}" for n in range(99))}
    removed = [record.key for record in harness.log if record.value is None]
    assert removed.index(b"job/old") < removed.index(b"job/old/report"), "a job without its status would run again"


@pytest.mark.parametrize("changed", [{"state": "asleep"}, {"progress": {"counts": ["delivered", 7]}}], ids=str)
@staged(run)
async def test_a_job_whose_status_cannot_be_read_does_not_run_from_its_start(
    harness: JobsHarness, /, changed: dict[str, Any]
) -> None:
    """A newer version may have ended it, in a way that this one does not know."""
    entry = {"id": "x", "kind": "replay", "spec": {"place": 1}, "by": "ann", "since": ""}
    harness.put("job/x", entry)
    harness.put("job/x/report", {"state": "running", "run": 3, **changed})
    harness.put("job/y", {"id": 3})
    jobs = await harness.process("a")
    await harness.clock.advance(30)
    assert (harness.runs, [job.id for job in jobs.list()], jobs.show("x").state) == ([], ["x"], "waiting")
    assert "status was written by another version" in jobs.show("x").message
    harness.put("job/x/report", {"state": "running", "run": 4, "progress": {"done": 7}})
    await harness.wait(lambda: harness.runs != [])
    assert harness.runs == [("x", "a", {"done": 7})]


@staged(run)
async def test_a_count_of_0_2_has_its_name_of_now(harness: JobsHarness, /) -> None:
    """In what people see of a finished job, and for the run of one that goes on."""
    stored = {"counts": {"delivered": 4, "given_up": 1}, "positions": {"0": [5, ""]}}
    for place, (name, state) in enumerate({"x": "done", "y": "waiting"}.items()):
        harness.put(f"job/{name}", {"id": name, "kind": "replay", "spec": {"place": place}, "by": "", "since": ""})
        harness.put(f"job/{name}/report", {"state": state, "run": 1, "progress": stored})
    jobs = await harness.process("a")
    assert jobs.show("x").progress == {"counts": {"delivered": 4, "discarded": 1}}
    await harness.wait(lambda: harness.runs != [])
    assert harness.runs == [("y", "a", {**stored, "counts": {"delivered": 4, "discarded": 1}})]
