"""The parts of the driver process that need no JVM."""

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import Row

import headrace_pipelines.driver.__main__ as program
from headrace.errors import PipelineInvalid
from headrace_pipelines.driver.failures import PartFailed, failure_event
from headrace_pipelines.driver.progress import ProgressReader, to_event
from headrace_pipelines.driver.session import send_code
from headrace_pipelines.driver.source_tables import kafka_options
from headrace_pipelines.driver_process import DriverProcess, Toolchain
from headrace_pipelines.driver_protocol import DriverPlan, FlowFinished
from headrace_pipelines.sinks.format_sink import FormatSink
from headrace_pipelines.sinks.python_sink import PythonSink
from headrace_pipelines.spec import DriverSpec, PipelineSpec
from tests.pipeline_harness import TOOLCHAIN, document, plan_of
from yaml_table import table


def plan(**trigger: Any) -> DriverPlan:
    sources = {"a": {"topic": "t", "schema": "x INT", "starting": "latest"}}
    driver = {"heap_bytes": 1_073_741_824, "cores": 3, "shuffle_partitions": 5}
    return plan_of(PipelineSpec.model_validate(document(trigger=trigger, sources=sources, driver=driver)))


def report(**values: Any) -> dict[str, Any]:
    source = {"endOffset": '{"t": {"0": 5, "1": 7}}', "latestOffset": '{"t": {"0": 9, "1": 7}, "u": {"0": 2}}'}
    fields: dict[str, Any] = {
        "batchId": 3,
        "timestamp": "2026-01-01T10:00:00.000Z",
        "numInputRows": 12,
        "processedRowsPerSecond": 6.5,
        "durationMs": {"addBatch": 4, "triggerExecution": 1500},
        "inputRowsPerSecond": 12.5,
        "eventTime": {"watermark": "2026-01-01T00:00:00.000Z"},
        "stateOperators": [{"numRowsTotal": 3, "memoryUsedBytes": 100, "numRowsDroppedByWatermark": 2}] * 2,
        "observedMetrics": dict.fromkeys("ab", Row(corrupt=0, tombstones=0)),
        "sources": [source],
    }
    found = fields | values
    return found | {"sources": [{"description": "KafkaV2[Subscribe[t]]"} | source for source in found["sources"]]}


def query_of(name: str, last: dict[str, Any], cause: Exception | None = None) -> Any:
    """Return a query that has ended after a report."""
    state = {"isTriggerActive": False, "message": "x"}
    return SimpleNamespace(
        name=name, isActive=False, exception=lambda: cause, status=state, lastProgress=last, recentProgress=[last]
    )


def test_a_function_that_would_write_nothing_is_refused(tmp_path: Path) -> None:
    """A call of it only makes a generator or a coroutine. And sys.exit would end the thread that Spark waits for."""
    (tmp_path / "own_sink.py").write_text(
        "import sys\nasync def later(rows, number): pass\ndef rows(rows, number): yield\ntext = ''\n"
        "def ends(rows, number): sys.exit(number)\n"
    )
    flow: Any = SimpleNamespace(path=lambda name: str(tmp_path / name))
    rows: Any = SimpleNamespace(writeStream=SimpleNamespace(foreachBatch=lambda write: write))
    for name in ("later", "rows", "text"):
        with pytest.raises(PipelineInvalid, match=f"own_sink:{name} is not a plain function"):
            PythonSink(python=f"own_sink:{name}").writer(rows, flow, None)
    write: Any = PythonSink(python="own_sink:ends").writer(rows, flow, None)
    with pytest.raises(RuntimeError, match=r"own_sink:ends has called sys\.exit"):
        write(None, 3)


def test_a_path_of_a_format_is_known_in_any_case(tmp_path: Path) -> None:
    """It is relative to the pipeline file, and no other flow may write there."""
    sink = FormatSink.model_validate({"format": "json", "options": {"Path": "out", "x": 1}})
    given: dict[str, str] = {}
    written: Any = SimpleNamespace(format=lambda name: SimpleNamespace(options=lambda **options: given.update(options)))
    flow: Any = SimpleNamespace(path=lambda name: str(tmp_path / name))
    sink.writer(SimpleNamespace(writeStream=written), flow, None)  # type: ignore[arg-type]
    assert given == {"Path": str(tmp_path / "out"), "x": "1"}
    assert (sink.only_writer or ("",))[0] == "out"


def test_the_driver_loads_no_code_of_its_parent() -> None:
    """The process that runs Spark loads neither the event loop nor the Kafka client."""
    code = (
        "import sys, headrace_pipelines.driver.__main__\n"
        "print([name for name in sys.modules if name.startswith(('headrace.runtime', 'headrace.kafka', "
        "'headrace.delivery', 'headrace.http', 'confluent_kafka', 'asyncio'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize("remote", [False, True], ids=["JVM", "Connect"])
def test_progress_of_spark_becomes_an_event(remote: bool) -> None:
    """Counts of all sources add up; the lag is the number of records that were not read.

    A Connect server gives observed counts as values and schema; rules may have these two names.
    """

    def row(**counts: int) -> Row:
        fields = [{"name": name, "type": "long", "nullable": False, "metadata": {}} for name in counts]
        return Row(values=[*counts.values()], schema={"type": "struct", "fields": fields}) if remote else Row(**counts)

    counts = {
        "a": row(tombstones=2, corrupt=1),
        "b": row(tombstones=0, corrupt=3),
        "rules of the flow": row(values=4, schema=5, even=0),
        "records that failed": row(failed=6),
        "late rows of the flow": row(late=7),
    }
    event = to_event("f", report(observedMetrics=counts))
    assert (event.batch_id, event.input_records, event.records_per_second) == (3, 12, 6.5)
    assert (event.corrupt_records, event.tombstone_records, event.lag_records) == (4, 2, 6)
    assert (event.late_records, event.broken_rules) == (7, {"values": 4, "schema": 5, "failed": 6})
    assert event.positions == {"t": {0: 5, 1: 7}}
    assert (event.state_rows, event.state_bytes, event.dropped_rows, event.batch_seconds) == (6, 200, 4, 1.5)
    assert event.began == "2026-01-01T10:00:00.000Z"
    assert (event.received_per_second, event.watermark) == (12.5, "2026-01-01T00:00:00.000Z")


def test_a_topic_that_is_read_twice_counts_once() -> None:
    """Late rows and a join with itself read their source twice; two sources with the same topic count each.

    Published offsets never pass what the slower of two readers has not read.
    """
    first = {"endOffset": '{"t": {"0": 5}}', "latestOffset": "null"}
    second = {"endOffset": '{"t": {"0": 4, "1": 1}}', "latestOffset": "null"}
    for readers in ([first, second], [second, first]):
        assert to_event("f", report(sources=readers)).positions == {"t": {0: 4, 1: 1}}
    reader = {"endOffset": '{"t": {"0": 5}}', "latestOffset": '{"t": {"0": 8}}', "numInputRows": 9}
    progress = report(numInputRows=18, sources=[reader, reader], observedMetrics={"a": Row(corrupt=1, tombstones=0)})
    event = to_event("f", progress)
    assert (event.input_records, event.lag_records) == (9, 3)
    assert to_event("f", report(numInputRows=18, sources=[reader, reader])).input_records == 18


def test_an_idle_report_names_the_batch_that_ended() -> None:
    """Without records Spark reports the next batch's number and no offsets, at first."""
    idle = {"batchId": 0, "durationMs": {}, "observedMetrics": {}, "numInputRows": None, "processedRowsPerSecond": None}
    event = to_event("f", report(**idle, sources=[{"endOffset": "null", "latestOffset": "null"}]))
    assert (event.batch_id, event.input_records, event.positions, event.lag_records) == (-1, 0, {}, None)


def test_a_source_waits_briefly_only_when_latency_counts() -> None:
    """Half a second of fetch wait would be spent in every micro-batch of a quick trigger, which is bounded too."""
    assert kafka_options(plan(), plan().spec.sources["a"])["kafka.fetch.max.wait.ms"] == "10"
    for trigger in ({"interval_seconds": 5}, {"once": True}):
        assert "kafka.fetch.max.wait.ms" not in kafka_options(plan(**trigger), plan().spec.sources["a"])
    found = kafka_options(plan(), plan().spec.sources["a"])
    assert found["startingOffsets"] == "latest"
    assert found["kafka.isolation.level"] == "read_committed"
    assert (found["failOnDataLoss"], found["maxOffsetsPerTrigger"]) == ("true", "250000")


def test_the_driver_environment_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither another Spark nor a secret of Headrace reaches the driver. Without Java it is a client of Connect.

    It does not take the server that a variable names; its token may be there.
    """
    for name, value in table(__file__, "environment").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    found = TOOLCHAIN.environment(Path("/scratch"), {"s3cret"})
    assert not {"SPARK_HOME", "HEADRACE_TOKEN", "headrace__kafka__security__sasl__password"} & found.keys()
    assert "s3cret" not in str(found)
    assert (found["JAVA_HOME"], found["TMPDIR"]) == ("/java", "/scratch")
    client = Toolchain((), None)
    assert not {"SPARK_REMOTE", "JAVA_HOME"} & client.environment(Path("/scratch")).keys()
    assert client.environment(Path("/scratch"))["SPARK_CONNECT_AUTHENTICATE_TOKEN"] == "t0k3n"
    assert client.flags == ()


@pytest.mark.parametrize(
    ("trigger", "lag", "finished"), [({}, 0, False), ({"once": True}, 3, False), ({"once": True}, 0, True)]
)
def test_a_flow_that_its_server_has_ended_is_not_finished(trigger: dict[str, Any], lag: int, finished: bool) -> None:
    """A Connect server stops its queries without an error when it ends; a JVM of the driver never does."""
    offsets = {"endOffset": '{"t": {"0": 5}}', "latestOffset": f'{{"t": {{"0": {5 + lag}}}}}'}
    query: Any = query_of("f", report(timestamp="1", sources=[offsets]))
    here = plan(**trigger)
    there = here.spec.model_copy(update={"driver": DriverSpec(remote="sc://h:15002")})
    of_jvm = ProgressReader(here, query, None, lambda event: None)
    of_server = ProgressReader(here.model_copy(update={"spec": there}), query, None, lambda event: None)
    assert of_jvm.report()
    assert of_server.report()
    assert of_jvm.failure is None
    assert (of_server.failure is None) is finished
    assert finished or failure_event(of_server.failure, "flows.f").retriable  # type: ignore[arg-type]


@pytest.mark.parametrize(("driver", "problem"), table(__file__, "settings_that_cannot_be_passed_on_are_refused"))
def test_settings_that_cannot_be_passed_on_are_refused(driver: dict[str, Any], problem: str) -> None:
    """Each problem names what to write instead."""
    with pytest.raises(ValueError, match=problem):
        PipelineSpec.model_validate({**plan().spec.model_dump(), "driver": driver})


def test_modules_of_any_age_are_sent_and_other_entries_are_not(tmp_path: Path) -> None:
    """Files of reproducible images are from 1970, and an editor locks a file by a link that leads nowhere."""
    (tmp_path / "tolls.py").touch()
    os.utime(tmp_path / "tolls.py", (0, 0))
    (tmp_path / ".#tolls.py").symlink_to("user@host.1234")
    (tmp_path / "tmp").mkdir()
    own = plan()
    own = own.model_copy(update={"folder": tmp_path, "spec": own.spec.model_copy(update={"folder": tmp_path})})
    sent: list[str] = []
    send_code(sent.append, own)
    with zipfile.ZipFile(sent[0]) as archive:
        assert archive.namelist() == ["tolls.py"]


def test_a_failure_of_a_flow_ends_the_driver_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a flow with an unusable checkpoint leaves the others running."""
    base = plan(once=True)
    flow = base.spec.flows["f"]
    both = base.model_copy(update={"spec": base.spec.model_copy(update={"flows": {"edited": flow, "f": flow}})})

    def start(spark: Any, plan: DriverPlan, name: str) -> tuple[Any, None]:
        return query_of(name, report(timestamp="1"), PipelineInvalid("x") if name == "edited" else None), None

    monkeypatch.setattr(program, "register_source", lambda *_: None)
    monkeypatch.setattr(program, "progressed", lambda *_: None)
    monkeypatch.setattr(program, "start_flow", start)
    spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(statusTracker=lambda: None))
    sent: list[Any] = []
    with pytest.raises(PartFailed) as ended:
        program.run_flows(spark, both, sent.append)
    assert ended.value.event.part == "flows.edited"
    assert FlowFinished("f") not in sent


def test_real_time_mode_ends_on_a_server_that_has_the_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session of Spark Connect has no JVM whose clock could be moved."""
    base = plan(realtime=True)
    driver = base.spec.driver.model_copy(update={"remote": "sc://spark"})
    remote = base.model_copy(update={"spec": base.spec.model_copy(update={"driver": driver})})
    stopped: list[str] = []

    def start(*_: Any) -> tuple[Any, None]:
        signal.raise_signal(signal.SIGTERM)
        query = query_of("f", report())
        query.stop = lambda: stopped.append("f")
        return query, None

    monkeypatch.setattr(program, "start_flow", start)
    session: Any = SimpleNamespace()
    program.run_flows(session, remote, lambda event: None)
    assert stopped == ["f"]


def test_the_output_of_a_driver_is_bounded(tmp_path: Path) -> None:
    """A handler that prints each record, or a console sink, would fill the disk; the newest output is kept."""
    errors = tmp_path / "driver.err"
    driver = DriverProcess(None, errors)  # type: ignore[arg-type]
    with errors.open("ab") as printing:
        printing.write(b"x" * 20_000_000 + b"\nlast words\n")
        printing.flush()
        driver.bound_output()
        assert driver.last_output().endswith("last words")
        printing.write(b"further\n")
    assert driver.last_output().endswith("last words\nfurther")
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2_000_000
    errors.unlink()  # as a cleaner of logs does
    driver.bound_output()
    assert driver.last_output() == ""
