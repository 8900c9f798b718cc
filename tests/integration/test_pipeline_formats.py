"""Registry formats in pipelines, on a real broker, registry and Spark."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from headrace.config.kafka import KafkaConfig
from headrace.formats.codec import header_of, unframe
from headrace.formats.codec_avro import AvroCodec
from headrace.formats.codec_protobuf import ProtobufCodec
from headrace.pipelines.load import load_pipeline
from tests.integration.test_pipeline_kinds import records_of
from tests.integration.test_pipelines import produce, read, running, until

pytestmark = pytest.mark.heavy

FIELDS: list[dict[str, Any]] = [
    {"name": "id", "type": "int"},
    {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}], "default": None},
    {"name": "day", "type": {"type": "int", "logicalType": "date"}},
    {"name": "fare", "type": {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}},
    {"name": "raw", "type": "bytes"},
    {"name": "speed", "type": "double"},
    {"name": "tags", "type": {"type": "map", "values": "long"}},
]
GATE = {"name": "gate", "type": ["null", "string"], "default": None}
CREW = {"name": "crew", "type": "int", "default": 2}
PROTO = """
syntax = "proto3";
import "google/protobuf/timestamp.proto";
message Trip { int64 id = 1; google.protobuf.Timestamp at = 2; bytes raw = 3; double fare_amount = 4; string gate = 5; }
"""
JSON = {
    "type": "object",
    "properties": {"id": {"type": "integer", "maximum": 5}, "gate": {"type": "string"}, "day": {"format": "date"}},
    "required": ["id"],
}
FILE = """\
name: formats
trigger: {{interval_seconds: 0.1}}
sources:
  flights: {{topic: {source}, value_format: avro, corrupt: quarantine, key_column: k}}
flows:
  avro:
    sql: SELECT * EXCEPT (k) FROM flights
    sink: {{topic: {avro}, key: id, value_format: avro, schema_file: out.avsc}}
  proto:
    sql: SELECT id, at, raw, CAST(fare AS DOUBLE) AS fare_amount, gate FROM flights
    sink: {{topic: {proto}, key: id, value_format: protobuf}}
  plain:
    sql: SELECT id, gate, day FROM flights
    sink: {{topic: {plain}, key: id, value_format: jsonschema}}
  text:
    sql: SELECT concat(k, ' ', id) AS line FROM flights
    sink: {{topic: {text}, value_format: string}}
  handled:
    handler: fares:handler
    reads: [flights]
    sink: {{topic: {handled}}}
"""


def schema(*more: dict[str, Any]) -> str:
    return json.dumps({"type": "record", "name": "Flight", "fields": [*FIELDS, *more]})


def row(number: int, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "at": datetime(2026, 1, 2, 3, 4, 5, 123456 + number, UTC) if number % 2 else None,
        "day": date(2026, 1, 1 + number),
        "fare": Decimal(f"{number}.10"),
        "raw": bytes([0, 255, number]),
        "speed": float("inf") if number == 3 else number / 2,
        "tags": {"n": 2**40 + number},
        **more,
    }


@pytest.fixture
def register(schema_registry: Any) -> Iterator[Callable[..., int]]:
    with SchemaRegistryClient({"url": schema_registry.url}) as client:

        def register(topic: str, text: str, kind: str = "AVRO") -> int:
            return int(client.register_schema(f"{topic}-value", Schema(text, kind)))

        yield register


async def test_values_of_many_schemas_are_rows_and_rows_are_values(
    kafka: Any, topic: Any, schema_registry: Any, register: Callable[..., int], tmp_path: Path
) -> None:
    """Two schemas in one micro-batch, a third while the pipeline runs; bad values go to the dead letter topic with the
    reason; times, decimals and bytes come back exactly; rows that do not fit a sink's schema become dead letters."""
    source, avro, proto, plain, text, handled = topic(2), topic(), topic(), topic(), topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    first = register(source, schema())
    second = register(source, schema(GATE))
    (tmp_path / "out.avsc").write_text(schema(GATE))
    (tmp_path / "fares.py").write_text("def handler(context, event):\n    return str(event.body['fare'])\n")
    register(proto, PROTO, "PROTOBUF")
    register(plain, json.dumps(JSON), "JSON")
    file = tmp_path / "formats.yaml"
    file.write_text(FILE.format(source=source, avro=avro, proto=proto, plain=plain, text=text, handled=handled))
    spec = load_pipeline(file, check=True)
    of_first, of_second = AvroCodec(schema()), AvroCodec(schema(GATE))
    values = [header_of(first) + of_first.encode_python(row(number)) for number in range(3)]
    values += [header_of(second) + of_second.encode_python(row(number, gate=f"g{number}")) for number in range(3, 6)]
    bad = [b"{}", header_of(first) + b"\xff", header_of(2_000_000) + b"x"]
    produce(kafka.bootstrap_servers, source, [*values, *bad, None])
    async with running(spec.model_dump(by_alias=True), settings, tmp_path / "state", schema_registry.url) as run:
        await until(lambda: all(read(run, flow) == 10 for flow in spec.flows), run)
        assert run.counts("avro") == {"read": 10, "corrupt": 3, "tombstone": 1}
        newest = register(source, schema(GATE, CREW))
        later = AvroCodec(schema(GATE, CREW)).encode_python(row(6, gate="g6", crew=3))
        produce(kafka.bootstrap_servers, source, [header_of(newest) + later])
        await until(lambda: all(read(run, flow) == 11 for flow in spec.flows), run)
        assert run.status()["restarts"] == 0
        await until(lambda: run.status()["flows"]["plain"]["broken_rules"] == {"failed": 1}, run)
        await until(lambda: run.status()["flows"]["handled"]["broken_rules"] == {"failed": 4}, run)
    await _check_rows(settings, avro, proto, plain)
    assert {each.value for each in await records_of(settings, text)} == {b"k%d %d" % (n, n) for n in range(6)} | {
        b"k0 6"
    }
    assert {each.value for each in await records_of(settings, handled)} == {b"%d.10" % n for n in range(7)}
    await _check_dead_letters(settings, source, plain, handled, bad)


async def _check_rows(settings: KafkaConfig, avro: str, proto: str, plain: str) -> None:
    of_second = AvroCodec(schema(GATE))
    written = {int(each.key or b""): each.value or b"" for each in await records_of(settings, avro)}
    expected = {n: row(n, gate=f"g{n}" if n > 2 else None) for n in range(7)}
    found = {n: of_second.decode_python(unframe(value)[1]) for n, value in written.items()}
    assert found == expected
    messages = {int(each.key or b""): each.value or b"" for each in await records_of(settings, proto)}
    trips = {n: json.loads(ProtobufCodec(PROTO, {}).decode(unframe(value)[1])) for n, value in messages.items()}
    assert trips[5] == {"id": "5", "at": "2026-01-02T03:04:05.123461Z", "raw": "AP8F", "fareAmount": 5.1, "gate": "g5"}
    objects = {
        int(each.key or b""): json.loads(unframe(each.value or b"")[1]) for each in await records_of(settings, plain)
    }
    assert objects == {
        n: {"id": n, "day": f"2026-01-0{n + 1}", **({"gate": f"g{n}"} if n > 2 else {})} for n in range(6)
    }


async def _check_dead_letters(settings: KafkaConfig, source: str, plain: str, handled: str, bad: list[bytes]) -> None:
    [misfit] = await records_of(settings, f"{plain}.dlq")
    assert json.loads(misfit.value or b"")["id"] == 6
    assert dict(misfit.headers)["headrace.dlq.error"] == b"EncodeError"
    assert b"maximum" in (dict(misfit.headers)["headrace.dlq.reason"] or b"")
    dead = {
        each.value: dict(each.headers)["headrace.dlq.error"] for each in await records_of(settings, f"{handled}.dlq")
    }
    assert dead == {**dict.fromkeys(bad, b"DecodeError"), None: b"TypeError"}
    corrupt = {each.value: dict(each.headers) for each in await records_of(settings, f"{source}.dlq")}
    assert corrupt.keys() == {*bad}
    reasons = {value: (headers["headrace.dlq.reason"] or b"").decode() for value, headers in corrupt.items()}
    assert "do not begin with a zero byte" in reasons[bad[0]]
    assert "do not fit their Avro schema" in reasons[bad[1]]
    assert "does not have schema id 2000000" in reasons[bad[2]]


@pytest.mark.long
async def test_a_format_that_cannot_be_read_is_named(
    kafka: Any, topic: Any, schema_registry: Any, tmp_path: Path
) -> None:
    """Without a schema in the registry, and without columns in the file, the pipeline does not start."""
    source = topic()
    spec = {
        "name": "nothing",
        "sources": {"flights": {"topic": source, "value_format": "avro"}},
        "flows": {"f": {"sql": "SELECT * FROM flights", "sink": {"topic": topic()}}},
    }
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    async with running(spec, settings, tmp_path, schema_registry.url) as run:
        await until(lambda: run.status()["state"] == "failed", run)
        assert "sources.flights: " in run.readiness().reason
        assert f"version latest of subject {source}-value" in run.readiness().reason
        assert "schema: name TYPE" in run.readiness().reason
