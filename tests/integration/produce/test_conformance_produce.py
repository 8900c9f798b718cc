"""Produce as the seed document and sidecar.md 5 say it: formats x schema inputs, headers, partial failure."""

import http.client
import json
import urllib.request
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, TopicPartition

from headrace_devkit.testing import Cluster, MakeTopic, Registry, SharedHeadrace

pytestmark = pytest.mark.secured

QUICK = {"fetch.wait.max.ms": 10}
FIELDS = [{"name": "name", "type": "string"}, {"name": "n", "type": "long"}]
AVRO = json.dumps({"type": "record", "name": "Thing", "fields": FIELDS})
JSON_SCHEMA = json.dumps({"type": "object", "required": ["name"], "properties": {"n": {"type": "integer"}}})
PROTO = 'syntax = "proto3"; message Thing { string name = 1; int64 n = 2; }'
THING = {"name": "é", "n": 2**53 + 1}
THING_JSON = json.dumps(THING).encode()


class Format(NamedTuple):
    """A format: its code in the seed document, a value, the bytes it must become, and its schema."""

    code: int
    value: Any
    stored: bytes
    schema: str = ""
    registry_type: str = ""


FORMATS = {
    "binary": Format(0, "AAH/", b"\x00\x01\xff"),
    "string": Format(5, "é", "é".encode()),
    "json": Format(2, THING, THING_JSON),
    "avro": Format(1, THING, b"\x04\xc3\xa9\x82\x80\x80\x80\x80\x80\x80\x20", AVRO, "AVRO"),
    "jsonschema": Format(3, THING, THING_JSON, JSON_SCHEMA, "JSON"),
    "protobuf": Format(4, THING, b"\x00\x0a\x02\xc3\xa9\x10\x81\x80\x80\x80\x80\x80\x80\x10", PROTO, "PROTOBUF"),
}
"""The bytes are written by hand from the specifications of the encodings."""


class Produce:
    """A client of Headrace that keeps its connection, the schema registry, and a reader of what is written."""

    def __init__(self, url: str, kafka: Any, registry_url: str) -> None:
        self._registry = registry_url
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
        self._consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "test-reader", **QUICK})

    def post(self, topic: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Send a request, and check that its response is one of ours."""
        self._connection.request(
            "POST", f"/producers/{topic}", json.dumps(body), {"Content-Type": "application/json", **headers}
        )
        response = self._connection.getresponse()
        assert response.getheader("Content-Type") == "application/json"
        return response.status, json.loads(response.read())

    def read(self, topic: str, place: dict[str, int]) -> Any:
        """Return the record that a response speaks of."""
        self._consumer.assign([TopicPartition(topic, place["partition"], place["offset"])])
        (record,) = self._consumer.consume(1, timeout=120)
        assert not record.error()
        assert (record.partition(), record.offset()) == (place["partition"], place["offset"])
        return record

    def register(self, subject: str, name: str) -> int:
        """Register a format's schema and return its id."""
        body = {"schema": FORMATS[name].schema, "schemaType": FORMATS[name].registry_type}
        headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        url = f"{self._registry}/subjects/{subject}/versions"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
            return int(json.load(response)["id"])

    def close(self) -> None:
        self._connection.close()
        self._consumer.close()


@pytest.fixture
def produce(kafka: Cluster, schema_registry: Registry, module_headrace: SharedHeadrace) -> Iterator[Produce]:
    """A client of the one process for the whole file."""
    config = {"kafka": {"bootstrap_servers": kafka.bootstrap_servers}, "schema_registry": {"url": schema_registry.url}}
    client = Produce(module_headrace(config).url, kafka, schema_registry.url)
    yield client
    client.close()


@pytest.fixture(scope="module")
def place(kafka: Cluster) -> str:
    """A topic of two partitions."""
    name = f"conformance-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, 2, {"max.message.bytes": "2000"})
    return name


def stored(name: str, schema_id: int | None) -> bytes:
    """Return what a format's value must be in Kafka."""
    head = b"" if schema_id is None else b"\x00" + schema_id.to_bytes(4, "big")
    return head + FORMATS[name].stored


@pytest.mark.parametrize(("key", "value"), [*zip(FORMATS, [*FORMATS][1:] + [*FORMATS][:1], strict=True)])
def test_every_format_for_key_and_value(produce: Produce, place: str, key: str, value: str) -> None:
    """Each as key and as value, by name and by code of the seed document, with schema text, byte for byte."""
    parts = {"key": key, "value": value}
    body: dict[str, Any] = {"records": [{"key": FORMATS[key].value, "value": FORMATS[value].value}]}
    for part, name in parts.items():
        if FORMATS[name].schema:
            body |= {f"{part}Schema": FORMATS[name].schema, f"{part}SchemaSubject": f"{place}-{name}"}
    responses = []
    for spell in (str.upper, lambda name: FORMATS[name].code):
        status, response = produce.post(place, body | {f"{part}Format": spell(name) for part, name in parts.items()})
        assert status == 200, response
        record = produce.read(place, response["offsets"][0])
        assert record.key() == stored(key, response.get("key_schema_id"))
        assert record.value() == stored(value, response.get("value_schema_id"))
        responses.append({name: response[name] for name in response if name != "offsets"})
    assert responses[0] == responses[1]
    assert ("key_schema_id" in responses[0], "value_schema_id" in responses[0]) == (
        bool(FORMATS[key].schema),
        bool(FORMATS[value].schema),
    )


def test_records_are_where_the_response_says(produce: Produce, topic: MakeTopic) -> None:
    """Partition and offset, key, value, timestamp and headers, byte for byte."""
    name = topic(3)
    records = [
        {"key": "a", "value": {"n": 1}, "partition": 2, "timestamp": 1_700_000_000_000, "headers": {"h": "é"}},
        {"key": "b", "value": None, "partition": 2},
        {"value": [1, 2], "partition": 2, "correlationId": "mine"},
    ]
    status, body = produce.post(
        name, {"records": records}, **{"X-Correlation-Id": "http", "Authorization": "Bearer not-for-kafka"}
    )
    assert status == 200
    assert body["offsets"] == [{"partition": 2, "offset": offset} for offset in range(3)]
    first, second, third = (produce.read(name, place) for place in body["offsets"])
    assert (first.key(), first.value(), first.timestamp()[1]) == (b"a", b'{"n": 1}', 1_700_000_000_000)
    assert first.headers() == [("X-Correlation-Id", b"http"), ("h", "é".encode())]
    assert (second.key(), second.value()) == (b"b", None)
    assert (third.key(), third.value()) == (None, b"[1, 2]")
    assert third.headers() == [("X-Correlation-Id", b"mine")]
