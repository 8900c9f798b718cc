"""The columns that a registered schema has in SQL, in the words of `CREATE TABLE`."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn

import msgspec

from headrace.errors import SchemaInvalid


def _table(text: str) -> dict[str, str]:
    parts = (part.split() for part in text.split("; "))
    return {name: kind for kind, *names in parts for name in names}


_AVRO: Final = _table(
    "BOOLEAN boolean; INT int; BIGINT long; FLOAT float; DOUBLE double; BINARY bytes fixed; DATE date; "
    "STRING string enum uuid time-millis time-micros; TIMESTAMP timestamp-millis timestamp-micros; "
    "TIMESTAMP_NTZ local-timestamp-millis local-timestamp-micros"
)
_JSON: Final = _table("BOOLEAN boolean; BIGINT integer; DOUBLE number; STRING string; TIMESTAMP date-time; DATE date")
_PROTOBUF: Final = "- INT BIGINT BIGINT DECIMAL(20,0) DOUBLE FLOAT BOOLEAN STRING STRING -".split()  # noqa: SIM905
"""Types by the number of the C++ type."""
_WELL_KNOWN: Final = _table(
    "TIMESTAMP Timestamp; STRING Duration FieldMask Struct Value ListValue StringValue; BOOLEAN BoolValue; "
    "BINARY BytesValue; INT Int32Value; BIGINT UInt32Value Int64Value; DECIMAL(20,0) UInt64Value; "
    "DOUBLE DoubleValue; FLOAT FloatValue"
)


def sql_columns(schema_type: str, text: str, references: Mapping[str, str]) -> str:
    """Return the columns of a schema: `carrier STRING, arr_delay DOUBLE`.

    Raises:
        SchemaInvalid: The text is not usable, or a part of it has no type of SQL.
    """
    if schema_type == "AVRO":
        from headrace.formats.avro import AvroCodec

        found = _avro(AvroCodec(text, references.values()).schema, "$", {})
    elif schema_type == "PROTOBUF":
        from headrace.formats.protobuf import ProtobufCodec

        found = _message(ProtobufCodec(text, references).first.DESCRIPTOR, "$", ())
    else:
        found = _json(msgspec.json.decode(text), "$", {**references, "": text}, ())
    if not found.startswith("STRUCT<"):
        _refuse("$", "no record with fields")
    return found.removeprefix("STRUCT<").removesuffix(">")


def _struct(fields: Iterable[tuple[str, str]]) -> str:
    return f"STRUCT<{', '.join(f'`{name}`: {kind}' for name, kind in fields)}>"


def _refuse(path: str, what: str) -> NoReturn:
    raise SchemaInvalid(f"{path} of the schema is {what}, which has no type in SQL")


def _avro(schema: Any, path: str, named: dict[str, str]) -> str:
    if isinstance(schema, list):
        branches = [branch for branch in schema if branch != "null"]
        return _avro(branches[0], path, named) if len(branches) == 1 else _refuse(path, "a union of several types")
    if isinstance(schema, str):
        return _AVRO.get(schema) or named.get(schema) or _refuse(path, f"{schema} alone or within itself")
    kind, logical = schema["type"], schema.get("logicalType", "")
    if kind == "array":
        return f"ARRAY<{_avro(schema['items'], f'{path}[]', named)}>"
    if kind == "map":
        return f"MAP<STRING, {_avro(schema['values'], f'{path}[]', named)}>"
    if logical == "decimal":
        found = f"DECIMAL({schema['precision']},{schema.get('scale', 0)})"
    elif kind in ("record", "error"):
        names = [(field["name"], field["type"]) for field in schema["fields"]]
        found = _struct((name, _avro(inner, f"{path}.{name}", named)) for name, inner in names)
    else:
        found = _AVRO.get(logical) or _AVRO[kind]
    named[schema.get("name", "")] = found
    return found


def _message(message: Any, path: str, inside: tuple[str, ...]) -> str:
    known = message.full_name.removeprefix("google.protobuf.")
    if known != message.full_name:
        return _WELL_KNOWN.get(known) or _refuse(path, f"of type {known}")
    if message.full_name in inside:
        _refuse(path, "a message within itself")
    inside = (*inside, message.full_name)
    return _struct((field.name, _field(field, f"{path}.{field.name}", inside)) for field in message.fields)


def _field(field: Any, path: str, inside: tuple[str, ...]) -> str:
    message = field.message_type
    if message and message.GetOptions().map_entry:
        return f"MAP<STRING, {_field(message.fields_by_name['value'], path, inside)}>"
    found = "BINARY" if field.type == field.TYPE_BYTES else _PROTOBUF[field.cpp_type]
    found = _message(message, path, inside) if message else found
    return f"ARRAY<{found}>" if field.is_repeated else found


def _json(schema: Any, path: str, texts: Mapping[str, str], inside: tuple[str, ...]) -> str:
    """Return the type of a JSON schema; `texts` are those of the documents that it refers to, "" its own."""
    schema = schema if isinstance(schema, dict) else {}
    if (reference := schema.get("$ref")) and reference not in inside:
        base, _, pointer = reference.partition("#")
        texts = {**texts, "": texts.get(base, "{}")}
        schema = msgspec.json.decode(texts[""])
        for step in filter(None, pointer.split("/")):
            schema = schema.get(step, {})
        return _json(schema, path, texts, (*inside, reference))
    choices = [each for each in schema.get("oneOf") or schema.get("anyOf") or () if each != {"type": "null"}]
    if len(choices) == 1:
        return _json(choices[0], path, texts, inside)
    kinds = schema.get("type", "string" if "enum" in schema else ())
    [kind, *others] = [each for each in ([kinds] if isinstance(kinds, str) else kinds) if each != "null"] or [""]
    if kind == "array":
        return f"ARRAY<{_json(schema.get('items'), f'{path}[]', texts, inside)}>"
    if kind == "object" and "properties" in schema:
        inner = schema["properties"].items()
        return _struct((name, _json(each, f"{path}.{name}", texts, inside)) for name, each in inner)
    if kind == "object":
        return f"MAP<STRING, {_json(schema.get('additionalProperties'), f'{path}[]', texts, inside)}>"
    if others or kind not in _JSON:
        _refuse(path, f"of type {' or '.join([kind, *others]) or 'anything'}")
    if kind == "string" and schema.get("contentEncoding") == "base64":
        return "BINARY"
    return _JSON.get(schema.get("format", ""), _JSON[kind]) if kind == "string" else _JSON[kind]
