"""Tables of real topics: formats, what happens to a topic, limits, changed definitions, and restarts."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import confluent_kafka.admin
import pytest

from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster, MakeTopic, Registry, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.table_process import TableProcess

COLUMNS = "item STRING, n BIGINT"
SCHEMAS = {
    "avro": '{"type":"record","name":"Stock","fields":[{"name":"item","type":"string"},{"name":"n","type":"long"}]}',
    "jsonschema": '{"type":"object","properties":{"item":{"type":"string"},"n":{"type":"integer"}}}',
    "protobuf": 'syntax = "proto3"; message Stock { string item = 1; int64 n = 2; }',
}


def value(item: str, n: int) -> bytes:
    return json.dumps({"item": item, "n": n}).encode()


def record(topic: str, key: bytes | None, item: str | None, n: int = 0, **more: Any) -> OutgoingRecord:
    return OutgoingRecord(topic, key, None if item is None else value(item, n), **more)


def test_formats_of_keys_and_values(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, schema_registry: Registry
) -> None:
    """Columns of the registry or of the file; keys as text, bytes and JSON; headers; corrupt records are counted.

    A table may have any name, also one that the engine uses itself.
    """
    by_format = {kind: topic() for kind in SCHEMAS}
    plain = topic()
    headers = [("source", b"a"), ("empty", None)]
    site.write(
        plain,
        record(plain, b'{"id":1}', "a", 1, headers=headers, timestamp_ms=1000),
        OutgoingRecord(plain, b'{"id":2}', b"not JSON"),
        OutgoingRecord(plain, b"\xff", value("c", 3)),
        record(plain, b'{"id":4}', "d", 4),
        record(plain, b'{"id":4}', None),
    )
    tables = {kind: {"topic": name, "value_format": kind} for kind, name in by_format.items()}
    tables |= {
        "raw": {"topic": plain, "schema": COLUMNS},
        "memory": {"topic": plain, "schema": COLUMNS, "key_format": "binary"},
        "rows": {"topic": plain, "schema": COLUMNS, "key_format": "json", "kind": "log"},
        "select": {"topic": plain, "kind": "log"},
    }
    tables |= dict.fromkeys(("raw_file", "arrived", "key"), tables["raw"])
    config = {**site.config, "schema_registry": {"url": schema_registry.url}, "tables": tables}
    made = TableProcess(headrace(config, wait=False))  # it is not ready before there are schemas
    site.wait_until(lambda: made.send("GET", "/live").status == 200, "the server")
    for kind, name in by_format.items():
        records = [{"key": f"k{n}", "value": {"item": f"i{n}", "n": n}} for n in range(2)]
        body = {"keyFormat": "string", "valueFormat": kind, "valueSchema": SCHEMAS[kind], "records": records}
        written = made.send("POST", f"/producers/{name}", json.dumps(body).encode())
        assert written.status == 200, written
        made.wait_for(f"SELECT key, item, n FROM {kind} ORDER BY n", [["k0", "i0", 0], ["k1", "i1", 1]])
    cells = 'item, n, partition, "offset", epoch_ms(timestamp), headers[1].key, headers[2].value'
    made.wait_for(f"SELECT {cells} FROM raw", [["a", 1, 0, 0, 1000, "source", None]])
    made.wait_for("SELECT n FROM memory ORDER BY n", [[1], [3]])
    made.wait_for("SELECT key->>'id', n FROM rows ORDER BY \"offset\"", [["1", 1], ["4", 4], ["4", None]])
    last = 'SELECT value->>\'item\', value IS NULL FROM "select" ORDER BY "offset" DESC LIMIT 2'
    made.wait_for(last, [[None, True], ["d", False]])
    assert made.table("raw")["corrupt"] == 2
    assert made.table("raw")["last_corrupt"].startswith("partition 0, offset 2: not UTF-8 text")
    assert made.send("GET", "/tables/avro/rows/k9").status == 404
    assert made.send("GET", "/tables/select/rows/k1").status == 400
    for key, rows in (("k1", [[1]]), ("k9", []), ("k1", [[1]])):  # it is found as by GET after the first time
        assert made.ask("SELECT n FROM avro WHERE key = ?", params=[key]).rows == rows
    made.wait_for('SELECT n FROM arrived JOIN raw_file USING (n) JOIN "key" USING (n) JOIN raw USING (n)', [[1]])
    assert made.send("GET", "/tables/key/rows/%7B%22id%22:1%7D").body["n"] == 1


@contextlib.contextmanager
def standing_still(process: int) -> Iterator[None]:
    """Stop a process meanwhile, as a debugger does."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_what_happens_to_a_topic(site: Scenario, kafka: Cluster, topic: MakeTopic, headrace: StartHeadrace) -> None:
    """Records that were removed unread, added partitions and a topic that is created again: said, never silent."""
    name = topic()
    site.write(name, *(record(name, b"k%d" % n, f"i{n}", n) for n in range(10)))
    process = headrace({**site.config, "tables": {"moves": {"topic": name, "kind": "log", "schema": COLUMNS}}})
    made = TableProcess(process)
    made.wait_for("SELECT count(*) FROM moves", [[10]])
    client = confluent_kafka.admin.AdminClient({"bootstrap.servers": kafka.bootstrap_servers})

    def remove_unread(first: int) -> None:
        """Write ten records, and remove five of them."""
        site.write(name, *(record(name, b"k%d" % n, f"i{n}", n) for n in range(first, first + 10)))
        site.remove_before(name, first + 5)

    def wait_for_gap(rows: int, gap: str, offsets: int) -> None:
        made.wait_for('SELECT count(*), min("offset"), max("offset") FROM moves', [[rows, 0, rows + offsets - 1]])
        site.wait_until(lambda: made.table("moves").get("gap") == gap, "the gap in the state")
        assert f"of {name}-0 were removed unread" in process.output
        metric = f'headrace_dropped_records_total{{consumer="moves",kind="table",reason="gap"}} {offsets}.0'
        site.wait_until(lambda: metric in site.ask(f"{process.url}/metrics").body, metric)

    assert process.terminate() == 0
    remove_unread(10)
    process.start()
    wait_for_gap(15, "partition 0, offsets 10 to 14", 5)
    with standing_still(made.engine), standing_still(made.statements_engine):
        remove_unread(20)
    wait_for_gap(20, "partition 0, offsets 20 to 24", 10)
    for done in client.create_partitions([confluent_kafka.admin.NewPartitions(name, 2)]).values():
        done.result(60)
    site.write(name, record(name, b"k", "added", 1, partition=1))
    made.wait_for("SELECT item FROM moves WHERE partition = 1", [["added"]])
    site.delete_topic(name)
    made.wait_state("moves", "failing")
    site.wait_until(lambda: "does not exist" in made.table("moves").get("reason", ""), "the reason")
    made.wait_for("SELECT count(*) FROM moves", [[21]])
    kafka.create_topic(name)
    site.write(name, *(record(name, b"k", "anew", n) for n in range(50)))  # more than the table has read
    made.wait_for("SELECT DISTINCT item FROM moves", [["anew"]])
    site.wait_until(lambda: made.table("moves").get("gap") == "", "a state of the new topic")
    assert process.output.count("deleted and created again") == 1
    with standing_still(made.engine), standing_still(made.statements_engine):
        site.delete_topic(name)
        kafka.create_topic(name)
        site.write(name, *(record(name, b"k", "third", n) for n in range(70)))
    made.wait_for('SELECT item, count(*), count(DISTINCT "offset") FROM moves GROUP BY 1', [["third", 70, 70]])
    site.wait_until(lambda: process.output.count("deleted and created again") == 2, "the line of the engine's log")


def test_limits_and_retention(site: Scenario, topic: MakeTopic, headrace: StartHeadrace) -> None:
    """A table at its limit stops and names the remedies; old rows are deleted; a rebuild reads the topic anew."""
    name, large = topic(), topic()
    now = int(time.time() * 1000)
    old = [record(name, b"old%d" % n, "old", n, timestamp_ms=now - 3_600_000) for n in range(5)]
    site.write(name, *old, *(record(name, b"k%d" % n, "new", n, timestamp_ms=now) for n in range(5)))
    site.write(large, *(record(large, b"k%d" % n, os.urandom(150_000).hex(), n) for n in range(16)))
    tables = {
        "small": {"topic": large, "schema": COLUMNS, "max_bytes": 1 << 20},
        "recent": {"topic": name, "schema": COLUMNS, "retention_seconds": 600, "kind": "log"},
    }
    made = TableProcess(headrace({**site.config, "tables": tables}, wait=False))  # a full table is not ready
    reason = made.wait_state("small", "full")["reason"]
    assert reason.startswith("it has reached max_bytes and stopped: raise it, set retention_seconds")
    assert site.reasons(made.process.url)["table small"] == f"full: {reason}"
    made.wait_for("SELECT count(*), min(item) FROM recent", [[5, "new"]])
    for _ in range(3):
        assert made.send("POST", "/tables/recent/rebuild").status in (200, 204)
    made.wait_for('SELECT count(*), count(DISTINCT "offset"), min(item) FROM recent', [[5, 5, "new"]])
    made.wait_state("recent", "live")


@pytest.mark.long
def test_restarts_and_changed_definitions(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path
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
