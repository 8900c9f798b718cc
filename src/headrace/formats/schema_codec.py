"""Makes the codec of a schema; the libraries of a format are loaded with its first schema.

Function workers import this module, so it must stay light.
"""

from collections.abc import Mapping
from typing import Protocol

from headrace.errors import EnvironmentProblem, SchemaInvalid
from headrace.formats.plain import SCHEMA_TYPES, Codec


class SchemaCodec(Codec, Protocol):
    """A codec of one schema."""

    record_name: str
    """Name of the schema's record, message or title, for subject strategies that use it; empty without one."""


def compile_schema(
    schema_type: str,
    text: str,
    references: Mapping[str, str],
    message: str | None = None,
    *,
    plain_unions: bool = False,
) -> SchemaCodec:
    """Return the codec of a schema; keep it, because compiling takes milliseconds.

    Args:
        schema_type: `AVRO`, `JSON` or `PROTOBUF`.
        references: Texts of the referenced schemas by name, each after those that it refers to itself.
        message: Of a Protobuf schema: full name of the message type to write; None for the first.
        plain_unions: Of an Avro schema: whether JSON has the values of unions without the branch's name.

    Raises:
        SchemaInvalid: No such type, or the text is not usable.
        EnvironmentProblem: The library of the format is not installed.
    """
    try:
        if schema_type == "AVRO":
            from headrace.formats.avro import AvroCodec

            return AvroCodec(text, references.values(), plain_unions=plain_unions)
        if schema_type == "JSON":
            from headrace.formats.jsonschema import JsonSchemaCodec

            return JsonSchemaCodec(text, references)
        if schema_type == "PROTOBUF":
            from headrace.formats.protobuf import ProtobufCodec

            return ProtobufCodec(text, references, message)
    except ImportError as cause:
        extra = next(name for name, kind in SCHEMA_TYPES.items() if kind == schema_type)
        raise EnvironmentProblem(
            f"a schema of type {schema_type} is in use, and {cause.name} is not installed: "
            f"pip install 'headrace[{extra}]', then start again"
        ) from cause
    raise SchemaInvalid(f"the registry holds a schema of type {schema_type}, which no format here reads")
