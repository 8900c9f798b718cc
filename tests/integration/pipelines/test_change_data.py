"""Change events of Debezium on a real broker, registry, PostgreSQL and Spark, while the driver is killed.

One pipeline reads a hostile topic, an Avro topic, and a random history of a table; each test looks at what it has left.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import uuid
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from headrace.config.kafka import KafkaConfig
from headrace.formats.avro import AvroCodec
from headrace.formats.plain import header_of, unframe
from headrace.records import Record
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.testing import Cluster, Registry
from tests.integration.pipelines.test_pipelines import QUICK, produce, records_of, running, until
from tests.postgres_server import PostgresServer, postgres_server
from yaml_table import table

pytestmark = [pytest.mark.heavy, pytest.mark.long, pytest.mark.timeout(1200)]

KILLS = 2
LIMIT_SECONDS = 450.0
DEEP = b"[" * 100 + b"]" * 100
ODD = [b'{"op":"c","after":{"id":1,"deep":' + DEEP + b"}}"]
"""An event with a row and a deep value."""
CHANGES = {"sequence_by": "__position.lsn", "apply_as_deletes": "__deleted"}
ROW = [
    {"name": "id", "type": "long"},
    {"name": "price", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}},
    {"name": "at", "type": {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}},
]
ENVELOPE = {
    "type": "record",
    "name": "Envelope",
    "fields": [
        {"name": "before", "type": ["null", {"type": "record", "name": "Value", "fields": ROW}], "default": None},
        {"name": "after", "type": ["null", "Value"], "default": None},
        {"name": "op", "type": "string"},
        {"name": "source", "type": {"type": "record", "name": "Source", "fields": [{"name": "lsn", "type": "long"}]}},
    ],
}
NAMED = {
    "type": "record",
    "name": "Named",
    "fields": [{"name": n, "type": t} for n, t in (("id", "long"), ("n", "string"))],
}


class Left(NamedTuple):
    """What the pipeline has left."""

    servers: str
    topics: dict[str, str]
    postgres: PostgresServer
    model: dict[int, str]
    """Id to the name that it has in the end."""
    status: dict[str, dict[str, Any]]

    def newest(self, name: str) -> dict[bytes | None, Record]:
        """Return the newest record of each key of a topic."""
        first = name.partition(".")[0]
        topic = self.topics[first] + name.removeprefix(first)
        found = asyncio.run(records_of(KafkaConfig(bootstrap_servers=self.servers), topic))
        return {record.key: record for record in found}


class History:
    """Changes of a table with a few rows, as a database would have made them."""

    def __init__(self, servers: str, topic: str, late: str) -> None:
        self._producer = confluent_kafka.Producer({"bootstrap.servers": servers})
        self._topic, self._late = topic, late
        self._chance = random.Random(seed := random.randrange(1 << 30))
        print("seed", seed)
        self.model: dict[int, str] = {}
        self._sent: list[tuple[int, bytes | None]] = []
        self._lsn = 1000

    def send(self, count: int) -> None:
        """Send changes; some come again, as after a restart of Debezium. Old ones also come by another topic."""
        for _ in range(count):
            self._lsn += self._chance.randrange(1, 9)
            self._change(self._chance.randrange(20))
        for id_, value in self._sent[-self._chance.randrange(1, 20) :]:
            self._producer.produce(self._topic, key=str(id_), value=value)
        for id_, value in self._chance.sample(self._sent, 10):
            self._producer.produce(self._late, key=f"other {id_}", value=value)
        assert self._producer.flush(60) == 0

    def _change(self, id_: int) -> None:
        old = self.model.pop(id_, None)
        before = {"id": id_, "name": None} if old else None
        op = "c" if old is None else self._chance.choice("ud")
        after = None if op == "d" else {"id": id_, "name": f"n{self._lsn}"}
        if after:
            self.model[id_] = str(after["name"])
        event = {"before": before, "after": after, "op": op, "source": {"lsn": self._lsn}}
        values: list[bytes | None] = [json.dumps(event).encode(), *([None] if op == "d" else [])]
        for value in values:
            self._sent.append((id_, value))
            self._producer.produce(self._topic, key=str(id_), value=value)


def typed(event: Any, types: dict[str, str] | None) -> bytes:
    """Return an event as a value; with types below the schema that names them."""
    text = event if isinstance(event, str) else json.dumps(event)
    if types is None:
        return text.encode()
    parameters = {"scale": types.get("scale")}
    fields = [{"field": name, "name": kind, "parameters": parameters} for name, kind in types.items()]
    rows = [{"field": field, "type": "struct", "fields": fields} for field in ("before", "after")]
    return f'{{"schema": {json.dumps({"fields": rows})}, "payload": {text}}}'.encode()


def hostile() -> list[bytes | None]:
    """Return the values of the hostile topic; the id of a row is its place."""
    types = table(__file__, "types")
    parts = [part for name in ("events_with_a_row", "events_without_a_row") for part in table(__file__, name)]
    return [*(typed(event, types.get(kind)) for event, kind, _ in parts), *ODD, None]


def pipeline(topics: dict[str, str], postgres: PostgresServer, schema: Path) -> dict[str, Any]:
    """Return the pipeline, whose sinks get the same history in every way that there is."""
    people = {"change": "debezium", "schema": "id BIGINT, name STRING"}
    named = "SELECT id, name, __position, __deleted FROM customers"
    sink = {"key": "id", "mode": "append", **CHANGES}
    exact = {**sink, "delivery": "exactly_once"}
    avro = {"value_format": "avro", "schema_file": str(schema)}
    sinks = {"plain": sink, "exact": exact, "tasks": {**exact, "scope": "task"}, "avro": {**exact, **avro}}
    flows = {name: {"sql": named, "sink": {"topic": topics[name], **each}} for name, each in sinks.items()}
    flows["avro"]["sql"] = named.replace("name,", "coalesce(name, '') AS n,")
    flows["table"] = {
        "sql": f"{named} UNION ALL SELECT id, name, __position, __deleted FROM late",
        "sink": {**postgres.sink("people", "id"), "mode": "append", **CHANGES},
    }
    flows["rows"] = {
        "sql": "SELECT n, to_json(struct(*)) AS row FROM hostile",
        "sink": {"topic": topics["rows"], "key": "n", "mode": "append"},
    }
    flows["orders"] = {
        "sql": "SELECT id, price, timestamp_micros(at) AS at, __op FROM orders",
        "sink": {"topic": topics["prices"], "key": "id", "mode": "append"},
    }
    more = {"change": "debezium", "corrupt": "quarantine", "key_column": "n"}
    return {
        "name": "changes",
        "trigger": {"interval_seconds": 0.5, "max_records": 100},
        "driver": {**QUICK, "shuffle_partitions": 2, "cores": 2},
        "sources": {
            "customers": {"topic": topics["customers"], **people, "corrupt": "fail"},
            "late": {"topic": topics["late"], **people},
            "hostile": {"topic": topics["hostile"], "schema": table(__file__, "columns"), **more},
            "orders": {
                "topic": topics["orders"],
                "change": "debezium",
                "value_format": "avro",
                "schema": "id BIGINT, price DECIMAL(9,2), at BIGINT",
            },
        },
        "flows": flows,
    }


async def run_with_kills(spec: dict[str, Any], kafka: Cluster, registry: str, folder: Path, history: History) -> Any:
    """Send the history in parts, and kill the driver in some of them. Returns the flows' status."""
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    history.send(300)
    async with running(spec, settings, folder, registry) as run:
        for _ in range(KILLS):
            before = run.status()["flows"]["table"]["input_records"]
            await until(
                lambda before=before: run.status()["flows"]["table"]["input_records"] > before, run, LIMIT_SECONDS
            )
            await asyncio.sleep(random.uniform(0, 2))
            pid = run.status()["driver_pid"]
            history.send(150)
            os.kill(pid, signal.SIGKILL)
            await until(lambda pid=pid: run.status()["driver_pid"] not in (None, pid), run)
        await until(lambda: run.readiness().ready, run, LIMIT_SECONDS)
        await until(lambda: all(f["lag_records"] == 0 for f in run.status()["flows"].values()), run, LIMIT_SECONDS)
        await run.drain(Deadline(SystemClock(), 100))
        status: Any = run.status()
        return status["flows"]


@pytest.fixture(scope="module")
def left(kafka: Cluster, schema_registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Left]:
    folder, servers = tmp_path_factory.mktemp("c"), kafka.bootstrap_servers
    names = ("customers", "late", "hostile", "orders", "plain", "exact", "tasks", "avro", "rows", "prices")
    topics = {name: f"{folder.name}-{uuid.uuid4().hex[:6]}-{name}" for name in names}
    for topic in topics.values():
        kafka.create_topic(topic, 2)
    produce(servers, topics["hostile"], hostile())
    codec = AvroCodec(json.dumps(ENVELOPE))
    with SchemaRegistryClient({"url": schema_registry.url}) as client:
        header = header_of(client.register_schema(f"{topics['orders']}-value", Schema(json.dumps(ENVELOPE), "AVRO")))
    row = {"id": 5, "price": Decimal("-12.34"), "at": 1_700_000_000_123_456}
    sides = [(None, row, "c"), ({**row, "id": 6}, None, "d"), (None, row, "t")]
    events = [{"before": old, "after": new, "op": op, "source": {"lsn": 1}} for old, new, op in sides]
    produce(servers, topics["orders"], [*(header + codec.encode_python(event) for event in events), b"x", None])
    (folder / "named.avsc").write_text(json.dumps(NAMED))
    history = History(servers, topics["customers"], topics["late"])
    with postgres_server() as postgres:
        postgres.execute("CREATE TABLE people (id bigint PRIMARY KEY, name text)")
        spec = pipeline(topics, postgres, folder / "named.avsc")
        status = asyncio.run(run_with_kills(spec, kafka, schema_registry.url, folder / "state", history))
        yield Left(servers, topics, postgres, history.model, status)


def test_a_table_is_that_of_the_database(left: Left) -> None:
    """Also with old changes that come late, by another topic, and after a delete; no row is twice."""
    assert dict(left.postgres.execute("SELECT id, name FROM people")) == left.model
    assert left.status["table"]["tombstone_records"] > 0


@pytest.mark.parametrize("how", ["plain", "exact", "tasks", "avro"])
def test_the_newest_records_are_those_of_the_database(left: Left, how: str) -> None:
    """The last record of a key that was deleted is a tombstone, in every format; metadata is not written."""
    values = {int(key or b""): record.value for key, record in left.newest(how).items()}
    decode: Any = AvroCodec(json.dumps(NAMED)).decode_python
    found = {
        id_: decode(unframe(value)[1]) if how == "avro" else json.loads(value) for id_, value in values.items() if value
    }
    column = "n" if how == "avro" else "name"
    assert found == {id_: {"id": id_, column: name} for id_, name in left.model.items()}
    assert {*values} > {*found}
    assert not any(record.headers for record in left.newest(how).values())


def test_events_are_rows_with_the_types_that_the_schema_declares(left: Left) -> None:
    """With and without a schema in the message; half characters and deep objects do no harm."""
    found = {key: json.loads(json.loads(record.value or b"")["row"]) for key, record in left.newest("rows").items()}
    events = table(__file__, "events_with_a_row")
    for number, (event, _, row) in enumerate(events):
        actual = found[b"k%d" % number]
        assert {name: actual.get(name) for name in row} == row, event
        assert {*actual} - {*row} <= {"n", "__op", "__deleted", "__position"}, event
    assert len(found) == len(events) + len(ODD)


def test_events_without_a_row_are_dead_letters_with_a_reason(left: Left) -> None:
    """The record is unchanged; its reason has none of its values."""
    dead = {record.key: record for record in left.newest("hostile.dlq").values()}
    events, first = table(__file__, "events_without_a_row"), len(table(__file__, "events_with_a_row"))
    assert len(dead) == len(events) == left.status["rows"]["corrupt_records"]
    for number, (text, types, reason) in enumerate(events, first):
        record = dead[b"k%d" % number]
        assert reason in (dict(record.headers)["headrace.dlq.reason"] or b"").decode(), text
        assert record.value == typed(text, table(__file__, "types").get(types))
    assert left.status["rows"]["tombstone_records"] == 1


def test_avro_is_read_by_the_registry(left: Left) -> None:
    """Decimals of its logical type; a truncate and bytes that are not Avro are corrupt."""
    found = {key: json.loads(record.value or b"") for key, record in left.newest("prices").items()}
    row = {"price": -12.34, "at": "2023-11-14T22:13:20.123Z"}
    assert found == {b"5": {"id": 5, **row, "__op": "c"}, b"6": {"id": 6, **row, "__op": "d"}}
    counts = left.status["orders"]
    assert (counts["corrupt_records"], counts["tombstone_records"]) == (2, 1)
