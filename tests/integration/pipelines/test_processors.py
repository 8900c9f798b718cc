"""Processors on a real broker and a real Spark: state, timers, dead letters, and what is seen of a checkpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import PipelineInvalid
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.pipelines import PipelineRows
from headrace_devkit.testing.secured import kafka_settings
from headrace_pipelines.driver_protocol import DriverTask
from headrace_pipelines.load import load_pipeline
from tests.integration.pipelines.test_pipelines import produce, records_of, rows, running, until
from yaml_table import table

pytestmark = [pytest.mark.heavy, pytest.mark.long]


def written(folder: Path, which: str = "", **topics: str) -> Path:
    """Write a pipeline file and its module, with the names of topics."""
    text = table(__file__, f"{which}file")
    for name, topic in topics.items():
        text = text.replace(f"topic: {name}", f"topic: {topic}")
    (folder / ("risky.py" if which else "gates.py")).write_text(table(__file__, f"{which}code"))
    (folder / "known.csv").write_text("gate,passed\nnorth,10\n")
    (folder / "tolls.yaml").write_text(text)
    return folder / "tolls.yaml"


def test_state_continues_over_batches_and_restarts(
    kafka: Cluster, topic: MakeTopic, pipeline_rows: PipelineRows, tmp_path: Path
) -> None:
    """Failed rows are dead letters, and change no state; the checkpoint shows the state, and refuses another one."""
    settings = kafka_settings(kafka.bootstrap_servers)
    source, out = topic(2), topic()
    file = written(tmp_path, passages=source, counts=out)
    spec = load_pipeline(file, check=True).model_dump(exclude_unset=True, by_alias=True)
    spec["flows"] = {"counts": spec["flows"]["counts"]}

    def send(*gates: str) -> None:
        produce(kafka.bootstrap_servers, source, (json.dumps({"gate": gate}).encode() for gate in gates))

    async def counted(read: int, expected: dict[str, int]) -> None:
        async with running(spec, settings, tmp_path) as run:
            await until(lambda: run.counts("counts")["read"] == read, run)
            assert {row["gate"]: row["n"] for _, row in await rows(settings, out)} == expected
            flow = run.status()["flows"]["counts"]
            assert (flow["broken_rules"], flow["state_rows"]) == ({"failed": 1}, 2)

    async def refused() -> str:
        async with running(spec, settings, tmp_path) as run:
            await until(lambda: run.status()["state"] == "failed", run)
            return run.readiness().reason

    send("north", "south", "north", "bad")
    asyncio.run(counted(4, {"north": 12, "south": 1}))
    send("north", "bad")
    asyncio.run(counted(2, {"north": 13, "south": 1}))
    for failed in asyncio.run(records_of(settings, f"{out}.dlq")):
        assert (failed.key, json.loads(failed.value or b"")) == (b"bad", {"gate": "bad", "at": None})
        assert dict(failed.headers or ())["headrace.dlq.reason"] == b"ValueError: not a gate"

    task = DriverTask(kind="state", checkpoint=tmp_path / "tolls" / "checkpoints" / "counts")
    stores = pipeline_rows.run(lambda driver: driver.run_task(file, load_pipeline(file), settings, task))["stores"]
    assert [(store["operator"], store["store"], store["rows"]) for store in stores] == [("processor", "n", 2)]
    shown = sorted(stores[0]["shown"], key=str)
    assert shown == [{"key": {"gate": "north"}, "value": 13}, {"key": {"gate": "south"}, "value": 1}]

    (tmp_path / "gates.py").write_text(table(__file__, "code").replace('BIGINT")', 'STRING")'))
    reason = asyncio.run(refused())
    assert "n ValueState(BIGINT), and now processor gates:Count by gate with no time and n ValueState(STRING)" in reason
    assert "Choose: undo the edit; or rename the flow" in reason


def test_time_passes_from_step_to_step_of_a_test_case(pipeline_rows: PipelineRows, tmp_path: Path) -> None:
    """Timers and times to live by the clock of the test; times of a state and of a timer keep their zone."""
    file = written(tmp_path)
    step = {"gate": "north", "at": "2026-01-01T01:00:00+01:00"}
    steps: Any = {"passages": [[step, {"gate": "south"}], [step], [], []]}
    found = pipeline_rows(file, "idle", steps, streaming=True, step_seconds=30)
    assert found == table(__file__, "idle")
    found = pipeline_rows(file, "visits", {"passages": table(__file__, "passages")}, streaming=True)
    assert found == table(__file__, "visits")


def check_letters(tasks: list[dict[str, Any]], reasons: dict[str, str], letters: list[Any]) -> None:
    """Each task of a reason is a dead letter with this reason after three attempts."""
    for task, (does, reason), letter in zip(tasks, reasons.items(), letters, strict=False):
        headers = dict(letter.headers or ())
        assert (task["does"], headers["headrace.dlq.attempts"]) == (does, b"3")
        assert headers["headrace.dlq.reason"].decode().startswith(reason)
        more = {"at": "2026-01-01T00:00:00+00:00"}
        assert (letter.key, json.loads(letter.value or b"")) == (b"north", {**task, "more": more})


def check_outcomes(
    settings: Any, topics: dict[str, str], failed: list[dict[str, Any]], reasons: dict[str, str]
) -> None:
    """The rows, dead letters and alarms that the flows have written."""
    for name, numbers in (("letters", [1, 2, 3]), ("drops", [1, 2]), ("stops", [])):
        assert [row["n"] for _, row in asyncio.run(rows(settings, topics[name]))] == numbers
    letters = asyncio.run(records_of(settings, f"{topics['letters']}.dlq"))
    check_letters(failed, reasons, letters)
    assert [row["timers"] for _, row in asyncio.run(rows(settings, topics["alarms"]))] == [1, 2, 1]
    [alarm] = asyncio.run(rows(settings, f"{topics['alarms']}.dlq"))
    assert alarm == (b"north", {"timer": "2026-01-01T00:00:00+00:00"})


def test_each_failure_follows_the_policy_of_its_flow(
    kafka: Cluster, topic: MakeTopic, pipeline_rows: PipelineRows, tmp_path: Path
) -> None:
    """After all attempts a row is a dead letter, dropped, or the end of the flow, and no state or timer has changed.

    So are values that only Spark would refuse. A failed timer is not called again; a late row is dropped and counted.
    """
    settings = kafka_settings(kafka.bootstrap_servers)
    topics = {name: topic() for name in ("tasks", "ticks", "letters", "drops", "alarms", "stops")}
    file = written(tmp_path, "risky_", **topics)
    spec = load_pipeline(file, check=True).model_dump(exclude_unset=True, by_alias=True)
    flows = spec["flows"]
    reasons = table(__file__, "risky_reasons")
    tasks = [
        {"gate": "north", "does": does, "more": {"at": "2026-01-01T00:00:00Z"}}
        for does in ("right", *reasons, "flaky", "right")
    ]

    def send(name: str, *sent: dict[str, Any]) -> None:
        produce(kafka.bootstrap_servers, topics[name], (json.dumps(row).encode() for row in sent))

    async def main() -> None:
        spec["flows"] = {name: flows[name] for name in ("letters", "drops", "alarms")}
        async with running(spec, settings, tmp_path) as run:
            for number, minute in enumerate((0, 10, 1, 10)):
                send("ticks", {"gate": "north", "at": f"2026-01-01T00:{minute:02}:00Z"})
                await until(lambda number=number: run.counts("alarms")["read"] == number + 1, run)
                if number:
                    await until(lambda: run.status()["flows"]["alarms"]["broken_rules"], run)
            await until(lambda: all(run.counts(name)["read"] == len(tasks) for name in ("letters", "drops")), run)
            found = run.status()["flows"]
            expected = [{"failed": count} for count in (10, 11, 1)]
            assert [found[name]["broken_rules"] for name in spec["flows"]] == expected
            assert found["alarms"]["dropped_rows"] == 1
        spec["flows"] = {"stops": flows["stops"]}
        async with running(spec, settings, tmp_path) as run:
            await until(lambda: run.status()["state"] == "failed", run)
            text = "a row failed with SystemExit after 2 attempts, and on_error is fail"
            assert text in run.readiness().reason

    send("tasks", *tasks)
    asyncio.run(main())
    check_outcomes(settings, topics, tasks[1:], reasons)
    with pytest.raises(PipelineInvalid, match=r"(?s)thrown from the Python worker.*risky.py.*in __init__.*OSError"):
        pipeline_rows(file, "unready", {"tasks": tasks[:1]}, streaming=True)
