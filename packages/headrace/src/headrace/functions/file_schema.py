"""The JSON Schema of a function file, made from the table of its keys and the models of their values."""

import re
from collections.abc import Sequence
from typing import Any, Final, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from headrace.config.explain import document_schema
from headrace.functions.file_values import AnyCase, Duration
from headrace.functions.function_keys import KEYS
from headrace.functions.spec import FunctionSpec
from headrace.functions.triggers.trigger import HandlerBatch
from headrace.functions.triggers.trigger_kinds import KINDS

_LINK: Final = re.compile(r"\[([^]]*)\]\([^)]*\)")
_TYPES: Final = {"mapping": "object", "text": "string"}
"""Types of keys that no model has."""
Schema = dict[str, Any]


def function_schema() -> Schema:
    """Return the JSON Schema of `function.yaml`, for editors.

    It names the keys that have an effect, and permits all others, as Nuclio has many more. Keys are in Nuclio's
    letter case there, and Headrace reads them in any.

    Source: JSON Schema 2020-12.
    """
    attributes: Schema = {"type": "object", "properties": {}}
    for kind in dict.fromkeys(KINDS.values()):
        attributes["properties"] = _mapping(kind.mapping, kind.models())["properties"] | attributes["properties"]
    trigger = _mapping("trigger", [*KINDS.values()])
    trigger["properties"]["kind"]["examples"] = [*KINDS]
    trigger["properties"] |= {"attributes": attributes, "batch": _mapping("batch", [HandlerBatch])}
    spec = _mapping("spec", [FunctionSpec])
    spec["properties"] |= {
        "triggers": {"type": "object", "additionalProperties": trigger},
        "build": _mapping("build", []),
    }
    top = {"type": "object", "properties": {"metadata": _mapping("metadata", []), "spec": spec}}
    return document_schema("function.yaml", top)


def _mapping(where: str, models: Sequence[type[BaseModel]]) -> Schema:
    """Return the schema of a mapping of the table, with the types that the models have."""
    properties: Schema = {}
    for key in KEYS:
        if key.where == where and key.is_read:
            text = _LINK.sub(r"\1", key.becomes).replace("`", "")
            properties[key.key] = {"description": text, **({"type": _TYPES[key.type]} if key.type in _TYPES else {})}
    for model in models:
        made = model.model_json_schema()["properties"]
        for name, field in model.model_fields.items():
            written = field.alias or name
            if written in properties:
                properties[written] |= _value(field, made.get(written, {}))
    return {"type": "object", "properties": properties}


def _value(field: FieldInfo, made: Schema) -> Schema:
    """Return the schema of a value; a number may also be text, and a word may have any letter case."""
    marks = [
        *field.metadata,
        *(mark for part in get_args(field.annotation) for mark in getattr(part, "__metadata__", ())),
    ]
    if Duration in marks:
        return {"type": ["string", "integer"], "examples": ["10s", "1m30s", "250ms"]}
    if words := made.get("enum"):
        return {"examples": words, "type": "string"} if AnyCase in marks else {"enum": words}
    kind = made.get("type")
    return (
        {"type": ["integer", "string"]} if kind == "integer" else {"type": kind} if kind in ("boolean", "array") else {}
    )
