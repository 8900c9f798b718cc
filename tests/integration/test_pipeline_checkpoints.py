"""Checkpoints of flows on a real broker and a real Spark: what goes on, and what is refused and why."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka
import msgspec
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from headrace.config.kafka import KafkaConfig
from headrace.lifecycle import Deadline, SystemClock
from headrace.pipelines.checkpoints import Frozen, discard, preview
from headrace.pipelines.driver.plan import DriverTask
from headrace.pipelines.spec import PipelineSpec
from headrace.pipelines.tasks import TaskDriver
from tests.integration.test_pipelines import SCHEMA, produce_flights, read, rows, running, until

pytestmark = pytest.mark.heavy
FITS = "SELECT upper(carrier) AS up, carrier, count(*) AS n FROM flights WHERE hour < 99 GROUP BY carrier"
COUNTS = "SELECT carrier, count(*) AS n FROM flights GROUP BY carrier"


def counting(name: str, source: str, out: str, sql: str = COUNTS) -> dict[str, Any]:
    return {
        "name": name,
        "trigger": {"interval_seconds": 0.1, "max_records": 100},
        "sources": {"flights": {"topic": source, "schema": SCHEMA}},
        "flows": {"f": {"sql": sql, "sink": {"topic": out, "key": "carrier"}}},
    }


async def outcome(spec: Mapping[str, Any], kafka: KafkaConfig, folder: Path, reads: int = 0) -> str:
    """Run a pipeline until it has failed, or has read that many records and all there are.

    Returns:
        Why it is not ready.
    """
    async with running(spec, kafka, folder) as run:
        flow = lambda: run.status()["flows"]["f"]  # noqa: E731
        done = lambda: read(run, "f") >= reads > 0 and flow()["lag_records"] == 0  # noqa: E731
        await until(lambda: run.status()["state"] == "failed" or done(), run)
        reason = run.readiness().reason
        await run.drain(Deadline(SystemClock(), 100))
        assert run.status()["restarts"] == 0
        return reason


def test_a_checkpoint_takes_what_fits_and_refuses_the_rest(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """A filter and another column go on from the checkpoint. Another function is refused with the difference and the
    choices; nothing is tried again, and nothing is written."""
    source, out = topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)

    async def main() -> None:
        assert not await outcome(counting("edited", source, out), settings, tmp_path, 300)
        produce_flights(kafka.bootstrap_servers, source, range(16))
        assert not await outcome(counting("edited", source, out, FITS), settings, tmp_path, 16)
        written = await rows(settings, out)
        newest = {row["carrier"]: row["n"] for _, row in written}
        assert sum(newest.values()) == 316  # the state went on
        produce_flights(kafka.bootstrap_servers, source, range(10))
        why = await outcome(
            counting("edited", source, out, COUNTS.replace("count(*)", "sum(hour)")), settings, tmp_path
        )
        assert "flows.f: CHECKPOINT_UNUSABLE: the query does not fit its checkpoint: operators were aggregate by" in why
        assert "carrier of count(1), and now aggregate by carrier of sum(hour). Choose: undo the edit; or" in why
        assert await rows(settings, out) == written

    produce_flights(kafka.bootstrap_servers, source, range(300))
    asyncio.run(main())


@pytest.mark.long
def test_a_checkpoint_that_is_gone_is_refused(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """Lost state and a deleted checkpoint are refused, nothing is written, and a discarded one begins anew."""
    source, out = topic(), topic()
    settings, folder = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), tmp_path / "edited"

    async def main() -> None:
        assert not await outcome(counting("edited", source, out, FITS), settings, tmp_path, 300)
        written = await rows(settings, out)
        newest = {row["carrier"]: row["n"] for _, row in written}
        shutil.copytree(folder, tmp_path / "copy")
        shutil.rmtree(folder / "checkpoints/f/state")
        why = await outcome(counting("edited", source, out, FITS), settings, tmp_path)
        assert "CHECKPOINT_UNUSABLE" in why
        assert "state directory is empty or missing" in why
        assert "checkpoint discard FILE f`" in why
        shutil.rmtree(folder / "checkpoints")
        assert "it was deleted" in await outcome(counting("edited", source, out, FITS), settings, tmp_path)
        assert await rows(settings, out) == written
        checkpoint = tmp_path / "copy/checkpoints/f"
        async with TaskDriver.opened() as driver:
            (tmp_path / "file").write_text("{}")
            spec = PipelineSpec.model_validate(counting("edited", source, out, FITS))
            task = DriverTask(kind="state", checkpoint=checkpoint, limit=3)
            [store] = (await driver.ask(tmp_path / "file", spec, settings, task))["stores"]
        assert (store["operator"], store["rows"], len(store["shown"])) == ("stateStoreSave", 16, 3)
        assert store["shown"][0]["value"] == {"count": newest[store["shown"][0]["key"]["carrier"]]}
        discard(folder, "f")
        assert not await outcome(counting("edited", source, out, FITS), settings, tmp_path, 300)

    produce_flights(kafka.bootstrap_servers, source, range(300))
    asyncio.run(main())


@pytest.mark.long
def test_a_flow_that_does_not_fit_its_checkpoint_leaves_its_neighbour_running(
    kafka: Any, topic: Any, tmp_path: Path
) -> None:
    """`plan` says so before the start, and the neighbour continues from its own checkpoint."""
    source, out, other = topic(), topic(), topic()
    settings, folder = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), tmp_path / "two"

    def two(sql: str) -> dict[str, Any]:
        spec = counting("two", source, out, sql)
        spec["flows"]["all"] = {"sql": "SELECT carrier FROM flights", "sink": {"topic": other}}
        return spec

    async def previews(sql: str) -> dict[str, str]:
        (tmp_path / "file").write_text("{}")
        async with TaskDriver.opened() as driver:
            task = DriverTask(kind="describe")
            found = await driver.ask(tmp_path / "file", PipelineSpec.model_validate(two(sql)), settings, task)
        return {name: preview(folder, name, msgspec.convert(each, Frozen))[0] for name, each in found["frozen"].items()}

    async def main() -> None:
        assert not await outcome(two(COUNTS), settings, tmp_path, 300)
        assert await previews(COUNTS) == {"f": "continues", "all": "continues"}
        edited = COUNTS.replace("count(*)", "max(hour)")
        assert await previews(edited) == {"f": "refused", "all": "continues"}
        produce_flights(kafka.bootstrap_servers, source, range(10))
        async with running(two(edited), settings, tmp_path) as run:
            await until(lambda: read(run, "all") >= 10, run)
            status = run.status()
            assert (status["state"], status["flows"]["f"]["state"]) == ("running", "failed")
            assert "flow f failed: CHECKPOINT_UNUSABLE: the query does not fit" in run.readiness().reason

    produce_flights(kafka.bootstrap_servers, source, range(300))
    asyncio.run(main())


@pytest.mark.long
def test_removed_records_are_never_passed_over(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """A flow whose unread records retention has removed fails before its next batch, with what can be done."""
    source, out = topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)

    async def main() -> None:
        assert not await outcome(counting("removed", source, out), settings, tmp_path, 300)
        written = await rows(settings, out)
        produce_flights(kafka.bootstrap_servers, source, range(100))
        below = confluent_kafka.TopicPartition(source, 0, 350)
        client = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        for done in client.delete_records([below]).values():
            done.result(60)
        why = await outcome(counting("removed", source, out), settings, tmp_path)
        assert "flows.f: RECORDS_REMOVED: " in why
        assert "300" in why
        assert "failOnDataLoss" in why
        assert await rows(settings, out) == written

    produce_flights(kafka.bootstrap_servers, source, range(300))
    asyncio.run(main())


@pytest.mark.parametrize("moment", [pytest.param("between runs", marks=pytest.mark.long), "during a run"])
def test_a_topic_that_was_created_again_is_not_read_from_the_old_position(
    kafka: Any, topic: Any, tmp_path: Path, moment: str
) -> None:
    """Its first records would be passed over: the flow ends and says so, and writes none of them by then."""
    source, out = topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    spec = counting("anew", source, out)
    client = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})

    def create_again() -> None:
        client.delete_topics([source])[source].result(60)
        end = time.monotonic() + 60
        while source in client.list_topics(timeout=10).topics:
            assert time.monotonic() < end
        client.create_topics([NewTopic(source, 1)])[source].result(60)
        produce_flights(kafka.bootstrap_servers, source, range(400))

    async def main() -> None:
        if moment == "between runs":
            assert not await outcome(spec, settings, tmp_path, 300)
            create_again()
            why = await outcome(spec, settings, tmp_path)
        else:
            spec["trigger"] = {"interval_seconds": 3_600}  # Spark does not look meanwhile
            async with running(spec, settings, tmp_path) as run:
                await until(lambda: read(run, "f") == 300, run)
                create_again()
                await until(lambda: run.status()["state"] == "failed", run)
                why = run.readiness().reason
        assert f"flows.f: CHECKPOINT_UNUSABLE: topic {source} was deleted and created again" in why
        assert "rename the flow; or run `headrace pipeline checkpoint discard FILE f`" in why
        assert sum({row["carrier"]: row["n"] for _, row in await rows(settings, out)}.values()) == 300
        discard(tmp_path / "anew", "f")
        assert not await outcome(counting("anew", source, out), settings, tmp_path, 400)

    produce_flights(kafka.bootstrap_servers, source, range(300))
    asyncio.run(main())


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:9])


def newest(folder: Path) -> Path:
    return max((file for file in folder.iterdir() if file.name.isdecimal()), key=lambda file: int(file.name))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "offsets cut off": lambda at: cut(newest(at / "offsets")),
    "last offsets gone": lambda at: newest(at / "offsets").unlink(),
    "commit cut off": lambda at: cut(newest(at / "commits")),
    "without commits": lambda at: shutil.rmtree(at / "commits"),
    "metadata cut off": lambda at: cut(at / "metadata"),
    "state cut off": lambda at: [
        cut(file) for file in at.glob("state/0/*/*.*") if file.suffix in (".zip", ".changelog")
    ],
}


@pytest.mark.long
def test_no_damage_of_a_checkpoint_is_passed_over(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """Each damage ends the run with the reason and what to do; no record is written."""
    source, out = topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    spec = counting("whole", source, out)

    async def main() -> None:
        assert not await outcome(spec, settings, tmp_path / "sound", 300)
        written = await rows(settings, out)
        produce_flights(kafka.bootstrap_servers, source, range(10))
        for name, hurt in DAMAGE.items():
            folder = tmp_path / name.replace(" ", "_")
            shutil.copytree(tmp_path / "sound", folder)
            hurt(folder / "whole/checkpoints/f")
            why = await outcome(spec, settings, folder)
            assert "CHECKPOINT_UNUSABLE" in why, (name, why)
            assert "checkpoint discard FILE f`" in why, (name, why)
            assert await rows(settings, out) == written, name

    produce_flights(kafka.bootstrap_servers, source, range(300))
    asyncio.run(main())
