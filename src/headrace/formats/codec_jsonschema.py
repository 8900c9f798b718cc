"""JSONSCHEMA: the only door to the JSON Schema library; any JSON value that its schema allows, stored as it came.

Drafts 4 to 2020-12, as `$schema` says; 2020-12 without it. The registry's framing is not part of a payload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jsonschema_rs
import msgspec

from headrace.errors import EncodeError, SchemaInvalid
from headrace.formats.codec_json import JsonCodec

_NO_BASE = "json-schema:///"
_decode_json = msgspec.json.Decoder().decode


class JsonSchemaCodec(JsonCodec):
    """JSON text that is checked on its way in."""

    def __init__(self, text: str, references: Mapping[str, str]) -> None:
        """Compile a schema.

        Args:
            text: The schema.
            references: Texts of the schemas that it may refer to, by the names it gives them.

        Raises:
            SchemaInvalid: The text is no JSON schema, or refers to what is not there.
        """
        try:
            schema = _decode_json(text.encode())
            known = {name: _decode_json(source.encode()) for name, source in references.items()}
            # Never the library's own retriever: it would fetch whatever address a schema names.
            self._validator: Any = jsonschema_rs.validator_for(schema, retriever=_retriever(known), mask="the value")
        except jsonschema_rs.ValidationError as cause:
            raise SchemaInvalid(f"no usable JSON schema: {cause.message[:300]}") from cause
        except (msgspec.DecodeError, ValueError, RecursionError) as cause:
            raise SchemaInvalid(f"no usable JSON schema: {cause}") from cause
        self.record_name = str(schema.get("title", "")) if isinstance(schema, dict) else ""

    def encode(self, text: bytes) -> bytes:
        try:
            self._validator.validate(_decode_json(text))
        except jsonschema_rs.ValidationError as misfit:
            path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in misfit.instance_path)
            raise EncodeError(
                f"the value does not fit its JSON schema at ${path[:200]}: {misfit.message[:300]}"
            ) from misfit
        except (msgspec.DecodeError, ValueError, RecursionError) as cause:
            raise EncodeError(f"the value cannot be checked against its JSON schema: {type(cause).__name__}") from cause
        return text


def _retriever(known: Mapping[str, Any]) -> Callable[[str], Any]:
    by_id = {schema["$id"]: schema for schema in known.values() if isinstance(schema, dict) and "$id" in schema}

    def retrieve(uri: str) -> Any:
        if uri in by_id:
            return by_id[uri]
        for name, schema in known.items():
            if uri in (name, _NO_BASE + name.lstrip("/")) or uri.endswith("/" + name):
                return schema
        raise LookupError("it is not among the references with which the schema is registered")

    return retrieve
