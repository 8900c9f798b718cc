"""Headrace and its engine are killed while tables catch up: each table equals the fold of its topic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.testing.scenario import Scenario
from tests.table_process import TableProcess

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]

RECORDS, PARTITIONS, KEYS, KILLS = 100_000, 3, 5_000, 10
COUNTED = 'SELECT count(*), count(DISTINCT (partition, "offset")), sum(n)::BIGINT FROM moves'


def fill(servers: str, topic: str) -> tuple[int, dict[str, int]]:
    """Write records, of which every seventh is a tombstone; return the sum of `n` and the newest `n` by key."""
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "queue.buffering.max.messages": 2 * RECORDS})
    total, newest = 0, dict[str, int]()
    for n in range(RECORDS):
        key = f"k{n * 7919 % KEYS}"
        partition = n * 7919 % KEYS % PARTITIONS
        if n % 7:
            producer.produce(topic, json.dumps({"n": n}).encode(), key.encode(), partition)
            total += n
            newest[key] = n
        else:
            producer.produce(topic, None, key.encode(), partition)
            newest.pop(key, None)
    assert producer.flush(120) == 0
    return total, newest


def test_kills_while_tables_catch_up(kafka: Any, headrace: Any, tmp_path: Path) -> None:
    """Of Headrace and of its engine alone, ten times each at any moment; a log has each offset once."""
    scenario = Scenario(kafka.bootstrap_servers, tmp_path)
    kafka.create_topic("killed", PARTITIONS)
    total, newest = fill(kafka.bootstrap_servers, "killed")
    columns = {"topic": "killed", "schema": "n BIGINT"}
    tables = {"moves": {**columns, "kind": "log"}, "stock": columns}
    process = headrace({**scenario.config, "tables": tables})
    made = TableProcess(process)
    seen: list[int] = []
    for kill in range(2 * KILLS):
        least = RECORDS * kill // (2 * KILLS + 2)
        scenario.wait_until(lambda: _rows(made) > min(least, RECORDS - 1) - 1, f"{least} rows")  # noqa: B023 at once
        seen.append(_rows(made))
        if kill % 2:
            made.kill_engine()
        else:
            process.kill()
            process.start()
    made.wait_for(COUNTED, [[RECORDS, RECORDS, total]])
    assert sum(count < RECORDS for count in seen) >= KILLS / 2, f"it was killed too late: {seen}"
    rows = made.ask("SELECT key, n FROM stock", limit=KEYS + 1).rows
    assert dict(rows) == newest
    assert len(rows) == len(newest)
    for name in tables:
        state = made.wait_state(name, "live")
        assert (state["corrupt"], state["gap"], state["lag"]) == (0, "", 0)


def _rows(made: TableProcess) -> int:
    """Return how many rows the log has; -1 while it cannot be asked."""
    found = made.ask("SELECT count(*) FROM moves")
    return int(found.rows[0][0]) if found.status == 200 else -1


def test_paused_brokers(kafka_three: Any, headrace: Any, tmp_path: Path) -> None:
    """The rows can be asked meanwhile, the state says why they are not newer, and nothing is lost or there twice."""
    scenario = Scenario(kafka_three.bootstrap_servers, tmp_path)
    kafka_three.create_topic("paused", PARTITIONS)
    total, newest = fill(kafka_three.bootstrap_servers, "paused")
    columns = {"topic": "paused", "schema": "n BIGINT"}
    tables = {"moves": {**columns, "kind": "log"}, "stock": columns}
    kafka = {**scenario.config["kafka"], "request_timeout_seconds": 5}
    made = TableProcess(headrace({"kafka": kafka, "tables": tables}))
    scenario.wait_until(lambda: _rows(made) > 0, "the first rows")
    for number in (1, 2, 3):
        kafka_three.pause(number)
    state = made.wait_state("moves", "failing")
    assert state["reason"]
    assert _rows(made) > 0
    for number in (1, 2, 3):
        kafka_three.resume(number)
    made.wait_for(COUNTED, [[RECORDS, RECORDS, total]])
    assert dict(made.ask("SELECT key, n FROM stock", limit=KEYS + 1).rows) == newest
