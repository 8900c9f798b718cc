"""Permanent failures, late rows, real-time mode and generated rows of a pipeline, on a real broker and a real Spark."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.testing import Cluster, MakeTopic, Registry
from tests.integration.pipelines.test_pipelines import produce, records_of, running, until
from yaml_table import table

pytestmark = [pytest.mark.heavy, pytest.mark.long]


@pytest.mark.parametrize(("more", "source", "flow", "reason"), table(__file__, "a_permanent_failure_is_not_retried"))
async def test_a_permanent_failure_is_not_retried(
    kafka: Cluster,
    topic: MakeTopic,
    schema_registry: Registry,
    tmp_path: Path,
    more: dict[str, Any],
    source: dict[str, Any],
    flow: dict[str, Any],
    reason: str,
) -> None:
    """Readiness names the part and the cause without a value; the bad record is not written, and nothing is tried
    again."""
    read_from, out = topic(), topic()
    given = {"topic": read_from, "schema": "id INT", **source}
    written = {"sql": "SELECT * FROM passages", **flow, "sink": {"topic": out, **flow.get("sink", {})}}
    spec = {
        "name": "strict",
        "sources": {"passages": {name: value for name, value in given.items() if value}},
        "flows": {"f": written},
        "driver": {"shuffle_partitions": 1},
        **more,
    }
    produce(kafka.bootstrap_servers, read_from, [b'{"id": 1, "text": "c4nary"}', b"{bad", b'{"id": 9}'])
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    async with running(spec, settings, tmp_path / "state", schema_registry.url) as run:
        await until(lambda: run.status()["state"] == "failed", run)
        assert reason in run.readiness().reason
        assert "c4nary" not in run.readiness().reason
        assert run.status()["restarts"] == 0
    values = [record.value for record in await records_of(settings, out)]
    assert b'{"id":9}' not in values
    assert len(values) == len(set(values))


@pytest.mark.parametrize("mode", ["append", "update"])
async def test_late_rows_are_counted_exactly(kafka: Cluster, topic: MakeTopic, tmp_path: Path, mode: str) -> None:
    """Each row is in a window or in the topic of late rows, with key and headers, over several micro-batches."""
    source, out, late = topic(1), topic(), topic()
    spec = {
        "name": f"late-{mode}",
        "trigger": {"interval_seconds": 0.1, "max_records": 100},
        "sources": {"passages": {"topic": source, "schema": "id INT, at TIMESTAMP"}},
        "flows": {
            "minutes": {
                "sql": "SELECT window(at, '1 minute').start AS minute, count(*) AS n FROM passages "
                "GROUP BY window(at, '1 minute')",
                "sink": {"topic": out, "mode": mode, "key": "minute"},
                "late_rows": {"source": "passages", "column": "at", "delay_seconds": 60, "topic": late},
            }
        },
    }

    def row(number: int, minute: int) -> bytes:
        return json.dumps({"id": number, "at": f"2026-01-01T{minute // 60:02}:{minute % 60:02}:30Z"}).encode()

    minutes = [number // 20 if number % 20 else max(0, number // 20 - 30) for number in range(1000)]
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    produce(kafka.bootstrap_servers, source, [row(number, minute) for number, minute in enumerate(minutes)])
    async with running(spec, settings, tmp_path) as run:
        await until(lambda: run.counts("minutes")["read"] >= 1000, run)
        produce(kafka.bootstrap_servers, source, [row(1000, 600), row(1001, 600), b'{"id": 1002}'])  # ends all windows
        await until(lambda: run.counts("minutes")["read"] >= 1003, run)
        producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
        producer.produce(source, key=b"k1003", value=row(1003, 0), headers=[("trace", b"1")])
        assert producer.flush(60) == 0
        await until(lambda: run.status()["flows"]["minutes"]["lag_records"] == 0, run)
        await until(lambda: run.counts("minutes")["read"] >= 1004, run)
        await run.drain(Deadline(SystemClock(), 60))
        counted = run.status()["flows"]["minutes"]["late_records"]
    records = await records_of(settings, late)
    late_rows = [json.loads(record.value or b"") for record in records]
    assert [record.key for record in records] == [f"k{row['id']}".encode() for row in late_rows]
    assert dict(records[-1].headers).items() >= {"trace": b"1", "headrace.dlq.error": b"LateRow"}.items()
    assert len(late_rows) == counted > 0
    assert len({row["id"] for row in late_rows}) == counted
    written = [json.loads(record.value or b"") for record in await records_of(settings, out)]
    windows = {row["minute"]: row["n"] for row in written}
    in_time = sum(count for minute, count in windows.items() if minute and "T10:00" not in minute)
    assert in_time + counted == 1001


async def test_real_time_mode_writes_each_record_at_once(kafka: Cluster, topic: MakeTopic, tmp_path: Path) -> None:
    """Kafka to Kafka by SQL with a table, a rule and both quarantines. A stop ends the batch at the next record."""
    source, out = topic(1), topic()
    (tmp_path / "gates.csv").write_text("1,north\n2,south\n3,east\n")
    spec = {
        "name": "quick",
        "folder": str(tmp_path),
        "trigger": {"realtime": True},
        "sources": {
            "passages": {"topic": source, "schema": "id INT", "corrupt": "quarantine"},
            "gates": {"table": "gates.csv", "schema": "id INT, gate STRING"},
        },
        "flows": {
            "f": {
                "sql": "SELECT passages.id + 1 AS id, gate FROM passages LEFT JOIN gates ON passages.id = gates.id",
                "sink": {"topic": out},
                "rules": {"known": {"check": "gate IS NOT NULL", "otherwise": "quarantine"}},
            }
        },
    }
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    expected = {
        out: {b'{"id":2,"gate":"north"}', b'{"id":3,"gate":"south"}'},
        f"{out}.dlq": {b'{"id":10,"gate":null}'},
        f"{source}.dlq": {b"{bad"},
    }
    async with running(spec, settings, tmp_path) as run:
        produce(kafka.bootstrap_servers, source, [b'{"id": 1}', b"{bad", b'{"id": 2}', b'{"id": 9}'])
        await until(lambda: run.status()["state"] == "running", run)
        while {name: {each.value for each in await records_of(settings, name)} for name in expected} != expected:
            pass
        stopped = asyncio.create_task(run.drain(Deadline(SystemClock(), 30)))
        while not stopped.done():
            produce(kafka.bootstrap_servers, source, [b'{"id": 1}'])
            await asyncio.sleep(0.2)
        status = run.status()["flows"]["f"]
        assert (status["corrupt_records"], status["broken_rules"]) == (1, {"known": 1})
        assert run.counts("passages-corrupt")["read"] > 4


async def test_generated_rows_go_to_the_log_of_the_driver(kafka: Cluster, tmp_path: Path) -> None:
    """For tries: no topic is needed."""
    spec = {
        "name": "tryout",
        "sources": {"ticks": {"rate": 20}},
        "flows": {"f": {"sql": "SELECT value % 2 AS odd FROM ticks", "sink": {"console": True, "rows": 3}}},
    }
    async with running(spec, KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), tmp_path) as run:
        await until(lambda: run.status()["flows"]["f"]["input_records"] > 20, run)
    assert "only showing top 3 rows" in (tmp_path / "tryout" / "driver.err").read_text()
