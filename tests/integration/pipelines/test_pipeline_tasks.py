"""Tasks with a pipeline on a real Spark: describe, show and test, and the public fixture `pipeline_rows`."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from headrace.config.kafka import KafkaConfig
from headrace.errors import PipelineInvalid
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.pipelines import PipelineRows
from headrace_pipelines.driver_protocol import DriverTask, Rows
from headrace_pipelines.driver_tasks import TaskDriver
from headrace_pipelines.load import load_pipeline
from tests.wrong_pipelines import KNOWN_TO_SPARK, said_of, write_wrong
from yaml_table import table

pytestmark = pytest.mark.heavy

FILE = table(__file__, "file")
GIVEN: list[Rows] = [
    [{"plate": "B 1", "gate": "north", "cents": 700, "at": "2026-01-01T00:00:00Z"}],
    [{"plate": "B 2", "gate": "north", "cents": 800, "at": "2026-01-01T00:09:00+00:00"}, {"gate": "south"}],
]
Ask = Callable[..., Coroutine[Any, Any, Any]]


def asking(folder: Path, driver: TaskDriver, servers: str = "127.0.0.1:1") -> Ask:
    """Return what sends a task with a file to a driver."""

    async def ask(task: DriverTask, text: str = FILE) -> Any:
        file = folder / "tolls.yaml"
        file.write_text(text)
        return await driver.run_task(file, load_pipeline(file), KafkaConfig(bootstrap_servers=servers), task)

    return ask


def loaded(lines: list[str]) -> list[Any]:
    return [json.loads(line) for line in lines]


def test_one_session_does_task_after_task_without_kafka(pipeline_rows: PipelineRows, tmp_path: Path) -> None:
    """Describe resolves columns and state; a test case gives rows; a refusal does not end the session."""

    async def steps(driver: TaskDriver) -> None:
        ask = asking(tmp_path, driver)
        described = await ask(DriverTask(kind="describe"))
        assert described["problems"] == []
        parts = described["parts"]
        assert parts["sources.passages"]["columns"]["at"] == "timestamp"
        assert parts["flows.by_gate"]["columns"] == {"gate": "string", "n": "bigint"}
        state = {"keeps": "aggregate", "keys": ["passages.gate"], "bounded": False}
        assert parts["flows.by_gate"]["state"] == [state]
        assert parts["flows.windows"]["state"] == [state | {"keys": ["window"], "bounded": True}]
        assert parts["flows.plates"]["state"] == []

        refusals: tuple[tuple[list[Any], str], ...] = (
            ([{"gate": "north", "m": 2}], "expect.by_gate has the column m, and the columns are gate, n: correct it"),
            ([{"gate": "north", "n": "two"}], "expect.by_gate has a row that is not of the type"),
        )
        for wrong, sentence in refusals:
            with pytest.raises(PipelineInvalid, match=sentence):
                await ask(DriverTask(kind="test", expect={"by_gate": wrong}))

        by_gate = [{"gate": "south", "n": 1}, {"gate": "north", "n": 2}]
        expect = {"by_gate": by_gate, "plates": None, "windows": [{"n": 1}]}
        batch = await ask(DriverTask(kind="test", given={"passages": GIVEN}, expect=expect))
        assert sorted(batch["by_gate"]["actual"]) == sorted(batch["by_gate"]["expected"])
        assert loaded(batch["plates"]["actual"]) == [{"plate": "B 1"}, {"plate": "B 2"}]
        assert len(batch["windows"]["actual"]) == 2
        streamed = await ask(DriverTask(kind="test", given={"passages": GIVEN}, expect=expect, streaming=True))
        # The second window is still open: no later row has moved the watermark past its end.
        assert streamed["windows"]["actual"] == streamed["windows"]["expected"] == ['{"n":1}']

    pipeline_rows.run(steps)


def test_rows_of_a_slice_are_shown_and_nothing_is_written(
    kafka: Cluster, topic: MakeTopic, pipeline_rows: PipelineRows, tmp_path: Path
) -> None:
    """Only the slice is read, by a source, a view and a flow; no sink, group or checkpoint appears."""
    name = topic(2)
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in range(20):
        row = {"plate": f"B {number}", "gate": "north", "cents": number * 100}
        producer.produce(name, json.dumps(row).encode(), partition=number % 2)
    producer.flush(60)
    text = FILE.replace("topic: passages", f"topic: {name}")

    async def steps(driver: TaskDriver) -> None:
        ask = asking(tmp_path, driver, kafka.bootstrap_servers)
        slices = {name: {0: (8, 10), 1: (8, 10)}}
        shown = await ask(DriverTask(kind="show", name="passages", limit=3, slices=slices), text)
        assert shown["columns"] == ["plate", "gate", "cents", "at"]
        assert {row["plate"] for row in shown["rows"]} < {"B 16", "B 17", "B 18", "B 19"}
        counted = await ask(DriverTask(kind="show", name="by_gate", limit=10, slices=slices), text)
        assert counted["rows"] == [{"gate": "north", "n": 4}]
        plates = await ask(
            DriverTask(kind="show", name="plates", limit=10, slices={name: {0: (0, 4), 1: (0, 4)}}), text
        )
        assert [row["plate"] for row in plates["rows"]] == ["B 6", "B 5", "B 7"]

    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    pipeline_rows.run(steps)
    assert not {"by_gate", "windows", "plates"} & admin.list_topics(timeout=60).topics.keys()
    assert [file.name for file in tmp_path.iterdir()] == ["tolls.yaml"]


def test_spark_refuses_the_wrong_files_that_only_spark_can_know(pipeline_rows: PipelineRows, tmp_path: Path) -> None:
    """Each with file, line, cause and remedy, and one session survives them all."""

    async def steps(driver: TaskDriver) -> None:
        for name in KNOWN_TO_SPARK:
            file = write_wrong(tmp_path, name)
            found = await driver.run_task(file, load_pipeline(file), KafkaConfig(), DriverTask(kind="describe"))
            sentences = [driver.sentence(file, problem) for problem in found["problems"]]
            shown = [text.removeprefix(f"{file}:").replace(str(tmp_path), "FOLDER") for text in sentences]
            assert shown == said_of(name)

    assert len(KNOWN_TO_SPARK) >= 15
    pipeline_rows.run(steps)


def test_rows_of_a_pipeline_for_given_rows(pipeline_rows: PipelineRows, tmp_path: Path) -> None:
    """Python views, rules and static tables are as in a run; a changed Python file counts at the next call."""
    file = tmp_path / "tolls.yaml"
    file.write_text(table(__file__, "owners"))
    code = tmp_path / "tolls_code.py"
    code.write_text("def heavy(passages):\n    return passages.where('cents >= 500')\n")
    (tmp_path / "owners.csv").write_text("plate,owner\nB 1,Ann\nB 2,unknown\nB 3,Bob\n")
    (tmp_path / "given.csv").write_text("plate,gate,cents\nB 1,north,700\nB 2,north,800\nB 3,south,100\n")
    assert pipeline_rows(file, "by_owner", {"passages": "given.csv"}) == [{"owner": "Ann", "cents": 700}]
    code.write_text("def heavy(passages):\n    return passages.where('cents < 500')\n# longer than before\n")
    assert pipeline_rows(file, "by_owner", {"passages": "given.csv"}) == [{"owner": "Bob", "cents": 100}]
    given = {"passages": [{"plate": "B 1", "cents": 400}], "owners": [{"plate": "B 1", "owner": "Carl"}]}
    assert pipeline_rows(file, "by_owner", given) == [{"owner": "Carl", "cents": 400}]
    steps = {"passages": [[{"gate": "north"}], [{"gate": "north"}]]}
    streamed = pipeline_rows(file, "by_gate", steps, streaming=True)
    assert streamed == [{"gate": "north", "n": 1}, {"gate": "north", "n": 2}]
    with pytest.raises(PipelineInvalid, match=r"given\.passages has the column plte"):
        pipeline_rows(file, "by_gate", {"passages": [{"plte": "B 1"}]})
