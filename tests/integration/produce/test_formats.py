"""Formats with a schema, byte for byte against Confluent's own serializers, with a real schema registry."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import json_format
from google.protobuf.message_factory import GetMessageClass
from yaml_table import table

from headrace.config.kafka import SchemaRegistryConfig
from headrace.formats.choice import Codecs, SchemaChoice
from headrace.formats.proto_files import parse_proto
from headrace.formats.registry import Reference, SchemaRegistry
from headrace.runtime import SystemClock

DRAFT7 = "http://json-schema.org/draft-07/schema#"
PLACE_AVRO = {"type": "record", "name": "x.Place", "fields": [{"name": "city", "type": "string"}]}
PERSON_AVRO = table(__file__, "person_avro")
PLACE_JSON = {"$schema": DRAFT7, "type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}
PERSON_JSON = {
    "$schema": DRAFT7,
    "title": "Person",
    "type": "object",
    "properties": {"id": {"type": "integer"}, "born": {"$ref": "place.json"}},
}
PLACE_PROTO = 'syntax = "proto3"; package x; message Place { string city = 1; }'
PERSON_PROTO = table(__file__, "person_proto")


@pytest.fixture
def confluent(schema_registry: Any) -> Iterator[Any]:
    registry = pytest.importorskip("confluent_kafka.schema_registry", exc_type=ImportError)
    with registry.SchemaRegistryClient({"url": schema_registry.url}) as client:
        yield client


@pytest.fixture
def ours(schema_registry: Any) -> Callable[..., Any]:
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


def test_avro_with_references_is_what_confluent_writes_and_reads(confluent: Any, ours: Any) -> None:
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


def test_json_schema_is_what_confluent_writes_and_reads(confluent: Any, ours: Any) -> None:
    """With a reference, which its own validator follows too."""
    from confluent_kafka.schema_registry import Schema, SchemaReference
    from confluent_kafka.schema_registry.json_schema import JSONDeserializer, JSONSerializer

    name = uuid.uuid4().hex
    register(confluent, f"{name}-place", json.dumps(PLACE_JSON), "JSON")
    choice = SchemaChoice(
        "JSONSCHEMA", text=json.dumps(PERSON_JSON), references=(Reference("place.json", f"{name}-place", 1),)
    )
    value = {"id": 2**62, "born": {"city": "Zürich"}}
    data = ours(lambda codecs: through(codecs, choice, f"{name}-value", value))
    context = SerializationContext(name, MessageField.VALUE)
    schema = Schema(json.dumps(PERSON_JSON), "JSON", [SchemaReference("place.json", f"{name}-place", 1)])
    theirs = JSONSerializer(schema, confluent, conf={"auto.register.schemas": False})(value, context)
    assert data == theirs
    assert JSONDeserializer(schema, schema_registry_client=confluent)(data, context) == value
    assert ours(lambda codecs: back(codecs, theirs, "jsonschema")) == value


PEOPLE = [
    (None, {"id": "4611686018427387904", "born": {"city": "Ulm"}, "pets": [{"name": "Chico"}], "scores": {"a": 1}}),
    (None, {"at": "2024-02-29T23:59:59.000000001Z"}),
    ("x.Person.Pet", {"name": "Chico"}),
    ("x.Robot", {"serial": "18446744073709551615"}),
]


@pytest.mark.parametrize(("message", "value"), PEOPLE)
def test_protobuf_is_what_confluent_writes_and_reads(
    confluent: Any, ours: Any, message: str | None, value: dict[str, Any]
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
