"""The watching side of a pipeline, with a driver process that does as the test says and a clock the test owns."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.errors import EnvironmentProblem, KafkaUnavailable, PipelineInvalid, TopicNotFound
from headrace.extras import MODULES
from headrace.records import TopicPartition
from headrace.runtime.telemetry.metrics import Metrics, text_of
from headrace_devkit.testing import ManualClock
from headrace_pipelines import driver_protocol
from headrace_pipelines.driver_process import check_heaps, require_spark
from headrace_pipelines.graph import require_cores
from headrace_pipelines.spec import DriverSpec, PipelineSpec
from headrace_pipelines.status import OffsetPublisher
from tests.pipeline_harness import READY, SPEC, FakeDriver, Harness, Started, progress


async def test_progress_and_failures_are_in_the_status(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    """Counts add up over batches and drivers; a first bad record is logged, further ones are counted.

    Readiness and the flow's last error have what Spark reported of a flow, also after the restart.
    """
    async with started() as harness:
        await harness.report(
            *READY,
            progress(0, lag_records=7),
            progress(1, corrupt_records=2, tombstone_records=1),
            driver_protocol.Failed("CAST_INVALID_INPUT", "cannot cast", True, "flows.by_carrier"),
        )
        await harness.end(1)
        assert harness.reason == (
            "pipeline delays, flows.by_carrier: CAST_INVALID_INPUT: cannot cast. Next start in 1 s"
        )
        assert harness.flow["state"] == "waiting"
        await harness.clock.advance(1)
        await harness.report(*READY, progress(2, corrupt_records=1))
        flow = harness.flow
        assert (flow["batch_id"], flow["input_records"], flow["lag_records"]) == (2, 30, 0)
        assert (flow["corrupt_records"], flow["tombstone_records"], flow["state"]) == (3, 1, "running")
        assert (flow["last_error"], flow["sink"]) == ("CAST_INVALID_INPUT: cannot cast", "topic late")
        assert harness.run.counts("by_carrier") == {"read": 30, "corrupt": 3, "tombstone": 1}
        assert caplog.text.count("dropped 2 of 10 records that do not match the schema of their source") == 1


async def test_python_that_fails_in_the_same_micro_batch_ends_the_run(started: Started) -> None:
    """Each attempt may write rows again, so there are five. A micro-batch that ends begins the count anew."""
    async with started() as harness:
        failed = driver_protocol.Failed(driver_protocol.PYTHON_FAILED, "ValueError", True, "flows.by_carrier")
        for attempt in range(8):
            harness.drivers[-1].report(*READY, *([progress(attempt)] if attempt == 3 else []), failed)
            await harness.end(1, 31)
            assert harness.state == ("failed" if attempt == 7 else "starting")
        assert "It failed 5 times in the same micro-batch. Correct the code" in harness.reason
        harness.run.resume()
        await harness.clock.settle()
        harness.drivers[-1].report(*READY, failed)
        await harness.end(1)
        assert harness.state == "waiting"


async def test_a_flow_whose_checkpoint_is_refused_fails_alone(started: Started) -> None:
    """Its neighbour runs on, also when the driver is lost and started again. Readiness names the flow."""
    flows = {name: SPEC.flows["by_carrier"].model_dump() for name in ("by_carrier", "edited")}
    spec = PipelineSpec.model_validate(SPEC.model_dump() | {"flows": flows})
    refused = driver_protocol.FlowFailed("edited", "CHECKPOINT_UNUSABLE", "the query does not fit")
    async with started(spec=spec) as harness:
        for number in range(2):
            await harness.report(READY[0], refused, READY[1], progress(number))
            status = harness.run.status()
            assert (status["state"], harness.reason) == (
                "running", "flow edited failed: CHECKPOINT_UNUSABLE: the query does not fit"
            )  # fmt: skip
            assert [flow["state"] for flow in status["flows"].values()] == ["running", "failed"]
            assert len(harness.drivers) == number + 1
            await harness.end(-9, 2)
        harness.drivers[-1].report(
            refused, driver_protocol.Failed("CHECKPOINT_UNUSABLE", "it fits neither", False, "flows.by_carrier")
        )
        await harness.end(1, 60)
        assert (harness.state, len(harness.drivers)) == ("failed", 3)


async def test_a_missing_topic_is_waited_for(started: Started) -> None:
    """Nothing starts before all sources exist and Kafka responds. Result topics are created if that is allowed."""
    absent = {topic: TopicNotFound(f"topic {topic} does not exist") for topic in ("flights", "late")}
    async with started(missing=absent) as harness:
        assert harness.reason == "topic flights does not exist"
        harness.missing["flights"] = KafkaUnavailable("no response from localhost:9092")
        await harness.clock.advance(1)
        assert harness.reason == "no response from localhost:9092"
        assert not harness.drivers
        del harness.missing["flights"]
        await harness.clock.advance(1)
        assert harness.reason == "Spark is starting"
        assert harness.created == [("late", "flights")]
    async with started(kafka=KafkaConfig(create_topics=False), missing={"late": absent["late"]}) as harness:
        assert (harness.created, harness.reason) == ([], "topic late does not exist")


async def test_a_driver_that_cannot_be_started_is_tried_again(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or too many processes is said in readiness, and ends neither the run nor this process."""
    async with started() as harness:

        async def refuse(*_: object) -> FakeDriver:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("headrace_pipelines.runs.DriverProcess.start", refuse)
        await harness.end(1, 1)
        assert harness.run.death is None
        assert "failed to start: No space left on device" in harness.reason
        monkeypatch.setattr("headrace_pipelines.runs.DriverProcess.start", harness.start_driver)
        await harness.clock.advance(2)
        assert len(harness.drivers) == 2
        assert harness.reason == "Spark is starting"

        def full(folder: Path, secrets: Mapping[str, str], **written: bool) -> None:
            if written:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr("headrace_pipelines.runs.write_secrets", full)
        await harness.report(*READY)
        assert harness.run.death is None
        assert "cannot be written: No space left on device" in harness.reason
        await harness.clock.advance(9)
        monkeypatch.setattr("headrace_pipelines.runs.write_secrets", lambda *_, **__: None)
        await harness.report(*READY)
        assert harness.run.readiness().ready
        monkeypatch.setattr("headrace_pipelines.runs.write_secrets", lambda *_: Path("/proc/none").touch())
        await harness.end(1)
        assert harness.run.death is None and "run failed: FileNotFoundError" in harness.run.task_failures
        assert not harness.run.readiness().ready and "The run failed: FileNotFoundError" in harness.reason
        assert harness.run.report().driver_pid is None, "or a drain would wait for the end of this driver"


async def test_a_pipeline_that_has_finished_stays_ready(started: Started) -> None:
    """With `once`, the end of all flows is the end of the work, not a failure."""
    async with started() as harness:
        harness.drivers[0].report(*READY, progress(0), driver_protocol.FlowFinished("by_carrier"))
        await harness.end(0, 100)
        assert len(harness.drivers) == 1
        assert harness.state == "finished"
        assert harness.run.readiness().ready
        assert len(harness.published) == 1


async def test_a_missing_package_is_reported_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of Connect is needed with `driver.remote` only; without Spark a run does not begin."""

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setitem(MODULES, "connect", ("no_such_package",))
    require_spark()
    with pytest.raises(EnvironmentProblem, match=r"pip install 'headrace\[connect\]'"):
        require_spark(remote=True)
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(EnvironmentProblem, match=r"here it is not installed.*pip install 'headrace\[pipelines\]'"):
        await Harness(tmp_path, KafkaConfig()).run.start()


async def test_a_flow_without_progress_is_reported_and_its_driver_replaced(started: Started) -> None:
    """No batch for the limit is said in readiness, also when Spark reports records it does not read; twice the limit
    replaces the driver. Ended tasks and idle reports without lag count as progress."""
    async with started() as harness:
        await harness.report(*READY)
        for event in (driver_protocol.FlowWorking("by_carrier"), progress(-1, input_records=0), progress(0)):
            await harness.clock.advance(299)
            assert harness.run.readiness().ready
            await harness.report(event)
        await harness.clock.advance(200)
        harness.drivers[0].report(progress(0, input_records=0, lag_records=5))
        await harness.clock.advance(103)
        assert "flow by_carrier has made no progress for 30" in harness.reason
        assert harness.run.report().reason == harness.reason
        assert len(harness.drivers) == 1
        await harness.clock.advance(298)
        assert "The Spark driver was replaced: flow by_carrier has made no progress for 60" in harness.reason
        await harness.clock.advance(2)
        assert len(harness.drivers) == 2
        harness.drivers[1].report(*READY)
        await harness.clock.advance(2)
        assert harness.run.readiness().ready


def test_heaps_that_do_not_fit_this_machine_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit of a container counts; a tight fit is logged."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("headrace.runtime.memory._MEMORY_LIMIT", limit)
    limit.write_text(str(1 << 30))
    with pytest.raises(PipelineInvalid, match=r"heaps of 2 pipelines are 2\.0 GiB, and this machine has 1\.0 GiB"):
        check_heaps([SPEC, SPEC])
    check_heaps([SPEC])
    assert "each driver takes about 0.5 GiB more than its heap" in caplog.text
    caplog.clear()
    limit.write_text("max")
    check_heaps([SPEC])
    limit.write_text("1")
    check_heaps([SPEC.model_copy(update={"driver": DriverSpec(remote="sc://h:15002")})])
    assert not caplog.text


async def test_numbers_of_a_flow_are_metrics(started: Started) -> None:
    """State, watermark, rates and lag are gauges by pipeline and flow, once they are known."""
    async with started() as harness:
        event = progress(0, state_rows=7, watermark="1970-01-01T00:00:09.000Z", lag_records=3)
        await harness.report(*READY, event)
        text = text_of(Metrics().snapshot()).decode()
        labels = '{flow="by_carrier",pipeline="delays"}'
        text = text.replace('{pipeline="delays",flow="by_carrier"}', labels)
        for name, value in (("state_rows", 7), ("watermark_seconds", 9), ("lag_records", 3)):
            assert f"headrace_flow_{name}{labels} {value}.0" in text
        beyond = "55853-07-04T05:33:20.000Z"  # milliseconds as seconds: Java writes this year, Python cannot read it
        await harness.report(progress(1, watermark=beyond))
        assert (harness.run.death, harness.flow["batch_id"], harness.flow["watermark"]) == (None, 1, beyond)


def test_real_time_mode_needs_cores() -> None:
    """Spark would never read the partitions that have no core."""
    spec = SPEC.model_dump(by_alias=True) | {"trigger": {"realtime": True}, "driver": {"cores": 3}}
    few = PipelineSpec.model_validate(spec)
    require_cores(few, {"flights": 3})
    with pytest.raises(EnvironmentProblem, match=r"a flow reads: 4, and there are 3\. Use trigger"):
        require_cores(few, {"flights": 4})


async def test_a_group_that_is_refused_does_not_stop_the_others() -> None:
    """A right that one group lacks, or a topic that is gone, does not make the lag of another flow stale."""
    published: list[str] = []

    async def publish(group: str, offsets: Mapping[TopicPartition, int]) -> None:
        if group == "refused":
            raise TopicNotFound("topic flights does not exist")
        published.append(group)

    publisher = OffsetPublisher(publish, ManualClock())
    for group in ("refused", "good"):
        publisher.add(group, {"flights": {0: 1}})
    await publisher.flush()
    assert (published, publisher.problem) == (["good"], "topic flights does not exist")
