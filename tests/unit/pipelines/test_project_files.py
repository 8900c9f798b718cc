"""Projects of Spark Declarative Pipelines without Spark: what is refused, and what Spark's texts mean."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import yaml

from headrace.errors import PipelineInvalid
from headrace.records import TopicPartition
from headrace_pipelines.driver.failures import PartFailed
from headrace_pipelines.driver.project_runs import run_project
from headrace_pipelines.driver.run_events import RunEvents
from headrace_pipelines.driver.session import settings
from headrace_pipelines.driver_protocol import DriverPlan, Failed, FlowFailed, FlowRunning, SessionReady
from headrace_pipelines.spark_project import SparkProject, is_project, load_project, load_projects
from tests.pipeline_harness import Started, plan_of, progress
from yaml_table import table

PLAIN = {"name": "tolls", "storage": "file:///data/tolls"}
LIBRARIES = [{"glob": {"include": "defs/**"}}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "defs").mkdir()
    (tmp_path / "defs" / "fine.sql").write_text("SELECT 1")
    return tmp_path


def refused(file: Path) -> list[str]:
    with pytest.raises(PipelineInvalid) as invalid:
        load_project(file)
    return [line.removeprefix(f"{file.parent}/") for line in invalid.value.description.splitlines()]


def test_a_project_is_read_as_spark_reads_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """References are replaced, and neither they nor names that may hold secrets are settings of the JVM."""
    monkeypatch.setenv("TOLLS_LOGIN", "s3cret")
    file = folder / "spark-pipeline.yml"
    file.write_text(table(__file__, "right"))
    file.chmod(0o600)
    project = load_project(file)
    assert (project.name, project.title) == ("tolls-2026", "Tolls 2026")
    assert project.flow_name("spark_catalog.gates.a") == "a"
    assert project.document["configuration"]["tolls.login"] == "s3cret"
    assert project.document["database"] == "gates" and project.document["libraries"] == LIBRARIES
    plan = DriverPlan.model_validate_json(plan_of(project).document())
    assert plan.spec == project
    found = settings(plan)
    assert found["spark.sql.ansi.enabled"] == "false"
    assert found["spark.connect.grpc.binding.port"] == "0"
    assert found["spark.connect.grpc.binding.address"] == "127.0.0.1"
    assert "s3cret" not in str(found) and "secret" not in "".join(found.values())
    assert found["spark.sql.catalogImplementation"] == "hive"


@pytest.mark.parametrize(("change", "says"), table(__file__, "wrong"))
def test_a_wrong_file_is_refused_with_its_line(folder: Path, change: dict[str, Any], says: str) -> None:
    """All problems at once, and without Spark."""
    file = folder / "spark-pipeline.yml"
    document = {**PLAIN, **change} if "libraries" in change else {**PLAIN, **change, "libraries": LIBRARIES}
    document = {key: value for key, value in document.items() if value is not None}
    file.write_text(yaml.safe_dump(document, sort_keys=False))
    assert [line.removeprefix("spark-pipeline.yml:").removeprefix("1: ") for line in refused(file)] == says.split("|")


@pytest.mark.parametrize(("name", "text", "says"), table(__file__, "definitions"))
def test_what_only_databricks_has_is_refused_by_name(folder: Path, name: str, text: str, says: str) -> None:
    """With the line of the definition; a comment is no use of it."""
    file = folder / "spark-pipeline.yml"
    file.write_text(yaml.safe_dump({**PLAIN, "libraries": LIBRARIES}))
    (folder / "defs" / name).write_text(text)
    if says:
        assert refused(file) == [f"defs/{name}:{says}"]
    else:
        load_project(file)


def test_a_project_is_known_by_its_name_or_its_keys(folder: Path) -> None:
    """And two pipelines with one name are refused."""
    files = [folder / "spark-pipeline.yml", folder / "other.yaml", folder / "tolls.yaml"]
    for file in files[:2]:
        file.write_text(yaml.safe_dump({**PLAIN, "libraries": LIBRARIES}))
    files[2].write_text("name: tolls\nsources: {}")
    assert [is_project(file) for file in files] == [True, True, False]
    with pytest.raises(PipelineInvalid, match="has the name tolls too"):
        load_projects(files[:2])


@pytest.mark.parametrize("name", table(__file__, "events"))
def test_texts_of_spark_become_states(name: str) -> None:
    """COMPLETED is not the last word of a flow, and flows that never ran are named."""
    case = table(__file__, "events")[name]
    run = RunEvents(lambda identifier: identifier.removeprefix("spark_catalog.gates."))
    events = [event for text in case["says"] for event in run.apply(text)]
    assert run.states == case["states"]
    failure = run.failure(Failed("X", "boom.", retriable=True))
    assert failure and (failure.part, failure.text) == (case["part"], case["text"])
    assert {type(event) for event in events} <= {FlowRunning, FlowFailed}
    unexplained = run.failure(None)
    assert (unexplained is not None) == ("FAILED" in case["states"].values())


def project_in(folder: Path) -> SparkProject:
    file = folder / "spark-pipeline.yml"
    file.write_text(yaml.safe_dump({**PLAIN, "libraries": LIBRARIES}))
    return load_project(file)


async def test_flows_of_a_project_are_known_when_spark_names_them(started: Started, folder: Path) -> None:
    """Then they have a group and a state. A failed run is repeated by a new driver, after a growing pause."""
    progress_of_a = msgspec.structs.replace(progress(0, lag_records=2), flow="a")
    async with started(spec=project_in(folder)) as harness:
        known: list[tuple[str, str]] = []
        harness.run.watch_flows(lambda flow, group: known.append((flow, group)))
        for number, pause in enumerate((1, 2)):
            await harness.report(SessionReady(1.0), FlowRunning("a"), progress_of_a, FlowRunning("b"))
            assert harness.run.readiness().ready and harness.state == "running"
            await harness.report(Failed("RUN_FAILED", "boom. Skipped: b", retriable=True, part="flows.a"))
            await harness.end(1)
            assert harness.reason == f"pipeline tolls, flows.a: RUN_FAILED: boom. Skipped: b. Next start in {pause} s"
            await harness.clock.advance(pause)
            assert len(harness.drivers) == number + 2
        assert known == [("a", "headrace.tolls.a"), ("b", "headrace.tolls.b")]
        assert harness.run.counts("a")["read"] == 20
        assert harness.published[0] == ("headrace.tolls.a", {TopicPartition("flights", 0): 10})
        await harness.report(SessionReady(1.0), FlowRunning("a"), FlowRunning("b"))
        await harness.run.hold("paused")
        await harness.clock.advance(60)
        assert (harness.state, len(harness.drivers), harness.run.report().flows["b"].state) == ("paused", 3, "paused")


ANSWERS = """
import sys
sys.stdin.readline()
for number, _ in enumerate(sys.stdin):
    print('{"type": "text", "text": "Flow a is RUNNING."}')
    print('{"type": "text", "text": "Flow a has COMPLETED."}')
    if number == LAST:
        print('{"type": "text", "text": "Flow \\'a\\' has FAILED."}')
        END
    print('{"type": "ended"}', flush=True)
"""


@pytest.mark.parametrize(
    ("end", "error"),
    [("print(end='')", "Spark ended the run, and gave no reason"), ("sys.exit()", "the process with the definitions")],
    ids=["failed run", "killed definitions"],
)
def test_runs_follow_each_other_until_one_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, end: str, error: str
) -> None:
    """Spark has only single runs. The end of the process with the definitions is a failure too."""
    code, started = ANSWERS.replace("LAST", "2").replace("END", end), subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **given: started([sys.executable, "-c", code], **given))
    monkeypatch.setattr("headrace_pipelines.driver.project_runs._PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    spark, events = MagicMock(), list[Any]()
    spark._jvm.java.util.HashMap.return_value = {}
    project = project_in(folder)
    with pytest.raises(PartFailed) as failed:
        run_project(spark, plan_of(project), project, events.append)
    assert events == [*[FlowRunning("a")] * 3, events[-1]] and isinstance(events[-1], FlowFailed)
    assert failed.value.event.part == "flows.a" and failed.value.event.retriable
    assert failed.value.event.text.startswith(error)
