"""Pauses, stops and resumes of a pipeline, with a driver process that does as the test says."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import EnvironmentProblem, TopicNotFound
from headrace.records import TopicPartition
from headrace_pipelines import driver_protocol
from tests.pipeline_harness import READY, Harness, Started, delayed, progress


async def test_a_pipeline_is_paused_and_resumed(started: Started, tmp_path: Path) -> None:
    """A pause lets the micro-batch end and is not a failure; it outlasts this process, a stop does not."""
    async with started() as harness:
        harness.drivers[0].report(*READY)
        harness.drivers[0].last = [progress(3)]
        await harness.clock.settle()
        await harness.run.hold("paused")
        assert harness.drivers[0].stops == 1
        assert harness.published == [("headrace.delays.by_carrier", {TopicPartition("flights", 0): 40})]
        await harness.clock.advance(100)
        assert len(harness.drivers) == 1
        assert harness.flow["state"] == "paused"
        assert harness.run.readiness().ready
        later = Harness(tmp_path, KafkaConfig())
        assert (tmp_path / "delays/paused").exists()
        await later.run.stop()
        harness.run.resume()
        await harness.clock.settle()
        assert len(harness.drivers) == 2
        await harness.run.hold("stopped")
        assert harness.state == "stopped"
        assert not (tmp_path / "delays/paused").exists()


async def test_a_pause_that_cannot_be_kept_is_refused(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk the pipeline continues, and the error says what to do."""

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    async with started() as harness:
        monkeypatch.setattr(Path, "touch", full)
        with pytest.raises(EnvironmentProblem, match=r"delays/paused cannot be written \(No space left on device\)"):
            await harness.run.hold("paused")
        await harness.clock.advance(10)
        assert (len(harness.drivers), harness.drivers[0].stops) == (1, 0)


@pytest.mark.parametrize("moment", ["before the start", "while a topic is missing"])
async def test_nothing_starts_while_a_pipeline_is_paused(started: Started, tmp_path: Path, moment: str) -> None:
    """A pause outlasts a restart of Headrace, and wins over waiting for a topic."""
    missing = {"flights": TopicNotFound("topic flights does not exist")}
    if moment == "before the start":
        (tmp_path / "delays").mkdir()
        (tmp_path / "delays/paused").touch()
    async with started(missing=missing) as harness:
        if moment != "before the start":
            await harness.run.hold("paused")
        harness.missing.clear()
        await harness.clock.advance(10)
        assert (harness.drivers, harness.state) == ([], "paused")
        harness.run.resume()
        await harness.clock.settle()
        assert len(harness.drivers) == 1


async def test_a_pipeline_that_failed_for_good_waits_for_a_resume(started: Started) -> None:
    """Another start would fail too. After an operator mended the cause, no restart of Headrace is needed."""
    async with started() as harness:
        harness.drivers[0].report(driver_protocol.Failed("UNRESOLVED_COLUMN", "no column x", False, "flows.by_carrier"))
        await harness.end(1, 100)
        assert (len(harness.drivers), harness.state, harness.run.death) == (1, "failed", None)
        assert "UNRESOLVED_COLUMN: no column x" in harness.reason
        harness.run.resume()
        await harness.clock.settle()
        assert len(harness.drivers) == 2
        assert harness.reason == "Spark is starting"


async def test_a_pause_while_a_driver_is_being_started_ends_it(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is there only after the pause was accepted."""
    async with started() as harness:
        go, slow = delayed(harness.start_driver)
        monkeypatch.setattr("headrace_pipelines.runs.DriverProcess.start", slow)
        await harness.end(1, 1)
        await harness.run.hold("paused")
        go.set()
        await harness.clock.advance(1)
        assert [driver.ended.done() for driver in harness.drivers] == [True] * len(harness.drivers)
        assert harness.state == "paused"
