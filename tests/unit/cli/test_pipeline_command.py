"""`headrace pipeline`: what needs no Spark, and what the commands print."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from headrace.records import TopicPartition
from headrace_pipelines import pipeline_command as commands
from headrace_pipelines.checkpoints import Frozen, check, discard
from headrace_pipelines.driver_protocol import DriverTask
from headrace_pipelines.load import load_pipeline
from tests.command_line import headrace
from yaml_table import table

FILE = table(__file__, "file")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tolls.yaml").write_text(FILE)
    return tmp_path


class FakeDriver:
    """Answers tasks from a table."""

    def __init__(self, responses: dict[str, Any]) -> None:
        self.responses = responses
        self.tasks: list[DriverTask] = []

    @asynccontextmanager
    async def opened(self, *, debug: bool = False) -> AsyncIterator[FakeDriver]:
        yield self

    async def run_task(self, file: Path, spec: Any, kafka: Any, task: DriverTask, registry: Any = None) -> Any:
        self.tasks.append(task)
        return self.responses[task.kind]

    def sentence(self, file: Path, problem: dict[str, str]) -> str:
        line = {"flows.by_gate": ":7"}.get(problem["part"], "")
        return f"{file}{line}: {problem['part']}: {problem['text']}"


def fake(monkeypatch: pytest.MonkeyPatch, **responses: Any) -> FakeDriver:
    driver = FakeDriver(responses)
    monkeypatch.setattr(commands, "TaskDriver", driver)
    return driver


def test_validate_names_problems_and_never_needs_spark(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 78 for a problem; two files may be checked at once."""
    assert headrace("pipeline", "validate", "tolls.yaml") == 0
    assert capsys.readouterr().out == "tolls.yaml: ok\n"
    (folder / "tolls.yaml").write_text(FILE.replace("cents >=", "sents >="))
    assert headrace("pipeline", "validate", "tolls.yaml", "--output", "json") == 78
    found = json.loads(capsys.readouterr().out)
    assert not found["ok"]
    assert "tolls.yaml:5: views.heavy: unknown column sents: did you mean cents?" in found["problems"][0]
    (folder / "other.yaml").write_text(FILE.replace("gate, count", "gat, count"))
    assert headrace("pipeline", "validate", "tolls.yaml", "other.yaml") == 78
    shown = capsys.readouterr().err
    assert "tolls.yaml:5: views.heavy" in shown
    assert "other.yaml:8: flows.by_gate.sql: unknown column gat" in shown
    for name in ("tolls.yaml", "other.yaml"):
        (folder / name).write_text(FILE)
    assert headrace("pipeline", "validate", "tolls.yaml", "other.yaml") == 78
    assert "other.yaml: name: tolls.yaml has the name tolls too" in capsys.readouterr().err


def test_plan_prints_graph_state_and_problems(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What Spark refuses is exit code 78; the graph is drawn nevertheless."""
    kept = {"keeps": "aggregate", "keys": ["gate"], "bounded": False}
    parts = {"flows.by_gate": {"columns": {"gate": "string", "n": "bigint"}, "state": [kept]}}
    fake(monkeypatch, describe={"parts": parts, "problems": []})
    (folder / "tolls.yaml").write_text(
        FILE.replace("topic: passages,", "topic: passages, corrupt: quarantine,")
        + "    late_rows: {source: passages, column: at, delay_seconds: 1, topic: late}\n"
    )
    assert headrace("pipeline", "plan", "tolls.yaml", "--graph", "p.html") == 0
    out = capsys.readouterr().out
    assert "flow by_gate <- heavy -> topic by_gate (update, at least once)\n  gate string, n bigint\n" in out
    assert "  keeps aggregate by gate: unbounded, because no watermark lets Spark drop old keys" in out
    graph = (folder / "p.html").read_text()
    svg = ElementTree.fromstring(graph[graph.index("<svg") :])
    boxes = [(box.get("x"), box.get("y"), box.get("class")) for box in svg.iter("{http://www.w3.org/2000/svg}rect")]
    counts = Counter(kind for _, _, kind in boxes) - Counter({kind for _, _, kind in boxes})  # without the legend
    assert counts == {"in": 1, "sources": 1, "views": 1, "flows": 2, "out": 2, "dead": 1, "late": 1}
    assert "topic passages.dlq" in graph and "topic late" in graph
    assert graph.count("<path ") == 1 + 1 + 2 + 2 + 2 and "marker-end:url(#arrow)" in graph
    assert len({place[:2] for place in boxes}) == len(boxes)
    fake(monkeypatch, describe={"parts": parts, "problems": [{"part": "flows.by_gate", "text": "no", "stack": ""}]})
    assert headrace("pipeline", "plan", "tolls.yaml", "--output", "json") == 78
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == ["tolls.yaml:7: flows.by_gate: no"]
    assert found["sinks"]["by_gate"] == {"mode": "update", "guarantee": "at least once"}


def test_plan_compares_each_flow_with_its_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An edit that the next start would refuse is exit code 78, with the difference and the line of the flow."""
    frozen = Frozen(["topic passages"], ["aggregate by gate of count(1)"], "update", "topic", 2)
    state = folder / ".headrace/state/pipelines/tolls"
    check(state, "by_gate", msgspec.structs.replace(frozen, operators=["aggregate by gate of max(cents)"]))
    for name in ("offsets", "commits"):
        (state / "checkpoints/by_gate" / name).mkdir(parents=True)
        (state / "checkpoints/by_gate" / name / "0").write_text("v1\n{}\n")
    (state / "checkpoints/by_gate/metadata").write_text("{}")
    parts = {f"flows.{name}": {"columns": {"gate": "string"}} for name in ("by_gate", "all_gates")}
    found = {"by_gate": msgspec.to_builtins(frozen), "all_gates": None}
    fake(monkeypatch, describe={"parts": parts, "problems": [], "frozen": found})
    assert headrace("pipeline", "plan", "tolls.yaml") == 78
    shown = capsys.readouterr()
    assert "by_gate (update, at least once)\n  gate string\n  checkpoint: refused\n" in shown.out
    assert "all_gates (update, at least once)\n  gate string\n  checkpoint: starts anew\n" in shown.out
    assert "tolls.yaml:7: flows.by_gate: CHECKPOINT_UNUSABLE: the query does not fit its checkpoint: ope" in shown.err
    discard(state, "by_gate")
    assert headrace("pipeline", "plan", "tolls.yaml", "--output", "json") == 0
    assert json.loads(capsys.readouterr().out)["checkpoints"]["by_gate"] == "starts anew"


def test_test_compares_rows_and_shows_the_difference(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 for a difference, 78 without tests; files for other pipelines are passed over."""
    assert headrace("pipeline", "test", "tolls.yaml") == 78
    assert "has no tests of tolls.yaml" in capsys.readouterr().err
    (folder / "tests").mkdir()
    (folder / "tests" / "one.yaml").write_text(
        "given: {passages: [{gate: n, cents: 700}]}\nexpect: {by_gate: [{n: 1}]}\n"
    )
    (folder / "tests" / "two.yaml").write_text("pipeline: other.yaml\nexpect: {x: []}\n")
    driver = fake(monkeypatch, test={"by_gate": {"actual": ['{"n":1}'], "expected": ['{"n":1}']}})
    assert headrace("pipeline", "test", "tolls.yaml") == 0
    assert capsys.readouterr().out == "ok     one: by_gate\n"
    assert driver.tasks[0].given == {"passages": [[{"gate": "n", "cents": 700}]]}
    fake(monkeypatch, test={"by_gate": {"actual": ['{"n":2}'], "expected": ['{"n":1}']}})
    assert headrace("pipeline", "test", "tolls.yaml") == 1
    assert 'FAILED one: by_gate\n    - {"n":1}\n' in capsys.readouterr().out
    (folder / "tests" / "one.yaml").write_text("expect: {by_gat: []}\n")
    assert headrace("pipeline", "test", "tolls.yaml") == 2


def test_the_newest_records_are_read_or_those_since_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A partition without records since then has an empty slice; an offset behind the end is the end."""
    at = [TopicPartition("passages", number) for number in range(3)]

    class FakeAdmin:
        def __init__(self, kafka: object) -> None: ...

        async def topic_offsets(self, topic: str, right: str) -> dict[TopicPartition, tuple[int, int]]:
            return {at[0]: (0, 5), at[1]: (3, 50), at[2]: (0, 9)}

        async def offsets_since(self, partitions: object, timestamp_ms: int) -> dict[TopicPartition, int]:
            assert timestamp_ms == 1_767_225_600_000
            return {at[1]: 20, at[2]: 10}

    monkeypatch.setattr(commands, "Admin", FakeAdmin)
    monkeypatch.setattr(commands, "_SHOWN_RECORDS", 10)
    spec, since = load_pipeline(folder / "tolls.yaml"), datetime(2026, 1, 1, tzinfo=UTC)
    newest = asyncio.run(commands.slices_of(spec, "by_gate", None, None))
    assert newest == {"passages": {0: (0, 5), 1: (40, 50), 2: (0, 9)}}
    later = asyncio.run(commands.slices_of(spec, "by_gate", None, since))
    assert later == {"passages": {0: (5, 5), 1: (20, 50), 2: (9, 9)}}
