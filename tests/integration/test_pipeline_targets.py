"""Pipelines whose rows leave Kafka: into a table of a real PostgreSQL, and to an HTTP backend."""

from __future__ import annotations

import datetime as dt
import json
import time
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
import yaml

from tests.postgres_server import PASSWORD, postgres_server

pytestmark = pytest.mark.heavy

LIMIT_SECONDS = 240.0


def test_rows_reach_a_table_and_a_backend(kafka: Any, topic: Any, headrace: Any, backend: Any, tmp_path: Path) -> None:
    """Every type arrives as it is; the newest row per key is in the table, each record is pushed once, and the
    password is neither in the status nor in a file of the run."""
    source, out = topic(2), f"{topic()}-out"
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in range(100):
        value = {
            "id": number,
            "gate": f"G{number % 4}",
            "at": "2026-01-01T10:00:00Z",
            "tags": ["a", None],
            "raw": "AAE=",
        }
        producer.produce(source, json.dumps(value).encode(), str(number))
    assert producer.flush(60) == 0
    secret = tmp_path / "password"
    secret.write_text(PASSWORD)
    secret.chmod(0o600)
    with postgres_server() as server:
        server.execute(
            "CREATE TABLE gates (gate text PRIMARY KEY, n int, newest timestamptz, tags jsonb, raw bytea, share float8)"
        )
        table = server.sink("gates", "gate", password=f"${{file:{secret}}}")
        sql = (
            "SELECT gate, count(*) AS n, max(at) AS newest, max(tags) AS tags, max(raw) AS raw, "
            "count(*) / 100D AS share FROM a GROUP BY gate"
        )
        push = {"topic": out, "key": "id", "delivery": "exactly_once", "backend": {"url": backend.url}}
        schema = "id INT, gate STRING, at TIMESTAMP, tags ARRAY<STRING>, raw BINARY"
        spec = {
            "name": "targets",
            "trigger": {"interval_seconds": 0.2, "max_records": 30},
            "sources": {"a": {"topic": source, "schema": schema}},
            "flows": {
                "gates": {"sql": sql, "sink": table},
                "ids": {"sql": "SELECT id FROM a", "sink": {**push, "push": {"batch": {"max_records": 20}}}},
            },
        }
        file = tmp_path / "targets.yaml"
        file.write_text(yaml.safe_dump(spec))
        state = tmp_path / "state"
        process = headrace(
            {
                "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
                "pipelines": [str(file)],
                "state_dir": str(state),
            },
            wait=False,
        )
        process.wait_ready(LIMIT_SECONDS)
        backend.wait_for(lambda b: len(b.accepted) >= 100, LIMIT_SECONDS)
        assert sorted(record["value"]["id"] for record in backend.accepted) == list(range(100))
        end = time.monotonic() + LIMIT_SECONDS
        while server.execute("SELECT sum(n) FROM gates") != [(100,)]:
            assert time.monotonic() < end, process.output[-3000:]
            time.sleep(0.1)
        newest = dt.datetime(2026, 1, 1, 10, tzinfo=dt.UTC)
        assert server.execute("SELECT * FROM gates ORDER BY gate") == [
            (f"G{number}", 25, newest, ["a", None], b"\0\1", 0.25) for number in range(4)
        ]
        ((query, batch),) = server.execute("SELECT query, next_batch FROM _headrace_batches")
        assert query.startswith("headrace.targets.gates.")
        assert batch >= 4
    seen = process.output + "".join(f.read_text("latin-1") for f in state.rglob("*") if f.is_file())
    assert PASSWORD not in seen
