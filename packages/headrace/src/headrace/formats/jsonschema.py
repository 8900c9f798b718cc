"""JSONSCHEMA: JSON values that fit a schema, stored unchanged. Only this module imports the JSON Schema library.

`$schema` selects the draft, 4 to 2020-12; the default is 2020-12. A payload has no framing of the registry.
"""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

import jsonschema_rs
import msgspec

from headrace.errors import EncodeError, SchemaInvalid
from headrace.formats.plain import JsonCodec
from headrace.formats.sql_types import refuse, row_type, sql_names

_NOT_JSON: Final = (msgspec.DecodeError, ValueError, RecursionError)
_DOTS: Final = re.compile(r"^(\.{0,2}/)+")
"""Steps of a relative reference before its path: the library resolves them against the base of the schema."""
_decode_json = msgspec.json.Decoder().decode
_SQL: Final = sql_names("BOOLEAN boolean; BIGINT integer; DOUBLE number; STRING string; TIMESTAMP date-time; DATE date")


class JsonSchemaCodec(JsonCodec):
    """JSON text that is validated before it is written, and read as it is."""

    def __init__(self, text: str, references: Mapping[str, str], **_: object) -> None:
        """Keep a schema, which only writing uses."""
        self._text = text
        self._references = references

    def require_writable(self) -> None:
        """Compile the validator.

        Raises:
            SchemaInvalid: The text is not a valid JSON schema, or refers to an unknown one.
        """
        self._validator  # noqa: B018 a cached property

    @functools.cached_property
    def _validator(self) -> Any:
        try:
            schema = _decode_json(self._text.encode())
            known = {name: _decode_json(source.encode()) for name, source in self._references.items()}
            # Without a retriever the library would fetch any URL that a schema names.
            return jsonschema_rs.validator_for(schema, retriever=_retriever(known), mask="the value")
        except jsonschema_rs.ValidationError as cause:
            raise SchemaInvalid(f"values cannot be checked against this JSON schema: {cause.message[:300]}") from cause
        except _NOT_JSON as cause:
            raise SchemaInvalid(f"not a valid JSON schema: {cause}") from cause

    decode_row = JsonCodec.decode

    def encode(self, text: bytes) -> bytes:
        try:
            self._validator.validate(_decode_json(text))
        except jsonschema_rs.ValidationError as misfit:
            path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in misfit.instance_path)
            raise EncodeError(
                f"the value does not fit its JSON schema at ${path[:200]}: {misfit.message[:300]}"
            ) from misfit
        except _NOT_JSON as cause:
            raise EncodeError(f"the value cannot be checked against its JSON schema: {type(cause).__name__}") from cause
        return text


def _retriever(known: Mapping[str, Any]) -> Callable[[str], Any]:
    by_id = {schema["$id"]: schema for schema in known.values() if isinstance(schema, dict) and "$id" in schema}

    def retrieve(uri: str) -> Any:
        if uri in by_id:
            return by_id[uri]
        for name, schema in known.items():
            if uri == name or uri.endswith("/" + _DOTS.sub("", name)):
                return schema
        raise LookupError("it is not among the references of the registered schema")

    return retrieve


def sql_type(text: str, references: Mapping[str, str]) -> str:
    """Return the type of a schema in SQL; raises as `sql_columns` does."""
    return _sql_type(_decode_json(text), "$", {**references, "": text}, ())


def _sql_type(schema: Any, path: str, texts: Mapping[str, str], inside: tuple[str, ...]) -> str:
    """Return the type of a JSON schema; `texts` are those of the documents that it refers to; "" is its own."""
    schema = schema if isinstance(schema, dict) else {}
    if (reference := schema.get("$ref")) and reference not in inside:
        base, _, pointer = reference.partition("#")
        texts = {**texts, "": texts.get(base, "{}")}
        schema = _decode_json(texts[""])
        for step in filter(None, pointer.split("/")):
            schema = schema.get(step, {})
        return _sql_type(schema, path, texts, (*inside, reference))
    choices = [each for each in schema.get("oneOf") or schema.get("anyOf") or () if each != {"type": "null"}]
    if len(choices) == 1:
        return _sql_type(choices[0], path, texts, inside)
    kinds = schema.get("type", "string" if "enum" in schema else ())
    named = [kinds] if isinstance(kinds, str) else kinds
    [kind, *others] = [each for each in named if each != "null"] or [""]
    if kind == "array":
        return f"ARRAY<{_sql_type(schema.get('items'), f'{path}[]', texts, inside)}>"
    if kind == "object" and "properties" in schema:
        inner = schema["properties"].items()
        return row_type((name, _sql_type(each, f"{path}.{name}", texts, inside)) for name, each in inner)
    if kind == "object":
        return f"MAP<STRING, {_sql_type(schema.get('additionalProperties'), f'{path}[]', texts, inside)}>"
    if others or kind not in _SQL:
        refuse(path, f"of type {' or '.join([kind, *others]) or 'anything'}")
    if kind == "string" and schema.get("contentEncoding") == "base64":
        return "BINARY"
    return _SQL.get(schema.get("format", ""), _SQL[kind]) if kind == "string" else _SQL[kind]
