"""Registry formats as Spark's Python workers read and write them, and the columns of schemas. No Spark runs here."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from pydantic import SecretStr

from headrace.config.kafka import SchemaRegistryConfig
from headrace.delivery.dead_letter import origin_of
from headrace.errors import FunctionError, PipelineInvalid, RegistryUnavailable, SchemaInvalid
from headrace.formats.avro import AvroCodec
from headrace.formats.plain import header_of
from headrace.formats.protobuf import ProtobufCodec
from headrace.formats.sql_types import sql_columns
from headrace_devkit.devcluster.ports import free_ports
from headrace_pipelines.connector import ConnectorSecurity, with_registry, write_secrets
from headrace_pipelines.driver import value_codecs
from headrace_pipelines.spec import PipelineSpec
from tests.pipeline_harness import document, plan_of
from tests.unit.formats.conftest import SmallRegistry
from yaml_table import table

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
LINE = table(__file__, "line")
OTHER = {"type": "record", "name": "R", "fields": [{"name": "f", "type": "string"}]}


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, SmallRegistry]]:
    """The secrets file with which workers reach a registry, and the registry, which runs in their loop."""
    monkeypatch.setattr(SchemaRegistryConfig, "latest_seconds", 0.0)
    small, port = SmallRegistry(), free_ports(1)[0]
    settings = SchemaRegistryConfig(url=f"http://127.0.0.1:{port}", username="u", password=SecretStr("p ä\\$"))
    security = with_registry(NONE, settings)
    assert security.values == {"p ä\\$"}
    write_secrets(tmp_path, security.secrets)
    made = value_codecs.registry_of(tmp_path / "secrets.properties")
    app = web.Application()
    app.router.add_get("/{path:.*}", small.handle)
    server = TestServer(app, port=port)
    made.wait_for(server.start_server())
    yield tmp_path / "secrets.properties", small
    made.wait_for(server.close())
    close(made)


def close(made: value_codecs.BlockingRegistry) -> None:
    made.wait_for(made.client.close())
    made._loop.close()
    value_codecs.registry_of.cache_clear()


def framed(schema_id: int, row: Any = None, schema: Any = FLIGHT) -> bytes:
    return header_of(schema_id) + AvroCodec(json.dumps(schema)).encode_python(row or ROW)


def add(server: SmallRegistry, schema_id: int, schema: Any = FLIGHT, kind: str = "AVRO") -> None:
    """Register a schema as the newest of the topic `t`."""
    server.add("t-value", schema_id, schema if isinstance(schema, str) else json.dumps(schema), kind)


def columns(kind: str, schema: Any) -> str:
    references = {"line.json": json.dumps(LINE)} if kind == "JSON" else {}
    return sql_columns(kind, schema if kind == "PROTOBUF" else json.dumps(schema), references)


@pytest.mark.parametrize(("kind", "schema", "expected"), table(__file__, "fields_become_columns"))
def test_fields_become_columns(kind: str, schema: Any, expected: str) -> None:
    """Each type has its type of SQL; a named type can be used again, and references are followed."""
    assert columns(kind, schema) == expected


@pytest.mark.parametrize(("kind", "schema", "reason"), table(__file__, "what_has_no_column_is_named"))
def test_what_has_no_column_is_named(kind: str, schema: Any, reason: str) -> None:
    """The error has the path of the field."""
    with pytest.raises(SchemaInvalid, match=reason):
        columns(kind, schema)


def texts(secrets: Path, *values: bytes | None) -> list[tuple[Any, str | None]]:
    batch = pa.RecordBatch.from_pydict({"key": [b"k"] * len(values), "value": pa.array(values, pa.binary())})
    [made] = value_codecs._decode(secrets, [batch])
    assert made.schema.names == ["key", "value", "text", "problem"]
    assert made.column("value").to_pylist() == [*values]
    return [
        (text and json.loads(text), problem)
        for text, problem in zip(made.column("text").to_pylist(), made.column("problem").to_pylist(), strict=True)
    ]


def test_values_of_several_schemas_in_one_batch(registry: tuple[Path, SmallRegistry]) -> None:
    """Each value is read with the schema that it names; logical types become what SQL reads; bad ones have a reason."""
    secrets, server = registry
    add(server, 7)
    add(server, 8, OTHER)
    add(server, 9, TRIP, "PROTOBUF")
    add(server, 10, LINE, "JSON")
    add(server, 11, "{")
    row = table(__file__, "protobuf_row")
    trip = {name: row[name] for name in ("id", "big", "stops", "legs", "at", "seats", "arr_time")}
    payload = ProtobufCodec(TRIP, {}).encode(json.dumps(trip).encode())
    good = {
        framed(7): table(__file__, "avro_row"),
        framed(8, {"f": "x"}, OTHER): {"f": "x"},
        None: None,
        header_of(9) + payload: row,
        header_of(10) + b'{"n": 1}': {"n": 1},
    }
    bad = {
        b"plain": "do not begin with a zero byte",
        header_of(7) + b"\xff": "do not fit their Avro schema",
        framed(99): "does not have schema id 99",
        header_of(10) + b"{": "not readable as JSON",
        framed(11): "not a valid Avro schema",
        b"": "do not begin",
    }
    found = texts(secrets, *good, *bad)
    assert found[: len(good)] == [(row, None) for row in good.values()]
    for (text, problem), words in zip(found[len(good) :], bad.values(), strict=True):
        assert text is None
        assert words in (problem or "")


def test_a_registry_that_does_not_respond_stops_the_batch(tmp_path: Path) -> None:
    """The value may be good, so the micro-batch fails and is done again."""
    write_secrets(tmp_path, with_registry(NONE, SchemaRegistryConfig(url="http://127.0.0.1:1")).secrets)
    with pytest.raises(RegistryUnavailable):
        texts(tmp_path / "secrets.properties", framed(7))
    close(value_codecs.registry_of(tmp_path / "secrets.properties"))


def test_columns_of_a_topic_are_those_of_the_newest_schema(registry: tuple[Path, SmallRegistry]) -> None:
    """The subject has the topic's name; a schema of another format, or none, is an error."""
    secrets, server = registry
    with pytest.raises(PipelineInvalid, match="does not have version latest of subject t-value"):
        value_codecs.columns_of("avro", "t", secrets)
    add(server, 1)
    add(server, 2, OTHER)
    assert value_codecs.columns_of("avro", "t", secrets) == "`f`: STRING"
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
def test_a_row_that_does_not_fit_is_a_dead_letter(
    registry: tuple[Path, SmallRegistry], wrong: Any, reason: str
) -> None:
    """It has the row as JSON, and the reason names the field and not the value. A row in quarantine is kept."""
    secrets, server = registry
    add(server, 7)
    kept, row = encode(sink(secrets, 7), None, {**ROW, **wrong}, kind=FLIGHT_ROW)
    assert (kept["topic"], kept["value"], kept["failed"]) == ("out", b"as json", False)
    assert (row["topic"], row["key"], row["value"], row["failed"]) == ("out.dlq", b"k", b"as json", True)
    headers = {header["key"]: header["value"] for header in row["headers"]}
    assert reason in headers["headrace.dlq.reason"].decode()
    assert headers["headrace.dlq.error"] == b"EncodeError"
    assert origin_of([*headers.items()]) is None
    with pytest.raises(FunctionError, match="a row failed with EncodeError"):
        encode(sink(secrets, 7, "fail"), {**ROW, **wrong}, kind=FLIGHT_ROW)


@pytest.mark.parametrize(("settings", "reason"), table(__file__, "the_schema_of_a_sink_must_be_there"))
def test_the_schema_of_a_sink_must_be_there_and_of_its_format(
    registry: tuple[Path, SmallRegistry], tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    """The newest of the subject, or the one of an id; a file that does not exist is named."""
    _, server = registry
    add(server, 3)
    add(server, 4, OTHER)
    spec = PipelineSpec.model_validate(document(settings, folder=str(tmp_path)))
    with pytest.raises(PipelineInvalid, match=reason):
        value_codecs.encoded(None, plan_of(spec, folder=tmp_path), "f")


@pytest.mark.parametrize("hours", [1_000_000_000, -1_000_000_000])
def test_a_time_that_python_does_not_know_is_a_dead_letter(registry: tuple[Path, SmallRegistry], hours: int) -> None:
    """Spark and Arrow know years far beyond 9999; other rows of the batch are written."""
    secrets, server = registry
    add(server, 31, {"type": "record", "name": "R", "fields": [FLIGHT["fields"][1]]})
    kind = pa.struct([("at", pa.timestamp("us", "UTC"))])
    first, bad, last = encode(sink(secrets, 31), {"at": 1}, {"at": hours * 3_600_000_000}, {"at": 2}, kind=kind)
    assert [row["topic"] for row in (first, bad, last)] == ["out", "out.dlq", "out"]
    assert bad["failed"]
