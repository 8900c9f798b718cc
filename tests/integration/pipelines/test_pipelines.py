"""Pipelines on a real broker and a real Spark: exact results over crashes, bad records, clean ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.kafka import Admin, read_records
from headrace.records import Record
from headrace.runtime import SystemClock
from headrace_devkit.testing import Cluster, MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from headrace_pipelines.runs import PipelineRun
from headrace_pipelines.spec import PipelineSpec
from tests.pipeline_harness import document

pytestmark = [pytest.mark.heavy, pytest.mark.long]

LIMIT_SECONDS = 240.0
SCHEMA = "id INT, carrier STRING, hour INT, arr_delay DOUBLE"
QUICK = {"settings": {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1"}}
"""A driver that lives for a minute is faster without optimised code."""


def flight(number: int) -> dict[str, Any]:
    delay = number % 200 if number % 30 else None
    return {"id": number, "carrier": f"C{number % 16}", "hour": number // 1000, "arr_delay": delay}


def produce(servers: str, topic: str, values: Iterable[bytes | None]) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "queue.buffering.max.messages": 1_000_000})
    for number, value in enumerate(values):
        producer.produce(topic, key=f"k{number}", value=value)
        producer.poll(0)
    assert producer.flush(120) == 0


def produce_flights(servers: str, topic: str, numbers: range) -> None:
    produce(servers, topic, (json.dumps(flight(number)).encode() for number in numbers))


async def records_of(kafka: KafkaConfig, topic: str) -> list[Record]:
    offsets = await Admin(kafka).topic_offsets(topic)
    starts = {where: start for where, (start, _) in offsets.items()}
    ends = {where: end for where, (_, end) in offsets.items()}
    return [record async for batch in read_records(kafka, starts, ends) for record in batch]


async def rows(kafka: KafkaConfig, topic: str) -> list[tuple[bytes | None, dict[str, Any]]]:
    """Return everything in a topic: key and value, in order within each partition."""
    return [(record.key, json.loads(record.value or b"null")) for record in await records_of(kafka, topic)]


async def until(there: Callable[[], object], run: PipelineRun, limit_seconds: float = LIMIT_SECONDS) -> None:
    end = time.monotonic() + limit_seconds
    while not there():
        assert time.monotonic() < end, run.status()
        await asyncio.sleep(0.02)


def in_group(leader: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def gone(leader: int, limit_seconds: float = 60.0) -> bool:
    end = time.monotonic() + limit_seconds
    while in_group(leader):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@asynccontextmanager
async def running(
    spec: Mapping[str, Any], kafka: KafkaConfig, folder: Path, registry: str = "http://localhost:8081"
) -> AsyncIterator[PipelineRun]:
    settings = SchemaRegistryConfig(url=registry)
    run = PipelineRun(PipelineSpec.model_validate(spec), kafka, folder, SystemClock(), Admin(kafka), settings)
    await run.start()
    try:
        yield run
    finally:
        await run.stop()


def read(run: PipelineRun, flow: str) -> int:
    return run.counts(flow)["read"]


def test_the_death_of_headrace_leaves_no_process(
    kafka: Cluster, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path
) -> None:
    """kill -9 of the parent ends Spark too."""
    file = tmp_path / "late.yaml"
    file.write_text(json.dumps(document({"topic": topic()}, sources={"a": {"topic": topic(), "schema": "x INT"}})))
    process = headrace({"kafka": {"bootstrap_servers": kafka.bootstrap_servers}, "pipelines": [str(file)]}, wait=False)
    process.wait_ready(LIMIT_SECONDS)
    assert len(working_below(tmp_path)) >= 3  # Headrace, driver, JVM
    process.kill()
    Scenario.wait_until(lambda: not working_below(tmp_path), "every process ended", 60)


def working_below(folder: Path) -> list[int]:
    """Return the processes whose working folder lies in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
