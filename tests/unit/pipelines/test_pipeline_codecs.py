"""Registry formats as Spark's Python workers read and write them, and the columns of schemas. No Spark runs here."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import SecretStr
from yaml_table import table

from headrace.config.kafka import SchemaRegistryConfig
from headrace.delivery.dead_letter import origin_of
from headrace.errors import FunctionError, PipelineInvalid, RegistryUnavailable, SchemaInvalid
from headrace.formats.avro import AvroCodec
from headrace.formats.plain import header_of
from headrace.formats.protobuf import ProtobufCodec
from headrace.formats.sql_types import sql_columns
from headrace.pipelines.connector import ConnectorSecurity, with_registry, write_secrets
from headrace.pipelines.driver import value_codecs
from headrace.pipelines.spec import PipelineSpec
from tests.pipeline_harness import document, plan_of

NONE = ConnectorSecurity({}, {}, frozenset())
FLIGHT = table(__file__, "flight")
ROW: dict[str, Any] = {
    "id": 1,
    "at": datetime(2026, 1, 2, 3, 4, 5, 123456, UTC),
    "local": datetime(2026, 1, 2, 3, 4, 5),
    "day": date(2026, 1, 2),
    "fare": Decimal("12.34"),
    "raw": b"\x00\xff",
    "speed": float("nan"),
    "tags": {"a": 2**40},
    "kind": "JET",
    "legs": [{"to": "ORD"}],
    "first": {"to": "EWR"},
}
TRIP = table(__file__, "trip")
ORDER = table(__file__, "order")
LINE = {
    "type": "object",
    "properties": {"sku": {"$ref": "#/definitions/sku"}},
    "definitions": {"sku": {"type": "string"}},
}


class FakeRegistry(BaseHTTPRequestHandler):
    """Answers for the schemas that a test has put into `schemas`, and keeps what it was asked."""

    schemas: dict[int, dict[str, Any]]
    asked: list[tuple[str, str]]

    def do_GET(self) -> None:
        self.asked.append((self.path, self.headers.get("Authorization", "")))
        kind, _, name = self.path.removeprefix("/").partition("/")
        number = int(name.rpartition("/")[2]) if kind == "schemas" else max(self.schemas, default=0)
        found = self.schemas.get(number)
        body = {"id": number, **found} if found else {"error_code": 40403, "message": "no"}
        self.send_response(200 if found else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: Any) -> None:
        """Write nothing."""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, type[FakeRegistry]]]:
    """A registry, and the secrets file with which workers reach it."""
    monkeypatch.setattr(SchemaRegistryConfig, "latest_seconds", 0.0)
    handler = type("Handler", (FakeRegistry,), {"schemas": {}, "asked": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    url = f"http://127.0.0.1:{server.server_address[1]}"
    settings = SchemaRegistryConfig(url=url, username="u", password=SecretStr("p ä\\$"))
    security = with_registry(NONE, settings)
    assert security.values == {"p ä\\$"}
    write_secrets(tmp_path, security.secrets)
    yield tmp_path / "secrets.properties", handler
    close(value_codecs.registry_of(tmp_path / "secrets.properties"))
    server.shutdown()
    thread.join()
    server.server_close()


def close(made: value_codecs.BlockingRegistry) -> None:
    made.wait_for(made.client.close())
    made._loop.close()
    value_codecs.registry_of.cache_clear()


def avro(schema: dict[str, Any] = FLIGHT) -> dict[str, Any]:
    return {"schema": json.dumps(schema)}


def framed(schema_id: int, row: Any = None, schema: dict[str, Any] = FLIGHT) -> bytes:
    return header_of(schema_id) + AvroCodec(json.dumps(schema)).encode_python(row or ROW)


def test_columns_of_avro() -> None:
    """Each type of Avro has its type of SQL; a named type can be used again."""
    assert sql_columns("AVRO", json.dumps(FLIGHT), {}) == (
        "`id`: INT, `at`: TIMESTAMP, `local`: TIMESTAMP_NTZ, `day`: DATE, `fare`: DECIMAL(10,2), `raw`: BINARY, "
        "`speed`: DOUBLE, `tags`: MAP<STRING, BIGINT>, `kind`: STRING, `legs`: ARRAY<STRUCT<`to`: STRING>>, "
        "`first`: STRUCT<`to`: STRING>"
    )


def test_columns_of_protobuf() -> None:
    """Fields have their own names, and 64-bit integers are integers."""
    assert sql_columns("PROTOBUF", TRIP, {}) == (
        "`id`: BIGINT, `big`: DECIMAL(20,0), `raw`: BINARY, `stops`: ARRAY<BIGINT>, "
        "`legs`: MAP<STRING, STRUCT<`miles`: BIGINT>>, `at`: TIMESTAMP, `seats`: BIGINT, `kind`: STRING, "
        "`arr_time`: STRING"
    )


def test_columns_of_json_schema() -> None:
    """References are followed, into other documents too, and formats decide between text, time and bytes."""
    assert sql_columns("JSON", json.dumps(ORDER), {"line.json": json.dumps(LINE)}) == (
        "`n`: BIGINT, `at`: TIMESTAMP, `note`: STRING, `by`: MAP<STRING, DOUBLE>, "
        "`lines`: ARRAY<STRUCT<`sku`: STRING>>, `state`: STRING, `raw`: BINARY"
    )


def record(kind: Any) -> dict[str, Any]:
    return {"type": "record", "name": "R", "fields": [{"name": "f", "type": kind}]}


@pytest.mark.parametrize(
    ("kind", "schema", "reason"),
    [
        ("AVRO", "string", r"\$ of the schema is a type without fields"),
        ("AVRO", record(["string", "int"]), r"\$.f of the schema is a union of several types"),
        ("AVRO", record(["null", "R"]), r"\$.f of the schema is R alone or within itself"),
        ("AVRO", record(["null"]), r"\$.f of the schema is a union"),
        ("JSON", {"type": "array"}, r"\$\[\] of the schema is of type anything"),
        ("JSON", {"type": "object", "properties": {"a": True}}, r"\$.a of the schema is of type anything"),
        ("JSON", {"type": "object", "properties": {"a": {"$ref": "#"}}}, "anything"),
        ("JSON", {"type": "object", "properties": {"a": {"type": ["string", "number"]}}}, "string or number"),
        ("PROTOBUF", 'syntax="proto3"; message A { A a = 1; }', r"\$.a of the schema is a message within itself"),
        (
            "PROTOBUF",
            'syntax="proto3"; import "google/protobuf/any.proto"; message A { google.protobuf.Any a = 1; }',
            "of type Any",
        ),
    ],
)
def test_what_has_no_column_is_named(kind: str, schema: Any, reason: str) -> None:
    """The error has the path of the field."""
    with pytest.raises(SchemaInvalid, match=reason):
        sql_columns(kind, schema if kind == "PROTOBUF" else json.dumps(schema), {})


def texts(secrets: Path, *values: bytes | None) -> list[tuple[Any, str | None]]:
    batch = pa.RecordBatch.from_pydict({"key": [b"k"] * len(values), "value": pa.array(values, pa.binary())})
    [made] = value_codecs._decode(secrets, [batch])
    assert made.schema.names == ["key", "value", "text", "problem"]
    assert made.column("value").to_pylist() == [*values]
    return [
        (text and json.loads(text), problem)
        for text, problem in zip(made.column("text").to_pylist(), made.column("problem").to_pylist(), strict=True)
    ]


AVRO_ROW = {
    "id": 1,
    "at": "2026-01-02T03:04:05.123456Z",
    "local": "2026-01-02T03:04:05",
    "day": "2026-01-02",
    "fare": "12.34",
    "raw": "AP8=",
    "speed": "NaN",
    "tags": {"a": 2**40},
    "kind": "JET",
    "legs": [{"to": "ORD"}],
    "first": {"to": "EWR"},
}
PROTOBUF_ROW = {
    "id": 2**60 + 1,
    "big": 5,
    "raw": "",
    "stops": [1],
    "legs": {"3": {"miles": 4}},
    "at": "2026-01-02T03:04:05.123456Z",
    "seats": 6,
    "kind": "JET",
    "arr_time": "x",
}


def test_values_of_several_schemas_in_one_batch(registry: Any) -> None:
    """Each value is read with the schema that it names; logical types become what SQL reads; bad ones have a reason."""
    secrets, server = registry
    other = record("string")
    server.schemas |= {7: avro(), 8: avro(other), 9: {"schema": TRIP, "schemaType": "PROTOBUF"}}
    server.schemas[10] = {"schema": json.dumps(LINE), "schemaType": "JSON"}
    server.schemas[11] = {"schema": "{"}
    trip = {"id": str(2**60 + 1), "big": 5, "stops": [1], "legs": {"3": {"miles": "4"}}, "seats": "6", "arr_time": "x"}
    payload = ProtobufCodec(TRIP, {}).encode(json.dumps({**trip, "at": "2026-01-02T03:04:05.123456Z"}).encode())
    found = texts(
        secrets,
        framed(7),
        framed(8, {"f": "x"}, other),
        None,
        b"plain",
        header_of(7) + b"\xff",
        framed(99),
        header_of(9) + payload,
        header_of(10) + b'{"n": 1}',
        header_of(10) + b"{",
        framed(11),
        b"",
    )
    assert found[0][0] == AVRO_ROW
    assert found[1:3] == [({"f": "x"}, None), (None, None)]
    assert found[6][0] == PROTOBUF_ROW
    assert found[7] == ({"n": 1}, None)
    reasons = [problem or "" for _, problem in found]
    assert "do not begin with a zero byte" in reasons[3]
    assert "do not fit their Avro schema" in reasons[4]
    assert "does not have schema id 99" in reasons[5]
    assert "not JSON" in reasons[8]
    assert "not a valid Avro schema" in reasons[9]
    assert "do not begin" in reasons[10]


def test_a_schema_that_is_registered_later_is_found(registry: Any) -> None:
    """No restart is needed; the login of the settings is sent."""
    secrets, server = registry
    assert texts(secrets, framed(7))[0][0] is None
    server.schemas[7] = avro()
    assert texts(secrets, framed(7))[0][0]["id"] == 1
    assert {login for _, login in server.asked} == {"Basic dTpwIMOkXCQ="}


def test_a_registry_that_does_not_respond_stops_the_batch(tmp_path: Path) -> None:
    """The value may be good, so the micro-batch fails and is done again."""
    write_secrets(tmp_path, with_registry(NONE, SchemaRegistryConfig(url="http://127.0.0.1:1")).secrets)
    with pytest.raises(RegistryUnavailable):
        texts(tmp_path / "secrets.properties", framed(7))
    close(value_codecs.registry_of(tmp_path / "secrets.properties"))


def test_columns_of_a_topic_are_those_of_the_newest_schema(registry: Any) -> None:
    """The subject has the topic's name; a schema of another format, or none, is an error."""
    secrets, server = registry
    with pytest.raises(PipelineInvalid, match="does not have version latest of subject t-value"):
        value_codecs.columns_of("avro", "t", secrets)
    server.schemas |= {1: avro(), 2: avro(record("int"))}
    assert value_codecs.columns_of("avro", "t", secrets) == "`f`: INT"
    assert server.asked[-1][0] == "/subjects/t-value/versions/latest"
    with pytest.raises(PipelineInvalid, match="schema 2 is of type AVRO, and value_format is protobuf"):
        value_codecs.columns_of("protobuf", "t", secrets)


Encode = functools.partial[Iterator[pa.RecordBatch]]


def encode(made: Encode, *rows: Any, kind: pa.DataType | None = None) -> list[dict[str, Any]]:
    count = len(rows)
    batch = pa.RecordBatch.from_pydict(
        {
            "topic": ["out"] * count,
            "key": pa.array([b"k"] * count, pa.binary()),
            "value": pa.array([b"as json"] * count, pa.binary()),
            "headers": pa.array([None] * count, value_codecs.HEADERS),
            "row": pa.array(rows, kind),
        }
    )
    [found] = made([batch])
    return list(found.to_pylist())


def sink(secrets: Path, schema_id: int, on_error: Any = "dead_letter") -> Encode:
    return functools.partial(
        value_codecs.encode, schema_id, value_codecs.FailurePolicy("headrace.p.f", "out.dlq", on_error), secrets
    )


FLIGHT_ROW = pa.struct(
    [
        ("id", pa.int64()),
        ("at", pa.timestamp("us", "UTC")),
        ("local", pa.timestamp("us")),
        ("day", pa.date32()),
        ("fare", pa.decimal128(10, 2)),
        ("raw", pa.binary()),
        ("speed", pa.float64()),
        ("tags", pa.map_(pa.string(), pa.int64())),
        ("kind", pa.string()),
        ("legs", pa.list_(pa.struct([("to", pa.string())]))),
        ("first", pa.struct([("to", pa.string())])),
    ]
)


@pytest.mark.parametrize(("wrong", "reason"), table(__file__, "a_row_that_does_not_fit_is_a_dead_letter"))
def test_a_row_that_does_not_fit_is_a_dead_letter(registry: Any, wrong: Any, reason: str) -> None:
    """It has the row as JSON, and the reason names the field and not the value."""
    secrets, server = registry
    server.schemas[7] = avro()
    [row] = encode(sink(secrets, 7), {**ROW, **wrong}, kind=FLIGHT_ROW)
    assert (row["topic"], row["key"], row["value"], row["failed"]) == ("out.dlq", b"k", b"as json", True)
    headers = {header["key"]: header["value"] for header in row["headers"]}
    assert reason in headers["headrace.dlq.reason"].decode()
    assert headers["headrace.dlq.error"] == b"EncodeError"
    assert origin_of([*headers.items()]) is None
    with pytest.raises(FunctionError, match="a row failed with EncodeError"):
        encode(sink(secrets, 7, "fail"), {**ROW, **wrong}, kind=FLIGHT_ROW)


def test_rows_become_protobuf_and_json_schema(registry: Any) -> None:
    """They take JSON text; one that does not fit is a dead letter. A row in quarantine keeps its value."""
    secrets, server = registry
    server.schemas |= {9: {"schema": TRIP, "schemaType": "PROTOBUF"}}
    text = '{"id": 5, "at": "2026-01-02T03:04:05.123456Z", "raw": "AP8=", "arr_time": "x"}'
    good, kept, bad = encode(sink(secrets, 9), text, None, '{"nothing": 1}')
    assert (kept["topic"], kept["value"], kept["failed"]) == ("out", b"as json", False)
    assert json.loads(ProtobufCodec(TRIP, {}).decode(good["value"].removeprefix(header_of(9))))["arrTime"] == "x"
    assert bad["topic"] == "out.dlq"
    plain = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    server.schemas[12] = {"schema": json.dumps(plain), "schemaType": "JSON"}
    good, bad = encode(sink(secrets, 12), '{"n": 1}', "{}")
    assert good["value"] == header_of(12) + b'{"n": 1}'
    assert bad["topic"] == "out.dlq"


@pytest.mark.parametrize(("settings", "reason"), table(__file__, "the_schema_of_a_sink_must_be_there"))
def test_the_schema_of_a_sink_must_be_there_and_of_its_format(
    registry: Any, tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    """The newest of the subject, or the one of an id; a file that does not exist is named."""
    _, server = registry
    server.schemas |= {3: avro(), 4: avro(record("int"))}
    spec = PipelineSpec.model_validate(document(settings, folder=str(tmp_path)))
    with pytest.raises(PipelineInvalid, match=reason):
        value_codecs.encoded(None, plan_of(spec, folder=tmp_path), "f")


@pytest.mark.parametrize("hours", [1_000_000_000, -1_000_000_000])
def test_a_time_that_python_does_not_know_is_a_dead_letter(registry: Any, hours: int) -> None:
    """Spark and Arrow know years far beyond 9999; other rows of the batch are written."""
    secrets, fake = registry
    fake.schemas[31] = avro(
        {"type": "record", "name": "R", "fields": [{"name": "at", "type": FLIGHT["fields"][1]["type"]}]}
    )
    kind = pa.struct([("at", pa.timestamp("us", "UTC"))])
    first, bad, last = encode(sink(secrets, 31), {"at": 1}, {"at": hours * 3_600_000_000}, {"at": 2}, kind=kind)
    assert [row["topic"] for row in (first, bad, last)] == ["out", "out.dlq", "out"]
    assert bad["failed"]
