"""Formats with a schema, byte for byte against Confluent's own serializers, with a real schema registry."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass

from headrace.config.kafka import SchemaRegistryConfig
from headrace.formats.choice import Codecs, SchemaChoice
from headrace.formats.plain import header_of
from headrace.formats.proto_files import parse_proto
from headrace.formats.registry import Reference, SchemaRegistry
from headrace.records import OutgoingRecord
from headrace.runtime import SystemClock
from headrace_devkit.testing import HeadraceProcess, MakeTopic, RecordingBackend, Registry
from headrace_devkit.testing.scenario import Scenario
from tests.table_process import TableProcess
from yaml_table import table

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

HANDLER = "def handler(context, event):\n    return event.body\n"
PLACE_AVRO = {"type": "record", "name": "x.Place", "fields": [{"name": "city", "type": "string"}]}
PERSON_AVRO = table(__file__, "person_avro")
PLACE_PROTO = 'syntax = "proto3"; package x; message Place { string city = 1; }'
PERSON_PROTO = table(__file__, "person_proto")


@pytest.fixture
def confluent(schema_registry: Registry) -> Iterator[SchemaRegistryClient]:
    registry = pytest.importorskip("confluent_kafka.schema_registry", exc_type=ImportError)
    with registry.SchemaRegistryClient({"url": schema_registry.url}) as client:
        yield client


@pytest.fixture
def ours(schema_registry: Registry) -> Callable[..., Any]:
    """Run with codecs on the real registry."""

    def run(work: Callable[[Codecs], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            registry = SchemaRegistry(SchemaRegistryConfig(url=schema_registry.url, timeout_seconds=60), SystemClock())
            try:
                return await work(Codecs(registry))
            finally:
                await registry.close()

        return asyncio.run(main())

    return run


def register(client: Any, subject: str, text: str, kind: str, *references: tuple[str, str]) -> int:
    from confluent_kafka.schema_registry import Schema, SchemaReference

    named = [SchemaReference(name, other, 1) for name, other in references]
    return int(client.register_schema(subject, Schema(text, kind, named)))


async def through(codecs: Codecs, choice: SchemaChoice, subject: str, value: Any) -> bytes:
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    return (await codecs.for_writing(choice, "json", subject)).codec.encode(text.encode())


async def back(codecs: Codecs, data: bytes, name: str) -> Any:
    reader = codecs.for_reading(name)
    await reader.prepare([data])
    return json.loads(reader.decode(data) or b"")


def test_avro_with_references_is_what_confluent_writes_and_reads(
    confluent: SchemaRegistryClient, ours: Callable[..., Any]
) -> None:
    """The schema names a type of another subject."""
    from confluent_kafka.schema_registry import Schema, SchemaReference
    from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer

    name = uuid.uuid4().hex
    register(confluent, f"{name}-place", json.dumps(PLACE_AVRO), "AVRO")
    text = json.dumps(PERSON_AVRO)
    choice = SchemaChoice("avro", text=text, references=(Reference("x.Place", f"{name}-place", 1),))
    value = {"id": 2**62, "born": {"city": "Ulm"}, "died": {"x.Place": {"city": "Princeton"}}}
    plain = {"id": 2**62, "born": {"city": "Ulm"}, "died": {"city": "Princeton"}}
    data = ours(lambda codecs: through(codecs, choice, f"{name}-value", value))
    context = SerializationContext(name, MessageField.VALUE)
    schema = Schema(text, "AVRO", [SchemaReference("x.Place", f"{name}-place", 1)])
    theirs = AvroSerializer(confluent, schema, conf={"auto.register.schemas": False})(plain, context)
    assert data == theirs
    assert AvroDeserializer(confluent)(data, context) == plain
    assert ours(lambda codecs: back(codecs, theirs, "avro")) == value


PEOPLE = [
    (None, {"id": "4611686018427387904", "born": {"city": "Ulm"}, "pets": [{"name": "Chico"}], "scores": {"a": 1}}),
    (None, {"at": "2024-02-29T23:59:59.000000001Z"}),
    ("x.Person.Pet", {"name": "Chico"}),
    ("x.Robot", {"serial": "18446744073709551615"}),
]


@pytest.mark.parametrize(("message", "value"), PEOPLE)
def test_protobuf_is_what_confluent_writes_and_reads(
    confluent: SchemaRegistryClient, ours: Callable[..., Any], message: str | None, value: dict[str, Any]
) -> None:
    """First, second and nested message types; imports; text registered by us, a descriptor registered by them."""
    from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer

    name = uuid.uuid4().hex
    register(confluent, f"{name}-place", PLACE_PROTO, "PROTOBUF")
    references = (Reference("x/place.proto", f"{name}-place", 1),)
    choice = SchemaChoice("protobuf", text=PERSON_PROTO, references=references, message=message)
    data = ours(lambda codecs: through(codecs, choice, f"{name}-value", value))
    file = parse_proto(PERSON_PROTO, {"x/place.proto": PLACE_PROTO})
    make = GetMessageClass(file.pool.FindMessageTypeByName(message or "x.Person"))
    theirs_message = json_format.ParseDict(value, make(), descriptor_pool=file.pool)
    context = SerializationContext(f"{name}-theirs", MessageField.VALUE)
    theirs = ProtobufSerializer(make, confluent)(theirs_message, context)
    assert data[5:] == theirs[5:]
    assert ours(lambda codecs: back(codecs, theirs, "protobuf")) == json_format.MessageToDict(
        theirs_message, always_print_fields_with_no_presence=True
    )
    again = SchemaChoice("protobuf", message=message)
    written = ours(lambda codecs: through(codecs, again, f"{name}-theirs-value", value))
    assert written == theirs
    # Theirs asks for a descriptor, which this registry cannot make of text that imports; of a descriptor it can.
    assert ProtobufDeserializer(make, {}, confluent)(written, context) == theirs_message


def test_what_others_write_is_read_over_http_and_by_push_functions_and_tables(
    site: Scenario,
    topic: MakeTopic,
    function: Callable[..., HeadraceProcess],
    backend: RecordingBackend,
    schema_registry: Registry,
    confluent: SchemaRegistryClient,
) -> None:
    """Schemas that the registry accepts and values that Python lacks; a record that no schema reads names its cause."""
    source, target, rows = topic(), topic(), table(__file__, "others_write")
    for number, (kind, schema, references, data, *_) in enumerate(rows):
        for name, other in references.items():
            register(confluent, f"{source}-{name}", json.dumps(other), kind)
        text = schema if isinstance(schema, str) else json.dumps(schema)
        named = [(name, f"{source}-{name}") for name in references]
        schema_id = register(confluent, f"{source}-{number}-value", text, kind, *named)
        site.write(source, OutgoingRecord(source, b"%d" % number, header_of(schema_id) + bytes.fromhex(data)))
    site.write(source, OutgoingRecord(source, b"bad", header_of(0xFFFFF) + b"x"))
    consumer = {"topics": [source], "group": f"{source}-push", "value_format": "avro", "backend": {"url": backend.url}}
    more = {
        "schema_registry": {"url": schema_registry.url},
        "reactive_consumers": {"pushed": consumer},
        "tables": {"t": {"topic": source, "kind": "log", "value_format": "avro", "schema": "f STRING"}},
    }
    process = function(source, HANDLER, more=more, valueFormat="avro", outputTopic=target)
    values = [row[4] for row in rows]

    site.wait_committed(f"{source}-push", source, len(rows) + 1)
    letters = site.records(f"{source}.dlq")
    assert [entry.get("value") for entry in backend.accepted] == values, [letter.headers for letter in letters]
    read = site.ask(f"{process.url}/topics/{source}/partitions/0/records?valueFormat=avro").body["records"]
    assert [record.get("value") for record in read] == [*values, None]
    site.wait_committed(f"{source}-work", source, len(rows) + 1)
    outputs = [json.loads(record.value or b"") for record in site.records(target)]
    assert outputs == [row[5] or row[4] for row in rows]
    for dead in site.records(f"{source}.dlq"):
        assert (dead.key, b"does not have" in (dict(dead.headers)["headrace.dlq.reason"] or b"")) == (b"bad", True)
    cells = [[str(number), row[6]] for number, row in enumerate(rows) if row[6]]
    made = TableProcess(process)
    made.wait_for('SELECT key, f FROM t ORDER BY "offset"', cells)
    assert made.table("t")["corrupt"] == 2
