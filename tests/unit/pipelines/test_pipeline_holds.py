"""Pauses, stops and resumes of a pipeline, with a driver process that does as the test says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import EnvironmentProblem, TopicNotFound
from headrace.pipelines import protocol
from tests.pipeline_bench import READY, Bench, FakeDriver, Started, held, progress


async def test_a_pipeline_is_paused_and_resumed(started: Started, tmp_path: Path) -> None:
    """A pause lets the micro-batch end and is no failure; it outlasts this process, a stop does not."""
    async with started() as bench:
        bench.lives[0].tell(*READY)
        bench.lives[0].last = [progress(3)]
        await bench.clock.settle()
        await bench.run.hold("paused")
        assert (bench.lives[0].stops, bench.published[0][0]) == (1, "headrace.delays.by_carrier")
        await bench.clock.advance(100)
        assert len(bench.lives) == 1
        assert bench.run.status()["flows"]["by_carrier"]["state"] == "paused"
        assert bench.run.readiness().ready
        later = Bench(tmp_path, KafkaConfig())
        assert (tmp_path / "delays/paused").exists()
        await later.run.stop()
        bench.run.resume()
        await bench.clock.settle()
        assert len(bench.lives) == 2
        await bench.run.hold("stopped")
        assert bench.run.status()["state"] == "stopped"
        assert not (tmp_path / "delays/paused").exists()


async def test_a_pause_that_cannot_be_kept_is_refused(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the pipeline goes on, and the error says what to do."""

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    async with started() as bench:
        monkeypatch.setattr(Path, "touch", full)
        with pytest.raises(EnvironmentProblem, match=r"delays/paused cannot be written \(No space left on device\)"):
            await bench.run.hold("paused")
        await bench.clock.advance(10)
        assert (len(bench.lives), bench.lives[0].stops) == (1, 0)


async def test_a_pipeline_that_was_paused_begins_paused(started: Started, tmp_path: Path) -> None:
    """After a restart of Headrace nothing is started until it is resumed."""
    (tmp_path / "delays").mkdir()
    (tmp_path / "delays/paused").touch()
    async with started() as bench:
        await bench.clock.advance(10)
        assert (bench.lives, bench.run.status()["state"]) == ([], "paused")
        bench.run.resume()
        await bench.clock.settle()
        assert len(bench.lives) == 1


async def test_a_pause_wins_over_waiting(started: Started) -> None:
    """While a topic is missing, or before the next start, a pause is shown and kept."""
    async with started(missing={"flights": TopicNotFound("topic flights does not exist")}) as bench:
        await bench.run.hold("paused")
        await bench.clock.advance(5)
        assert bench.run.status()["state"] == "paused"
        bench.missing.clear()
        await bench.clock.advance(5)
        assert bench.lives == []


async def test_a_pipeline_that_failed_for_good_waits_for_a_resume(started: Started) -> None:
    """Another start would fail too. After an operator mended the cause, no restart of Headrace is needed."""
    async with started() as bench:
        bench.lives[0].tell(protocol.Failed("UNRESOLVED_COLUMN", "no column x", False, "flows.by_carrier"))
        bench.lives[0].end(1)
        await bench.clock.advance(100)
        assert (len(bench.lives), bench.run.status()["state"], bench.run.death) == (1, "failed", None)
        assert "UNRESOLVED_COLUMN: no column x" in bench.reason
        bench.run.resume()
        await bench.clock.settle()
        assert len(bench.lives) == 2
        assert bench.reason == "Spark is starting"


async def test_a_pause_while_a_driver_is_being_started_ends_it(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is there only after the pause was accepted."""
    async with started() as bench:
        go, slow = held(bench.start_driver)
        monkeypatch.setattr("headrace.pipelines.runs.DriverProcess.start", slow)
        bench.lives[0].end(1)
        await bench.clock.advance(1)
        await bench.run.hold("paused")
        go.set()
        await bench.clock.advance(1)
        assert [life.ended.done() for life in bench.lives] == [True] * len(bench.lives)
        assert bench.run.status()["state"] == "paused"


async def test_a_resume_while_the_driver_ends_starts_it_again(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the driver is then no failure, and the pause that is still waiting changes nothing."""
    async with started() as bench:
        last, slow = held(FakeDriver.stop)
        monkeypatch.setattr(FakeDriver, "stop", slow)
        bench.lives[0].tell(*READY)
        await bench.clock.settle()
        pausing = await bench.pause_and_resume()
        last.set()
        await pausing
        await bench.clock.settle()
        assert len(bench.lives) == 2
        bench.lives[1].tell(*READY)
        await bench.clock.settle()
        assert bench.run.status()["state"] == "running"


async def test_a_pause_that_was_taken_back_is_not_shown(started: Started) -> None:
    """Offsets may take long to be published; the pipeline runs again meanwhile."""
    async with started() as bench:
        answered = bench.publish_slowly()
        await bench.clock.settle()
        pausing = await bench.pause_and_resume()
        bench.lives[1].tell(*READY)
        await bench.clock.settle()
        answered.set()
        await pausing
        assert bench.run.status()["state"] == "running"
        assert bench.run.status()["flows"]["by_carrier"]["state"] == "running"
