"""Checkpoints of flows on a real broker and a real Spark: what continues, and what is refused and why."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from headrace.config.kafka import KafkaConfig
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.pipelines import PipelineRows
from headrace_devkit.testing.scenario import Scenario
from headrace_pipelines.checkpoints import Frozen, discard, preview
from headrace_pipelines.driver_protocol import DriverTask
from headrace_pipelines.runs import PipelineRun
from headrace_pipelines.spec import PipelineSpec
from tests.integration.pipelines.test_pipelines import (
    QUICK,
    SCHEMA,
    produce_flights,
    read,
    records_of,
    rows,
    running,
    until,
)

pytestmark = pytest.mark.heavy
FITS = "SELECT upper(carrier) AS up, carrier, count(*) AS n FROM flights WHERE hour < 99 GROUP BY carrier"
COUNTS = "SELECT carrier, count(*) AS n FROM flights GROUP BY carrier"
EDITED = COUNTS.replace("count(*)", "sum(hour)")
AGAIN = "topic {} was deleted and created again"


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "stateless": (lambda at: shutil.rmtree(at / "state"), "state directory is empty or missing")
}
"""Flow to the damage of its checkpoint, and words of the reason. Spark finds it; `test_checkpoints.py` has the rest."""


def counting(name: str, source: str, out: str) -> dict[str, Any]:
    return {
        "name": name,
        "trigger": {"interval_seconds": 0.5, "max_records": 150},
        "sources": {"flights": {"topic": source, "schema": SCHEMA}},
        "flows": {"f": {"sql": COUNTS, "sink": {"topic": out, "key": "carrier"}}},
        "driver": {"shuffle_partitions": 1, **QUICK},
    }


def create_again(servers: str, source: str) -> None:
    client = AdminClient({"bootstrap.servers": servers})
    client.delete_topics([source])[source].result(60)
    end = time.monotonic() + 60
    while source in client.list_topics(timeout=10).topics:
        assert time.monotonic() < end
        time.sleep(0.05)
    client.create_topics([NewTopic(source, 1)])[source].result(60)
    produce_flights(servers, source, range(400))


async def outcome(spec: Mapping[str, Any], kafka: KafkaConfig, folder: Path, reads: int = 0) -> str:
    """Run a pipeline until it has failed, or each flow has read that many records and all there are.

    Returns:
        Why it is not ready.
    """
    async with running(spec, kafka, folder) as run:
        await until(lambda: run.status()["state"] == "failed" or (reads and have_read(run, reads)), run)
        reason = run.readiness().reason
        await run.drain(Deadline(SystemClock(), 100))
        assert run.status()["restarts"] == 0
        return reason


def have_read(run: PipelineRun, records: int) -> bool:
    """Return whether each flow that has not failed has read that many records, and all there are."""
    flows = {name: flow for name, flow in run.status()["flows"].items() if flow["state"] != "failed"}
    return all(read(run, name) >= records and flow["lag_records"] == 0 for name, flow in flows.items())


def check_state(stores: list[Any], written: Mapping[Any, Any]) -> None:
    """Check that the state of a flow has the counts that it wrote."""
    [store] = stores
    assert (store["operator"], store["rows"], len(store["shown"])) == ("stateStoreSave", 16, 3)
    for shown in store["shown"]:
        assert shown["value"]["count"] == written[shown["key"]["carrier"].encode()]["n"]


def test_a_checkpoint_takes_what_fits_and_refuses_the_rest(kafka: Cluster, topic: MakeTopic, tmp_path: Path) -> None:
    """A flow with a filter and another column continues from its checkpoint, beside flows that are refused.

    Refused are another function, damage, and positions of an earlier topic, each with the choices. Nothing is written.
    """
    source, again, folder = topic(), topic(), tmp_path / "edited"
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    names = ["fits", "other", "anew", *DAMAGE]
    outs = {name: topic() for name in names}
    spec = counting("edited", source, "")
    spec["sources"]["again"] = {"topic": again, "schema": SCHEMA}
    spec["flows"] = {name: {"sql": COUNTS, "sink": {"topic": outs[name], "key": "carrier"}} for name in names}
    spec["flows"]["anew"]["sql"] = COUNTS.replace("flights", "again")

    async def found() -> dict[str, Any]:
        return {name: dict(await rows(settings, out)) for name, out in outs.items()}

    async def edited_run() -> dict[str, str]:
        async with running(spec, settings, tmp_path) as run:
            states = lambda: [flow["state"] for flow in run.status()["flows"].values()]  # noqa: E731
            await until(lambda: states().count("failed") == len(names) - 1 and have_read(run, 16), run)
            assert (run.status()["state"], run.status()["restarts"]) == ("running", 0)
            assert "flow other failed: CHECKPOINT_UNUSABLE: the query does not fit" in run.readiness().reason
            await run.drain(Deadline(SystemClock(), 100))
            return {name: flow["last_error"] for name, flow in run.status()["flows"].items() if flow["last_error"]}

    for name in (source, again):
        produce_flights(kafka.bootstrap_servers, name, range(300))
    assert not asyncio.run(outcome(spec, settings, tmp_path, 300))
    before = asyncio.run(found())

    for name, (hurt, _) in DAMAGE.items():
        hurt(folder / "checkpoints" / name)
    spec["flows"]["fits"]["sql"], spec["flows"]["other"]["sql"] = FITS, EDITED
    produce_flights(kafka.bootstrap_servers, source, range(16))
    create_again(kafka.bootstrap_servers, again)
    check_reasons(asyncio.run(edited_run()), again)
    after = asyncio.run(found())
    assert [name for name in names if after[name] != before[name]] == ["fits"]
    assert sum(row["n"] for row in after["fits"].values()) == 316  # the state continues


def ask(rows: PipelineRows, spec: Mapping[str, Any], kafka: KafkaConfig, folder: Path, kind: Any, **task: Any) -> Any:
    (folder / "file").write_text("{}")
    sent = DriverTask(kind=kind, **task)
    return rows.run(lambda driver: driver.run_task(folder / "file", PipelineSpec.model_validate(spec), kafka, sent))


def check_reasons(reasons: Mapping[str, str], again: str) -> None:
    assert reasons.keys() == {"other", "anew", *DAMAGE}
    for name, reason in reasons.items():
        assert reason.startswith("CHECKPOINT_UNUSABLE: "), reason
        assert f"pipeline state FILE {name} --discard`" in reason
    assert (
        "carrier of count(1), and now aggregate by carrier of sum(hour). Choose: undo the edit; or" in reasons["other"]
    )
    assert AGAIN.format(again) in reasons["anew"]
    for name, (_, words) in DAMAGE.items():
        assert words in reasons[name]


@pytest.mark.long
def test_the_state_of_a_checkpoint_is_shown_and_a_plan_says_what_is_refused(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path, pipeline_rows: PipelineRows
) -> None:
    """Before a start, and without one."""
    source, out = topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    spec, folder = counting("kept", source, out), tmp_path / "kept"
    produce_flights(kafka.bootstrap_servers, source, range(300))
    assert not asyncio.run(outcome(spec, settings, tmp_path, 300))
    kept = ask(pipeline_rows, spec, settings, tmp_path, "state", checkpoint=folder / "checkpoints/f", limit=3)
    check_state(kept["stores"], dict(asyncio.run(rows(settings, out))))
    for sql, expected in ((FITS, "continues"), (EDITED, "refused")):
        spec["flows"]["f"]["sql"] = sql
        frozen = ask(pipeline_rows, spec, settings, tmp_path, "describe")["frozen"]
        assert preview(folder, "f", msgspec.convert(frozen["f"], Frozen))[0] == expected


@pytest.mark.long
def test_removed_records_are_never_passed_over(
    site: Scenario, kafka: Cluster, topic: MakeTopic, tmp_path: Path
) -> None:
    """A flow whose unread records retention has removed fails before its next batch, with what can be done."""
    source, out = topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)

    async def main() -> None:
        assert not await outcome(counting("removed", source, out), settings, tmp_path, 300)
        written = await rows(settings, out)
        produce_flights(kafka.bootstrap_servers, source, range(100))
        await asyncio.to_thread(site.remove_before, source, 350)
        why = await outcome(counting("removed", source, out), settings, tmp_path)
        assert "flows.f: RECORDS_REMOVED: " in why
        assert "300" in why
        assert "failOnDataLoss" in why
        assert await rows(settings, out) == written

    produce_flights(kafka.bootstrap_servers, source, range(300))
    asyncio.run(main())


@pytest.mark.long
def test_what_compaction_removes_is_not_missing(kafka: Cluster, topic: MakeTopic, tmp_path: Path) -> None:
    """A flow that has read half continues where the positions that follow are gone; what is left is read once."""
    source = topic(cleanup_policy="compact", segment_ms=100, min_cleanable_dirty_ratio=0.01)
    settings, out = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), topic()
    spec = counting("compact", source, out)
    spec["flows"]["f"] = {"sql": "SELECT id FROM flights", "sink": {"topic": out, "key": "id"}}

    async def main() -> list[int]:
        produce_flights(kafka.bootstrap_servers, source, range(300))
        assert not await outcome(spec, settings, tmp_path, 300)
        end = time.monotonic() + 120
        for number in itertools.count(300, 100):  # each makes a segment
            produce_flights(kafka.bootstrap_servers, source, range(number, number + 100))
            await asyncio.sleep(0.2)
            left = await records_of(settings, source)
            if any(later.offset - first.offset > 1 for first, later in itertools.pairwise(left) if first.offset > 300):
                break
            assert time.monotonic() < end
        assert not await outcome(spec, settings, tmp_path, 1)
        return [*range(number, number + 100)]

    newest = asyncio.run(main())
    found = Counter(row["id"] for _, row in asyncio.run(rows(settings, out)))
    assert found.keys() >= {*range(300), *newest}
    assert set(found.values()) == {1}


@pytest.mark.long
def test_a_topic_that_is_created_again_during_a_run_is_not_read_on(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path
) -> None:
    """Its first records would be passed over: the flow ends and says so, and writes none of them by then."""
    source, out = topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    spec = counting("anew", source, out)
    spec["trigger"] = {"interval_seconds": 3_600}  # Spark does not look meanwhile

    async def main() -> None:
        async with running(spec, settings, tmp_path) as run:
            await until(lambda: read(run, "f") == 300, run)
            create_again(kafka.bootstrap_servers, source)
            await until(lambda: run.status()["state"] == "failed", run)
            assert f"flows.f: CHECKPOINT_UNUSABLE: {AGAIN.format(source)}" in run.readiness().reason
        assert sum({row["carrier"]: row["n"] for _, row in await rows(settings, out)}.values()) == 300
        discard(tmp_path / "anew", "f")
        assert not await outcome(counting("anew", source, out), settings, tmp_path, 400)

    produce_flights(kafka.bootstrap_servers, source, range(300))
    asyncio.run(main())
