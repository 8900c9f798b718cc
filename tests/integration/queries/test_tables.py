"""Tables of real topics: restarts, changed definitions, and names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord
from headrace.testing.scenario import Scenario
from tests.table_process import TableProcess

COLUMNS = "item STRING, n BIGINT"


def value(item: str, n: int) -> bytes:
    return json.dumps({"item": item, "n": n}).encode()


def record(topic: str, key: bytes | None, item: str | None, n: int = 0, **more: Any) -> OutgoingRecord:
    return OutgoingRecord(topic, key, None if item is None else value(item, n), **more)


def test_restarts_and_changed_definitions(
    site: Scenario, topic: Callable[..., str], headrace: Any, tmp_path: Path
) -> None:
    """The rows are there again, also while Kafka is away; a changed definition is refused with the ways out."""
    name = topic(3, cleanup_policy="compact")
    site.write(name, *(record(name, b"k%d" % (n % 50), f"i{n}", n) for n in range(200)), record(name, b"k0", None))
    table = {"topic": name, "schema": COLUMNS}
    base = {**site.config, "state_dir": str(tmp_path / "state")}
    process = headrace({**base, "tables": {"stock": table}})
    made = TableProcess(process)
    made.wait_for("SELECT count(*), min(n), max(n) FROM stock", [[49, 151, 199]])
    process.terminate()
    away = {**base, "kafka": {**site.config["kafka"], "bootstrap_servers": "127.0.0.1:9"}}
    made = TableProcess(headrace({**away, "tables": {"stock": table}}, wait=False))
    made.wait_for("SELECT count(*), min(n), max(n) FROM stock", [[49, 151, 199]])
    assert made.table("stock")["state"] in ("starting", "failing")
    assert made.send("GET", "/tables/stock/rows/k1").body["n"] == 151
    made.process.terminate()
    made = TableProcess(headrace({**base, "tables": {"stock": {**table, "kind": "log"}}}, wait=False))
    reason = made.wait_state("stock", "refused")["reason"]
    assert reason == (
        "kind was latest, and is log now: revert that, or build the table from its topic again "
        "(headrace tables rebuild stock)"
    )
    assert made.ask("SELECT * FROM stock").status == 503
    assert made.send("POST", "/tables/stock/rebuild").status in (200, 204)
    made.wait_for("SELECT max(n) FROM stock", [[199]])
    made.wait_state("stock", "live")


@pytest.mark.parametrize("name", ["arrived", "raw", "rows", "memory", "moves_file", "select", "key"])
def test_a_table_may_have_any_name(site: Scenario, topic: Callable[..., str], headrace: Any, name: str) -> None:
    """Also one that the engine uses itself."""
    made_topic = topic()
    site.write(made_topic, record(made_topic, b"k", "a", 1))
    tables = {table: {"topic": made_topic, "schema": COLUMNS} for table in (name, "moves")}
    made = TableProcess(headrace({**site.config, "tables": tables}))
    made.wait_for(f'SELECT item, n FROM "{name}" JOIN moves USING (item, n)', [["a", 1]])
    assert made.send("GET", f"/tables/{name}/rows/k").body["n"] == 1
    site.write(made_topic, record(made_topic, b"k", "b", 2))
    made.wait_for(f'SELECT item FROM "{name}"', [["b"]])
