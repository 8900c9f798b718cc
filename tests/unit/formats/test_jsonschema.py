"""JSON Schema: what a schema allows is stored as it came; what it does not is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from headrace.errors import EncodeError, SchemaInvalid
from headrace.formats.jsonschema import JsonSchemaCodec

TABLE = yaml.safe_load(Path(__file__).with_name("refused.yaml").read_text())
DRAFT7 = "http://json-schema.org/draft-07/schema#"
ORDER = {
    "$schema": DRAFT7,
    "title": "Order",
    "type": "object",
    "required": ["id"],
    "additionalProperties": False,
    "properties": {
        "id": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}},
        "to": {"$ref": "address.json"},
    },
}
ADDRESS = {"$schema": DRAFT7, "type": "object", "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}}}


def codec(schema: object = None, **references: object) -> JsonSchemaCodec:
    texts = {name.replace("_", "."): json.dumps(text) for name, text in references.items()}
    return JsonSchemaCodec(
        json.dumps(ORDER if schema is None else schema), texts or {"address.json": json.dumps(ADDRESS)}
    )


@pytest.mark.parametrize(
    "text", [b'{"id": 12345678901234567890123, "tags":[]}', b'{"id":1,"to":{"zip":"12345"}}', b'{ "id" : 1.0 }']
)
def test_a_value_that_fits_is_stored_as_it_was_written(text: bytes) -> None:
    """Every digit and every space, both ways."""
    assert codec().encode(text) == text
    assert codec().decode(text) == text


@pytest.mark.parametrize(("value", "says"), TABLE["JSON Schema values"])
def test_a_value_that_does_not_fit_is_refused_with_path_and_reason(value: object, says: str) -> None:
    """The place, the rule, and never the value."""
    with pytest.raises(EncodeError) as raised:
        codec().encode(json.dumps(value).encode())
    assert says in str(raised.value)
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(("draft", "schema", "value", "fits"), TABLE["JSON Schema drafts"])
def test_the_draft_is_the_one_that_the_schema_says(draft: str | None, schema: dict, value: object, fits: bool) -> None:
    """Each keyword means what it means in its draft; without `$schema` the newest."""
    made = codec({**schema, **({"$schema": draft} if draft else {})})
    text = json.dumps(value).encode()
    if fits:
        assert made.encode(text) == text
    else:
        with pytest.raises(EncodeError):
            made.encode(text)


@pytest.mark.parametrize("reference", ["other.json", "#/$defs/a", "http://example.org/b/other.json", "urn:x"])
def test_references_are_found_by_name_by_id_and_inside(reference: str) -> None:
    """Relative to the schema's own id, by another schema's id, in the schema itself."""
    schema = {"$id": "http://example.org/b/root.json", "$ref": reference, "$defs": {"a": {"type": "integer"}}}
    texts = {"other.json": '{"type": "integer"}', "third": '{"$id": "urn:x", "type": "integer"}'}
    made = JsonSchemaCodec(json.dumps(schema), texts)
    assert made.encode(b"1") == b"1"
    with pytest.raises(EncodeError):
        made.encode(b'"x"')


def test_no_address_in_a_schema_is_ever_fetched(backend: object) -> None:
    """A schema is data: it cannot make Headrace call somebody."""
    with pytest.raises(SchemaInvalid, match="not among the references"):
        codec({"$ref": f"{backend.url}/x.json"}).require_writable()  # type: ignore[attr-defined]
    assert backend.requests == []  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[1]", '{"type":"strin"}', '{"$schema":"http://example.org/x"}', '{"$ref":"#/none"}', '{"pattern":"("}'),
        *('{"not":' * 900 + "{}" + "}" * 900, '{"not":' * 9000),
    ],
)
def test_an_invalid_schema_is_rejected(text: str) -> None:
    """Also text that is nested deeply."""
    with pytest.raises(SchemaInvalid):
        JsonSchemaCodec(text, {}).require_writable()


def test_a_schema_that_never_ends_and_a_pattern_that_takes_for_ever_do_no_harm() -> None:
    """Both come from outside."""
    assert codec({"$ref": "#"}).encode(b"1") == b"1"
    with pytest.raises(EncodeError):
        codec({"pattern": r"^(a+)+\1$"}).encode(b'"' + b"a" * 60 + b'b"')
