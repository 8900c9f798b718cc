"""The kinds of sources, views, rules and sinks of a pipeline, on a real broker and a real Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig
from headrace.kafka import Admin, read_records
from headrace.lifecycle import Deadline, SystemClock
from headrace.pipelines.load import load_pipeline
from headrace.records import Record
from tests.integration.test_pipelines import produce, running, until

pytestmark = pytest.mark.heavy

FUNCTIONS = """\
from pyspark.sql import functions as f

def priced(passages, gates):
    return passages.join(gates, "gate", "left").withColumn("cents", f.col("cents") * f.coalesce("factor", f.lit(1)))
"""
FILE = """\
name: tolls
trigger: {{once: true}}
sources:
  passages: {{topic: {source}, schema: "id INT, gate STRING, cents INT", corrupt: quarantine}}
  gates: {{table: gates.csv, schema: "gate STRING, factor INT", options: {{header: true}}}}
views:
  priced: {{python: "prices:priced", reads: [passages, gates]}}
flows:
  out:
    sql_file: out.sql
    sink: {{topic: {out}, key: id, mode: append}}
    rules:
      positive: {{check: cents >= 0, otherwise: quarantine}}
      small: {{check: cents < 400, otherwise: drop}}
      even: {{check: cents % 2 = 0}}
  files:
    sql: SELECT id, cents, id % 2 AS odd FROM priced
    sink: {{files: rows, format: json, partition_by: [odd]}}
"""

BEHIND = [
    b'{"id": 1}{"id": 2}',
    b'{"id": 1}\n{"id": 2}',
    b'{"id": 1} x',
    b'{"id": 1}]',
    b'{"id": 1},{"id": 2}',
    b"{}{}",
]
"""Objects with something behind them, which Spark ignores."""
WHOLE = [
    b'{"id": 1}\n',
    b' {"id": 2} ',
    b'{"id": 3, "x": {"y": [{}, "}"]}}',
    b'{"id": 4, "gate": "}"}',
    b"{ }\n",
    b"{}",
]


async def records_of(kafka: KafkaConfig, topic: str) -> list[Record]:
    offsets = await Admin(kafka).topic_offsets(topic)
    starts = {where: start for where, (start, _) in offsets.items()}
    ends = {where: end for where, (_, end) in offsets.items()}
    return [record async for batch in read_records(kafka, starts, ends) for record in batch]


def passage(number: int) -> bytes:
    return json.dumps({"id": number, "gate": f"g{number % 3}", "cents": number % 50 - 5}).encode()


async def test_every_record_is_a_row_or_a_dead_letter_with_its_reason(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """A Python view joins a static table; rules count, drop and quarantine; corrupt records stay byte for byte; files
    have what the topic has."""
    source, out = topic(2), topic()
    (tmp_path / "prices.py").write_text(FUNCTIONS)
    (tmp_path / "gates.csv").write_text("gate,factor\ng1,10\n")
    (tmp_path / "out.sql").write_text("SELECT id, cents FROM priced -- the file's own text\n")
    file = tmp_path / "tolls.yaml"
    file.write_text(FILE.format(source=source, out=out))
    spec = load_pipeline(file, check=True)
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    bad = [b"{bad", b'{"id": "many"}', *BEHIND]
    produce(kafka.bootstrap_servers, source, [*(passage(number) for number in range(300)), *bad, None])
    async with running(spec.model_dump(by_alias=True), settings, tmp_path / "state") as run:
        await until(lambda: run.status()["state"] == "finished", run)
        flows = run.status()["flows"]
    priced = {n: (n % 50 - 5) * (10 if n % 3 == 1 else 1) for n in range(300)}
    broken = {n for n, cents in priced.items() if cents < 0}
    large = {n for n, cents in priced.items() if cents >= 400}
    assert flows["out"]["broken_rules"] == {
        "positive": len(broken),
        "small": len(large),
        "even": sum(cents % 2 != 0 for cents in priced.values()),
    }
    written = {int(record.key or b""): json.loads(record.value or b"") for record in await records_of(settings, out)}
    assert {n: row["cents"] for n, row in written.items()} == {
        n: cents for n, cents in priced.items() if n not in broken | large
    }
    await _check_dead_letters(settings, source, out, broken, bad)
    lines = [line for part in (tmp_path / "rows").rglob("*.json") for line in part.read_text().splitlines()]
    assert {row["id"]: row["cents"] for row in map(json.loads, lines)} == priced
    assert {folder.name for folder in (tmp_path / "rows").glob("odd=*")} == {"odd=0", "odd=1"}


async def _check_dead_letters(settings: KafkaConfig, source: str, out: str, broken: set[int], bad: list[bytes]) -> None:
    quarantined = await records_of(settings, f"{out}.dlq")
    assert {json.loads(record.value or b"")["id"] for record in quarantined} == broken
    headers = dict(quarantined[0].headers)
    assert headers["headrace.dlq.error"] == b"RuleBroken"
    assert headers["headrace.dlq.reason"] == b"the row breaks rule positive"
    corrupt = await records_of(settings, f"{source}.dlq")
    assert sorted(record.value or b"" for record in corrupt) == sorted(bad)
    assert all(dict(record.headers)["headrace.dlq.topic"] == source.encode() for record in corrupt)
    reasons = {record.value: dict(record.headers)["headrace.dlq.reason"].decode() for record in corrupt}
    head = "the value does not match the schema of passages: "
    assert reasons == {
        b"{bad": "the value is not a JSON object",
        b'{"id": "many"}': f'{head}id: "many" is not INT',
        **dict.fromkeys(BEHIND, f"{head}text follows the JSON object"),
    }


@pytest.mark.long
async def test_an_object_is_the_whole_record(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """What is behind it makes the record corrupt; blanks do not, and nested and empty objects are rows."""
    source, out = topic(), topic()
    spec = {
        "name": "whole",
        "trigger": {"once": True},
        "sources": {"passages": {"topic": source, "schema": "id INT"}},
        "flows": {"f": {"sql": "SELECT * FROM passages", "sink": {"topic": out}}},
    }
    produce(kafka.bootstrap_servers, source, [*WHOLE, *BEHIND])
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    async with running(spec, settings, tmp_path) as run:
        await until(lambda: run.status()["state"] == "finished", run)
        assert run.counts("f")["corrupt"] == len(BEHIND)
    found = [json.loads(record.value or b"")["id"] for record in await records_of(settings, out)]
    assert found == [1, 2, 3, 4, None, None]


@pytest.mark.long
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"corrupt": "fail"}, ":0:3: the value is not a JSON object"),
        ({"corrupt": "fail", "bad": b'{"id": "secret"}'}, "the schema of passages: id is not INT"),
        ({"rules": {"small": {"check": "id < 2", "otherwise": "fail"}}}, "a row breaks rule small"),
    ],
)
async def test_what_shall_fail_fails_for_good(
    kafka: Any, topic: Any, tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    """The bad record is not written, and the run is not tried again."""
    source, out = topic(), topic()
    spec = {
        "name": "strict",
        "trigger": {"once": True},
        "sources": {"passages": {"topic": source, "schema": "id INT", "corrupt": changes.get("corrupt", "drop")}},
        "flows": {"f": {"sql": "SELECT * FROM passages", "sink": {"topic": out}, "rules": changes.get("rules", {})}},
    }
    produce(kafka.bootstrap_servers, source, [b'{"id": 1}', b'{"id": 2}', b'{"id": 3}', changes.get("bad", b"{bad")])
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    async with running(spec, settings, tmp_path) as run:
        await until(lambda: run.status()["state"] == "failed", run)
        assert reason in run.readiness().reason
    assert all((record.value or b"") < b'{"id":4}' for record in await records_of(settings, out))


@pytest.mark.long
@pytest.mark.parametrize("mode", ["append", "update"])
async def test_late_rows_are_counted_exactly(kafka: Any, topic: Any, tmp_path: Path, mode: str) -> None:
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


@pytest.mark.long
async def test_real_time_mode_writes_each_record_at_once(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """Kafka to Kafka by SQL with a table, a rule and its quarantine, and corrupt records in quarantine."""
    source, out = topic(1), topic()
    (tmp_path / "gates.csv").write_text("1,north\n2,south\n3,east\n")
    spec = {
        "name": "quick",
        "folder": str(tmp_path),
        "trigger": {"realtime": True, "checkpoint_seconds": 5},
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
    async with running(spec, settings, tmp_path) as run:
        produce(kafka.bootstrap_servers, source, [b'{"id": 1}', b"{bad", b'{"id": 2}', b'{"id": 9}'])
        await until(lambda: run.status()["flows"]["f"]["corrupt_records"] == 1, run)
        await until(lambda: run.counts("passages-corrupt")["read"] == 4, run)
        assert run.status()["flows"]["f"]["broken_rules"] == {"known": 1}

    async def values(topic: str) -> set[bytes | None]:
        return {record.value for record in await records_of(settings, topic)}

    assert await values(out) == {b'{"id":2,"gate":"north"}', b'{"id":3,"gate":"south"}'}
    assert await values(f"{out}.dlq") == {b'{"id":10,"gate":null}'}
    assert await values(f"{source}.dlq") == {b"{bad"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"sources": {"a": {"rate": 5}}}, "INPUT_STREAM"), ({"sql": "SELECT id, count(*) AS n FROM a GROUP BY id"}, "")],
)
async def test_what_real_time_mode_does_not_have_is_not_tried_again(
    kafka: Any, topic: Any, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    """A run that was not validated ends, with the remedy."""
    source = topic(1)
    produce(kafka.bootstrap_servers, source, [b'{"id": 1}'])
    spec = {
        "name": "quick",
        "trigger": {"realtime": True, "checkpoint_seconds": 5},
        "sources": settings.get("sources", {"a": {"topic": source, "schema": "id INT"}}),
        "flows": {"f": {"sql": settings.get("sql", "SELECT * FROM a"), "sink": {"topic": topic()}}},
        "driver": {"shuffle_partitions": 1},
    }
    async with running(spec, KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), tmp_path) as run:
        await until(lambda: run.status()["state"] == "failed", run)
        assert f"STREAMING_REAL_TIME_MODE.{reason}" in run.readiness().reason
        assert "use trigger.interval_seconds" in run.readiness().reason


@pytest.mark.long
async def test_made_rows_go_to_the_log_of_the_driver(kafka: Any, tmp_path: Path) -> None:
    """For trials: no topic is needed."""
    spec = {
        "name": "trial",
        "sources": {"ticks": {"rate": 20}},
        "flows": {"f": {"sql": "SELECT value % 2 AS odd FROM ticks", "sink": {"console": True, "rows": 3}}},
    }
    async with running(spec, KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), tmp_path) as run:
        await until(lambda: run.status()["flows"]["f"]["input_records"] > 20, run)
    assert "only showing top 3 rows" in (tmp_path / "trial" / "driver.err").read_text()
