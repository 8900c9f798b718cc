"""Headrace and its engine are killed while tables catch up: each table equals the fold of its topic."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.testing import HeadraceProcess
from headrace.testing.scenario import Scenario
from tests.active_client import send

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

RECORDS, PARTITIONS, KEYS, KILLS = 60_000, 3, 5_000, 10
COUNTED = (
    'SELECT count(*) AS rows, count(DISTINCT (partition, "offset")) AS offsets, sum(n)::BIGINT AS total FROM moves'
)


def fill(servers: str, topic: str, first: int) -> None:
    """Write a part of the records, of which every seventh is a tombstone."""
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "queue.buffering.max.messages": 2 * RECORDS})
    for n in range(first, first + RECORDS // KILLS):
        value = json.dumps({"n": n}).encode() if n % 7 else None
        producer.produce(topic, value, f"k{n % KEYS}".encode(), n % KEYS % PARTITIONS)
    assert producer.flush(120) == 0


def kill_engine(process: HeadraceProcess) -> None:
    parent = process.server.id.pid
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        if b"headrace.queries.engine" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(int(child), signal.SIGKILL)


def ask(process: HeadraceProcess, sql: str) -> Any:
    """Return the rows of a statement; none while it is not answered."""
    try:
        response = send("POST", f"{process.url}/query", {"sql": sql})
    except OSError:
        return []
    return response.body["rows"] if response.status == 200 else []


def test_kills_while_tables_catch_up(kafka: Any, headrace: Any, tmp_path: Path) -> None:
    """Of Headrace and of its engine in turns, each while records arrive; a log has each offset once."""
    scenario = Scenario(kafka.bootstrap_servers, tmp_path)
    topic = f"killed-{os.urandom(4).hex()}"
    kafka.create_topic(topic, PARTITIONS)
    columns = {"topic": topic, "schema": "n BIGINT"}
    process = headrace({**scenario.config, "tables": {"moves": {**columns, "kind": "log"}, "stock": columns}})
    for kill in range(KILLS):
        fill(kafka.bootstrap_servers, topic, kill * RECORDS // KILLS)
        if kill % 2:
            kill_engine(process)
        else:
            process.kill()
            process.start()
    sound = [n for n in range(RECORDS) if n % 7]
    complete = [{"rows": RECORDS, "offsets": RECORDS, "total": sum(sound)}]
    scenario.wait_until(lambda: ask(process, COUNTED) == complete, f"{complete} and not {ask(process, COUNTED)}")
    newest = {f"k{n % KEYS}": n if n % 7 else None for n in range(RECORDS)}
    expected = {key: n for key, n in newest.items() if n is not None}

    def stock() -> dict[str, int]:
        return {row["key"]: row["n"] for row in ask(process, "SELECT key, n FROM stock")}

    scenario.wait_until(lambda: stock() == expected, "the newest value of each key")
