"""Jobs on dead letters: what is refused, where they end, and a run that resumes another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import msgspec
import pytest

from headrace.config.model import HeadraceConfig
from headrace.errors import InvalidRequest, KafkaUnavailable, LeaseTaken
from headrace.kafka.internal_topics import InternalTopics
from headrace.runs import dead_letter_jobs
from headrace.runs.dead_letter_jobs import DeadLetterJobRequest, DeadLetterJobs, run_redrive
from headrace.runs.dead_letters.origins import Origins
from headrace.runs.jobs import Job, spec_of
from headrace.runs.redrive import Redrive
from headrace.runs.redrive_spec import Redriven, RedriveSpec
from headrace.runs.replay import ReplaySpec, RunContext
from headrace.runs.selection import Selection, Window
from headrace_devkit.testing import ManualClock
from redrive_kafka import DLQ, DeadLetterCluster
from yaml_table import table


@pytest.mark.parametrize(("kind", "requested", "said"), table(__file__, "what_would_not_be_done_as_asked_is_refused"))
def test_what_would_not_be_done_as_asked_is_refused(kind: Any, requested: dict[str, Any], said: str) -> None:
    """Nothing that somebody relies on is passed over in silence."""
    nothing: Any = None
    letters = jobs_of(nothing)
    with pytest.raises(InvalidRequest, match=said):
        asyncio.run(letters.begin(nothing, kind, "t.dlq", DeadLetterJobRequest(**requested), "ann"))


def jobs_of(admin: Any, replays: Any = None) -> DeadLetterJobs:
    nothing: Any = None
    context = RunContext(admin, nothing, nothing, ManualClock(1.0))
    return DeadLetterJobs(context, replays, Origins(InternalTopics(HeadraceConfig())))


def begun(monkeypatch: pytest.MonkeyPatch, kind: Any, topic: str, admin: Any = None, **requested: Any) -> Job:
    """Return the job of a request for dead letters, of which there are some."""

    async def create(kind: str, spec: dict[str, Any], by: str) -> Any:
        return Job("job-1", kind, msgspec.json.decode(msgspec.json.encode(spec)), by, "")

    async def redrive_spec(topic: str, selection: Selection, *_: Any) -> ReplaySpec:
        window = Window(topic, "id", {0: (0, 9)})
        return ReplaySpec(window=window, to={"consumer": "push"}, select=selection, repeats_at_most=1)

    jobs = jobs_of(admin or DeadLetterCluster(), SimpleNamespace(redrive_spec=redrive_spec))
    monkeypatch.setattr(jobs, "_check_ready", AsyncMock())
    created = cast(Any, SimpleNamespace(create=create))
    return cast(Job, asyncio.run(jobs.begin(created, kind, topic, DeadLetterJobRequest(**requested), "ann")))


def test_a_job_ends_where_the_topic_ended_when_it_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that waits, or that another process continues, must not drop what nobody has seen."""
    cluster = DeadLetterCluster()
    cluster.letter(1)
    spec: RedriveSpec = spec_of(begun(monkeypatch, "drop", DLQ, cluster, reason="r"), RedriveSpec)
    assert (spec.topic_id, spec.ends) == ("first", {0: 1, 1: 0})


def test_a_job_that_another_version_would_run_otherwise_is_refused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a rolling upgrade any process may take it over: without its conditions it would deliver every dead letter."""
    job = begun(monkeypatch, "redrive", "t.dlq", to_consumer="push", errors=["E1"])
    spec: ReplaySpec = spec_of(job, ReplaySpec)
    assert spec.select and spec.select.errors == ["E1"]
    later = msgspec.structs.replace(job, spec={**job.spec, "condition": "of a later version"})
    with pytest.raises(InvalidRequest, match="another version"):
        spec_of(later, ReplaySpec)


def test_letters_that_another_run_has_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job is made; the refusal names who is at work."""
    cluster: Any = DeadLetterCluster()

    async def members(group: str, right: str = "") -> list[Any]:
        assert group == "headrace.lease.redrive.t.dlq"
        return [SimpleNamespace(client="headrace-lease-here-process-7")]

    monkeypatch.setattr(cluster, "group_members", members)
    with pytest.raises(LeaseTaken, match="here-process-7 is already working on"):
        asyncio.run(jobs_of(cluster)._check_ready("t.dlq", Selection(), 0.0))


def test_a_dry_run_of_very_many_letters_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks over HTTP waits for it."""

    class Endless:
        async def run(self, stop: asyncio.Event) -> Redriven:
            return await asyncio.Event().wait()  # type: ignore[return-value]

    nothing: Any = None
    letters = jobs_of(nothing)
    monkeypatch.setattr(letters, "_redrive", lambda _, **__: Endless())
    monkeypatch.setattr(dead_letter_jobs, "DRY_RUN_SECONDS", 0.01)
    with pytest.raises(InvalidRequest, match=r"timed out: .* select a partition"):
        asyncio.run(letters.begin(nothing, "redrive", "t.dlq", DeadLetterJobRequest(dry_run=True), "ann"))


class Run:
    """A redrive that fails or is done at once."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def run(self, stop: asyncio.Event, on_progress: Any) -> Redriven:
        await on_progress(1, 2)
        if self.error:
            raise self.error
        return Redriven(0, {}, {}, {}, 0, [])


async def test_a_run_is_saved_before_it_starts_and_knows_whether_it_resumes_another() -> None:
    """All dead letters may have ended by then, which is no mistake of the request; one that failed saves no more."""
    saved: list[Mapping[str, Any]] = []
    resumed: list[bool] = []

    async def save(progress: Mapping[str, Any], *, message: str = "") -> bool:
        saved.append(dict(progress))
        return True

    def make(resumes: bool, error: Exception | None = None) -> Redrive:
        resumed.append(resumes)
        assert saved, "nothing was saved before the first dead letter went"
        return Run(error)  # type: ignore[return-value]

    clock = ManualClock(1.0)
    await run_redrive(make, clock.monotonic, {}, save, asyncio.Event())
    ended: dict[str, Any] = {"records": 0, "targets": {}, "errors": {}, "hours": {}, "keptBack": 0}
    ended |= {"tooLarge": [], "unproved": {}, "failedAgain": 0, "stopped": ""}
    assert saved == [{"done": 0}, {"done": 1, "total": 2, **ended}]
    with pytest.raises(KafkaUnavailable):
        failing = lambda resumes: make(resumes, KafkaUnavailable("away"))  # noqa: E731
        await run_redrive(failing, clock.monotonic, saved[0], save, asyncio.Event())
    assert (resumed, len(saved)) == ([False, True], 3)
