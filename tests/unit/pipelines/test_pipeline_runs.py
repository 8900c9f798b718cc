"""The watching side of a pipeline, with a driver process that does as the test says and a clock the test owns."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest
from pydantic import SecretStr

from headrace.config.kafka import KafkaConfig
from headrace.config.kafka_security import KafkaSasl, KafkaSecurity
from headrace.errors import EnvironmentProblem, KafkaUnavailable, PipelineInvalid, TopicNotFound
from headrace.pipelines import driver_process, protocol
from headrace.pipelines.driver_process import check_heaps, require_spark
from headrace.pipelines.graph import require_cores
from headrace.pipelines.spec import DriverSpec, PipelineSpec
from headrace.pipelines.status import OffsetPublisher
from headrace.records import TopicPartition
from headrace.runtime import Deadline
from headrace.runtime.telemetry.metrics import Metrics
from headrace.testing import ManualClock
from tests.pipeline_bench import READY, SPEC, Bench, FakeDriver, Started, progress


async def test_readiness_follows_the_driver(started: Started) -> None:
    """A run is ready when every flow reads its sources, and says how far it has come until then."""
    async with started() as bench:
        assert bench.reason == "Spark is starting"
        bench.lives[0].tell(READY[0])
        await bench.clock.settle()
        assert bench.reason == "its flows are being started"
        bench.lives[0].tell(READY[1])
        await bench.clock.settle()
        assert bench.run.readiness().ready
        assert bench.run.status()["driver_pid"] == 4711


async def test_progress_adds_up_in_the_status(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    """Counts add up over batches and lives; a first bad record is logged, further ones are counted."""
    async with started() as bench:
        bench.lives[0].tell(*READY, progress(0, lag_records=7), progress(1, corrupt_records=2, tombstone_records=1))
        bench.lives[0].end(-9)
        await bench.clock.advance(1)
        bench.lives[1].tell(*READY, progress(2, corrupt_records=1))
        await bench.clock.settle()
        flow = bench.run.status()["flows"]["by_carrier"]
        assert (flow["batch_id"], flow["input_records"], flow["lag_records"]) == (2, 30, 0)
        assert (flow["corrupt_records"], flow["tombstone_records"], flow["state"]) == (3, 1, "running")
        assert bench.run.counts("by_carrier") == {"read": 30, "corrupt": 3, "tombstone": 1}
        assert caplog.text.count("dropped 2 of 10 records that do not match the schema of their source") == 1


async def test_the_status_says_how_long_a_first_batch_takes(started: Started) -> None:
    """Between `running` and the first micro-batch nothing else shows that the flow works."""
    async with started() as bench:
        flow = lambda: bench.run.status()["flows"]["by_carrier"]  # noqa: E731
        assert flow()["first_batch_seconds"] is None
        bench.lives[0].tell(*READY)
        await bench.clock.settle()
        await bench.clock.advance(12)
        assert flow()["first_batch_seconds"] == 12
        bench.lives[0].tell(progress(-1, input_records=0))
        await bench.clock.settle()
        assert flow()["first_batch_seconds"] is None
        bench.lives[0].tell(progress(0))
        await bench.clock.settle()
        assert flow()["first_batch_seconds"] is None


async def test_a_lost_driver_is_started_again_with_growing_pauses(started: Started) -> None:
    """The pause doubles up to half a minute, and is short again after a healthy minute."""
    async with started() as bench:
        for pause in (1, 2, 4, 8, 16, 30, 30):
            life = bench.lives[-1]
            life.words = "no space"
            life.end(137)
            await bench.clock.settle()
            assert bench.reason == (
                "The Spark driver of pipeline delays ended with exit code 137. Its last output: no space. "
                f"Next start in {pause} s"
            )
            await bench.clock.advance(pause - 0.1)
            assert bench.lives[-1] is life
            await bench.clock.advance(0.1)
            assert bench.lives[-1] is not life
        await bench.clock.advance(60)
        bench.lives[-1].end(1)
        await bench.clock.settle()
        assert bench.reason.endswith("Next start in 1 s")
        assert bench.run.status()["restarts"] == 7


async def test_python_that_fails_in_the_same_micro_batch_ends_the_run(started: Started) -> None:
    """Each attempt may write rows again, so there are five. A micro-batch that ends begins the count anew."""
    async with started() as bench:
        failed = protocol.Failed(protocol.PYTHON_FAILED, "ValueError", True, "flows.by_carrier")
        for attempt in range(8):
            bench.lives[-1].tell(*READY, *([progress(attempt)] if attempt == 3 else []), failed)
            bench.lives[-1].end(1)
            await bench.clock.advance(31)
            assert bench.run.status()["state"] == ("failed" if attempt == 7 else "starting")
        assert "It failed 5 times in the same micro-batch. Correct the code" in bench.reason
        bench.run.resume()
        await bench.clock.settle()
        bench.lives[-1].tell(*READY, failed)
        bench.lives[-1].end(1)
        await bench.clock.settle()
        assert bench.run.status()["state"] == "waiting"


async def test_a_failure_is_told_where_it_belongs(started: Started) -> None:
    """What Spark said of a flow stands in readiness and in the flow's last error, also after the restart."""
    async with started() as bench:
        bench.lives[0].tell(*READY, protocol.Failed("CAST_INVALID_INPUT", "cannot cast", True, "flows.by_carrier"))
        bench.lives[0].end(1)
        await bench.clock.settle()
        assert bench.reason == ("pipeline delays, flows.by_carrier: CAST_INVALID_INPUT: cannot cast. Next start in 1 s")
        assert bench.run.status()["flows"]["by_carrier"]["state"] == "waiting"
        await bench.clock.advance(1)
        assert bench.run.status()["flows"]["by_carrier"]["last_error"] == "CAST_INVALID_INPUT: cannot cast"


async def test_a_flow_whose_checkpoint_is_refused_fails_alone(started: Started) -> None:
    """Its neighbour runs on, also when the driver is lost and started again. Readiness names the flow."""
    flows = {name: SPEC.flows["by_carrier"].model_dump() for name in ("by_carrier", "edited")}
    spec = PipelineSpec.model_validate(SPEC.model_dump() | {"flows": flows})
    refused = protocol.FlowFailed("edited", "CHECKPOINT_UNUSABLE", "the query does not fit")
    async with started(spec=spec) as bench:
        for life in range(2):
            bench.lives[-1].tell(READY[0], refused, READY[1], progress(life))
            await bench.clock.settle()
            status = bench.run.status()
            assert (status["state"], bench.reason) == (
                "running", "flow edited failed: CHECKPOINT_UNUSABLE: the query does not fit"
            )  # fmt: skip
            assert [flow["state"] for flow in status["flows"].values()] == ["running", "failed"]
            assert len(bench.lives) == life + 1
            bench.lives[-1].end(-9)
            await bench.clock.advance(2)
        bench.lives[-1].tell(
            refused, protocol.Failed("CHECKPOINT_UNUSABLE", "it fits neither", False, "flows.by_carrier")
        )
        bench.lives[-1].end(1)
        await bench.clock.advance(60)
        assert (bench.run.status()["state"], len(bench.lives)) == ("failed", 3)


async def test_a_missing_topic_is_waited_for(started: Started) -> None:
    """Nothing is started while a source is missing or Kafka does not answer; it goes on by itself."""
    absent = {topic: TopicNotFound(f"topic {topic} does not exist") for topic in ("flights", "late")}
    async with started(missing=absent) as bench:
        assert bench.reason == "topic flights does not exist"
        bench.missing["flights"] = KafkaUnavailable("no response from localhost:9092")
        await bench.clock.advance(1)
        assert bench.reason == "no response from localhost:9092"
        assert not bench.lives
        del bench.missing["flights"]
        await bench.clock.advance(1)
        assert bench.reason == "Spark is starting"
        assert bench.created == [("late", "flights")]


async def test_a_driver_whose_topic_was_created_again_is_replaced(started: Started) -> None:
    """The new one compares the topic with its checkpoints. A topic that is gone is the driver's to report."""
    async with started() as bench:
        bench.lives[0].tell(*READY)
        await bench.clock.advance(20)
        bench.missing["flights"] = KafkaUnavailable("gone")
        await bench.clock.advance(10)
        assert len(bench.lives) == 1
        bench.missing.clear()
        bench.topic_id = "2"
        await bench.clock.advance(10)
        assert [plan.topic_ids for plan in bench.plans] == [{"flights": "1"}, {"flights": "2"}]
        assert (bench.lives[0].stops, bench.lives[0].ended.result()) == (0, -9)
        bench.lives[1].tell(protocol.Failed("CHECKPOINT_UNUSABLE", "topic flights was", False, "flows.by_carrier"))
        bench.lives[1].end(1)
        await bench.clock.advance(60)
        assert (bench.run.status()["state"], len(bench.lives)) == ("failed", 2)


async def test_result_topics_are_created_only_if_that_is_allowed(started: Started) -> None:
    """With `create_topics: false` a missing result topic is said instead."""
    kafka = KafkaConfig(create_topics=False)
    async with started(kafka=kafka, missing={"late": TopicNotFound("topic late does not exist")}) as bench:
        assert bench.created == []
        assert bench.reason == "topic late does not exist"


async def test_offsets_are_published_at_most_once_a_second(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    """The newest positions count; what could not be published is tried again, and logged once."""
    group = "headrace.delays.by_carrier"
    async with started() as bench:
        bench.lives[0].tell(*READY, progress(0), progress(1))
        await bench.clock.advance(1)
        assert bench.published == [(group, {TopicPartition("flights", 0): 20})]
        await bench.clock.advance(5)
        assert len(bench.published) == 1
        bench.publish_problem = KafkaUnavailable()
        bench.lives[0].tell(progress(2))
        await bench.clock.advance(3)
        assert caplog.text.count("failed to publish offsets of group") == 1
        bench.publish_problem = None
        await bench.clock.advance(1)
        assert bench.published[-1] == (group, {TopicPartition("flights", 0): 30})


async def test_positions_that_come_while_publishing_are_not_lost(started: Started) -> None:
    """A slow response of Kafka does not swallow what was read in the meantime."""
    async with started() as bench:
        answered = bench.publish_slowly()
        await bench.clock.advance(1)
        bench.lives[0].tell(progress(1))
        await bench.clock.settle()
        answered.set()
        await bench.clock.advance(1)
        assert [offsets[TopicPartition("flights", 0)] for _, offsets in bench.published] == [10, 20]


async def test_a_drain_while_offsets_are_published_publishes_them_too(started: Started) -> None:
    """The two go to Kafka side by side, and neither takes the other's positions away."""
    async with started() as bench:
        answered = bench.publish_slowly()
        await bench.clock.advance(1)
        drained = asyncio.ensure_future(bench.run.drain(Deadline(bench.clock, 10)))
        await bench.clock.settle()
        answered.set()
        await drained
        assert {offsets[TopicPartition("flights", 0)] for _, offsets in bench.published} == {10}
        assert bench.run.death is None


async def test_a_driver_that_cannot_be_started_is_tried_again(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk or too many processes is said in readiness, and ends neither the run nor this process."""
    async with started() as bench:

        async def refuse(*_: object) -> FakeDriver:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("headrace.pipelines.runs.DriverProcess.start", refuse)
        bench.lives[-1].end(1)
        await bench.clock.advance(1)
        assert bench.run.death is None
        assert "failed to start: No space left on device" in bench.reason
        monkeypatch.setattr("headrace.pipelines.runs.DriverProcess.start", bench.start_driver)
        await bench.clock.advance(2)
        assert len(bench.lives) == 2
        assert bench.reason == "Spark is starting"

        def full(folder: Path, secrets: Mapping[str, str], **written: bool) -> None:
            if written:
                raise OSError(28, "No space left on device")

        monkeypatch.setattr("headrace.pipelines.runs.write_secrets", full)
        bench.lives[-1].tell(*READY)
        await bench.clock.settle()
        assert bench.run.death is None
        assert "cannot be written: No space left on device" in bench.reason
        await bench.clock.advance(9)
        monkeypatch.setattr("headrace.pipelines.runs.write_secrets", lambda *_, **__: None)
        bench.lives[-1].tell(*READY)
        await bench.clock.settle()
        assert bench.run.readiness().ready
        monkeypatch.setattr("headrace.pipelines.runs.write_secrets", lambda *_: Path("/proc/none").touch())
        bench.lives[-1].end(1)
        await bench.clock.settle()
        assert bench.run.death is None and "run failed: FileNotFoundError" in bench.run.task_failures
        assert not bench.run.readiness().ready and "The run failed: FileNotFoundError" in bench.reason
        assert bench.run.report().driver_pid is None, "or a drain would wait for the end of this driver"


async def test_a_drain_publishes_what_the_last_batch_read(started: Started) -> None:
    """The driver may finish its micro-batch; then nothing is started again."""
    async with started() as bench:
        bench.lives[0].tell(*READY)
        bench.lives[0].last = [progress(3)]
        await bench.clock.settle()
        await bench.run.drain(Deadline(bench.clock, 10))
        assert bench.lives[0].stops == 1
        assert bench.published == [("headrace.delays.by_carrier", {TopicPartition("flights", 0): 40})]
        await bench.clock.advance(100)
        assert len(bench.lives) == 1


async def test_a_pipeline_that_has_finished_stays_ready(started: Started) -> None:
    """With `once`, the end of all flows is the end of the work, not a failure."""
    async with started() as bench:
        bench.lives[0].tell(*READY, progress(0), protocol.FlowFinished("by_carrier"))
        bench.lives[0].end(0)
        await bench.clock.advance(100)
        assert len(bench.lives) == 1
        assert bench.run.status()["state"] == "finished"
        assert bench.run.readiness().ready
        assert len(bench.published) == 1


async def test_a_missing_package_is_told_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of Connect is needed with `driver.remote` only; without Spark a run does not begin."""

    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(driver_process, "_CONNECT", ("no_such_package",))
    require_spark()
    with pytest.raises(EnvironmentProblem, match=r"pip install 'headrace\[connect\]'"):
        require_spark(remote=True)
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(EnvironmentProblem, match=r"here it is not installed.*pip install 'headrace\[pipelines\]'"):
        await Bench(tmp_path, KafkaConfig()).run.start()


async def test_a_connect_server_reads_secrets_by_their_whole_path(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its working folder is another, and it has the jars."""
    spec = SPEC.model_copy(update={"driver": DriverSpec(remote="sc://h:15002")})
    monkeypatch.setattr("tests.pipeline_bench.SPEC", spec)
    login = KafkaSecurity(sasl=KafkaSasl(mechanism="PLAIN", username="u", password=SecretStr("s3cret")))
    async with started(KafkaConfig(security=login)) as bench:
        file = tmp_path / "delays" / "secrets.properties"
        assert bench.plans[0].security["kafka.sasl.jaas.config"] == f"${{file:{file}:sasl.jaas.config}}"
        assert (bench.plans[0].jars, bench.plans[0].java_flags) == ((), ())


async def test_a_flow_without_progress_is_reported_and_its_driver_replaced(started: Started) -> None:
    """No batch for the limit is said in readiness, also when Spark reports records it does not read; twice the limit
    replaces the driver. Ended tasks and idle reports without lag count as progress."""
    async with started() as bench:
        bench.lives[0].tell(*READY)
        await bench.clock.settle()
        for event in (protocol.FlowWorking("by_carrier"), progress(-1, input_records=0), progress(0)):
            await bench.clock.advance(299)
            assert bench.run.readiness().ready
            bench.lives[0].tell(event)
            await bench.clock.settle()
        await bench.clock.advance(200)
        bench.lives[0].tell(progress(0, input_records=0, lag_records=5))
        await bench.clock.advance(103)
        assert "flow by_carrier has made no progress for 30" in bench.reason
        assert bench.run.report().reason == bench.reason
        assert len(bench.lives) == 1
        await bench.clock.advance(298)
        assert "The Spark driver was replaced: flow by_carrier has made no progress for 60" in bench.reason
        await bench.clock.advance(2)
        assert len(bench.lives) == 2
        bench.lives[1].tell(*READY)
        await bench.clock.advance(2)
        assert bench.run.readiness().ready


@pytest.mark.parametrize("told", [[], READY[:1]])
async def test_a_driver_that_hangs_before_its_flow_runs_is_replaced(
    started: Started, told: list[protocol.AnyEvent]
) -> None:
    """Where Java hangs, or a source; not while another process has its folder."""
    async with started() as bench:
        bench.lives[0].tell(protocol.FolderInUse("process 7"))
        await bench.clock.advance(1000)
        assert len(bench.lives) == 1
        bench.lives[0].tell(*READY[:1])
        await bench.clock.advance(299)
        assert "still starting" not in bench.reason
        await bench.clock.advance(2)
        assert "flow by_carrier is still starting, without progress for 30" in bench.reason
        await bench.clock.advance(302)
        assert len(bench.lives) == 2
        bench.lives[1].tell(*told)
        for _ in range(7):
            await bench.clock.advance(100)
        assert len(bench.lives) == 3


def test_heaps_that_do_not_fit_this_machine_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit of a container counts; a tight fit is logged."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr("headrace.pipelines.driver_process._MEMORY_LIMIT", limit)
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
    async with started() as bench:
        event = progress(0, state_rows=7, state_bytes=70, watermark="1970-01-01T00:00:09.000Z", lag_records=3)
        bench.lives[0].tell(*READY, event)
        await bench.clock.settle()
        text = Metrics().render().decode()
        labels = '{flow="by_carrier",pipeline="delays"}'
        for name, value in (("state_rows", 7), ("state_bytes", 70), ("watermark_seconds", 9), ("lag_records", 3)):
            assert f"headrace_flow_{name}{labels} {value}.0" in text.replace(
                '{pipeline="delays",flow="by_carrier"}', labels
            )


def test_real_time_mode_needs_cores() -> None:
    """Spark would never read the partitions that have no core."""
    spec = SPEC.model_dump(by_alias=True) | {"trigger": {"realtime": True}, "driver": {"cores": 3}}
    few = PipelineSpec.model_validate(spec)
    require_cores(few, {"flights": 3})
    with pytest.raises(EnvironmentProblem, match=r"a flow reads: 4, and there are 3\. Use trigger"):
        require_cores(few, {"flights": 4})


async def test_a_watermark_beyond_the_calendar_ends_nothing(started: Started) -> None:
    """Milliseconds that are read as seconds give the year 55853: Java writes it, and Python cannot read it."""
    async with started() as bench:
        bench.lives[0].tell(*READY, progress(0, watermark="55853-07-04T05:33:20.000Z"), progress(1))
        await bench.clock.settle()
        assert bench.run.death is None
        flow = bench.run.status()["flows"]["by_carrier"]
        assert (flow["batch_id"], flow["watermark"]) == (1, "55853-07-04T05:33:20.000Z")


async def test_a_group_that_is_refused_does_not_stop_the_others() -> None:
    """A right that one group lacks, or a topic that is gone, is no reason for the lag of another flow to be stale."""

    published: list[str] = []

    async def publish(group: str, offsets: Mapping[TopicPartition, int]) -> None:
        if group == "refused":
            raise TopicNotFound("topic flights does not exist")
        published.append(group)

    publisher = OffsetPublisher(publish, ManualClock())
    for group in ("refused", "good"):
        publisher.add(group, {"flights": {0: 1}})
    await publisher.flush()
    assert published == ["good"]
    assert publisher.problem == "topic flights does not exist"


async def test_a_second_process_leaves_the_secrets_of_the_first(started: Started, tmp_path: Path) -> None:
    """It waits for the folder. The first one takes the file away when it ends, and the second writes its own again."""
    secrets = tmp_path / "delays/secrets.properties"
    login = KafkaSasl(mechanism="PLAIN", username="u", password=SecretStr("p"))
    kafka = KafkaConfig(security=KafkaSecurity(sasl=login))
    async with started(kafka=kafka) as bench:
        bench.lives[0].tell(*READY)
        assert secrets.exists()
        bench.lives[0].tell(protocol.FolderInUse("process 1 on here"))  # as if this were the second
        await bench.clock.settle()
        bench.lives[0].end(0)
        await bench.clock.settle()
        assert secrets.exists()
        await bench.clock.advance(1)
        secrets.unlink()
        bench.lives[1].tell(protocol.FolderInUse("process 1 on here"), *READY)
        await bench.clock.settle()
        assert secrets.exists()
        bench.lives[1].end(0)
        await bench.clock.settle()
        assert not secrets.exists()
