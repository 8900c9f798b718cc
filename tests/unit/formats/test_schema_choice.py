"""Which codec a request or a record gets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import errors
from headrace.formats.choice import Codecs, SchemaChoice
from headrace.formats.plain import header_of
from tests.unit.formats.conftest import Setting

CHOICES = yaml.safe_load(Path(__file__).with_name("schema_choice.yaml").read_text())
INT, LONG = '"int"', '"long"'


@pytest.mark.parametrize("row", CHOICES["found"])
async def test_a_schema_is_found_by_what_the_request_says(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], row: list[Any]
) -> None:
    """Id, version, text, subject, nothing; in the order of the specification."""
    choice, schema_id, default = (*row, "json")[:3]
    async with serving() as it:
        it.server.add("t-value", 1, INT)
        it.server.add("t-value", 2, LONG)
        it.server.add("other", 3, '"string"')
        codecs = Codecs(it.client)
        writing = await codecs.for_writing(SchemaChoice(**choice), default, "t-value")
        assert writing.schema_id == schema_id
        text = b'"x"' if schema_id == 3 else b"5"
        data = writing.codec.encode(text)
        assert data.startswith(header_of(schema_id))
        reader = codecs.for_reading("avro")
        await reader.prepare([data])
        assert reader.decode(data) == text


@pytest.mark.parametrize(("choice", "error"), CHOICES["refused"])
async def test_what_contradicts_itself_or_does_not_exist_is_rejected(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], choice: dict[str, Any], error: str
) -> None:
    """Each conflict has its own error; an id of another subject counts as not found."""
    async with serving() as it:
        it.server.add("t-value", 1, INT)
        it.server.add("other", 3, LONG)
        it.server.add("t-value", 4, "{}", "XML")
        with pytest.raises(errors.HeadraceError) as raised:
            await Codecs(it.client).for_writing(SchemaChoice(**choice), "json", "t-value")
        assert type(raised.value).__name__ == error
        assert raised.value.status == 400


async def test_formats_without_schema_ignore_schema_fields_and_send_no_request(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """As the original."""
    async with serving() as it:
        for name in ("json", "String", "BINARY"):
            choice = SchemaChoice(name, text=INT, id=1, version=1)
            assert (await Codecs(it.client).for_writing(choice, "avro", "t-value")).schema_id is None
        assert it.server.requests == []


async def test_records_are_read_by_the_schema_they_name(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """One reader serves many schemas, each requested once; a record of an unknown one fails alone; null stays null."""
    async with serving() as it:
        it.server.add("a", 1, INT)
        it.server.add("b", 2, '"string"')
        it.server.add("a", 4, '"x.Place"')
        it.server.add("a", 5, '"x.Place"', references=[("x.Place", "none")])
        reader = Codecs(it.client).for_reading("avro")
        stored = [header_of(1) + b"\x0a", None, header_of(2) + b"\x02x", header_of(1) + b"\x0c"]
        bad = {
            header_of(9) + b"x": "id 9, which is not usable: the schema registry does not have schema id 9",
            header_of(4) + b"x": "id 4, which is not usable: .* no text defines the type 'x.Place'",
            header_of(5)
            + b"x": "id 5, which is not usable: the schema registry does not have version 1 of subject none",
            b"plain": "do not begin with a zero byte",
            header_of(1): "do not fit their Avro schema",
        }
        for _ in range(2):
            await reader.prepare([*bad, *stored])
        for data, reason in bad.items():
            with pytest.raises(errors.DecodeError, match=reason):
                reader.decode(data)
        assert [reader.decode(data) for data in stored] == [b"5", None, b'"x"', b"6"]
        assert len(it.server.requests) == 6


PLACE_PROTO = 'syntax = "proto3"; package x; message Place { string s = 1; }'


async def test_references_in_a_circle_end(serving: Callable[..., AbstractAsyncContextManager[Setting]]) -> None:
    """A registry that holds such a thing does not stop Headrace."""
    async with serving() as it:
        it.server.add("t-value", 1, '{"$ref":"place.json"}', "JSON", [("place.json", "place")])
        it.server.add("place", 2, '{"$ref":"root"}', "JSON", [("root", "t-value"), ("place.json", "place")])
        writing = await Codecs(it.client).for_writing(SchemaChoice("jsonschema"), "json", "t-value")
        assert writing.schema_id == 1


async def test_without_auto_register_text_is_only_looked_up(
    serving: Callable[..., AbstractAsyncContextManager[Setting]],
) -> None:
    """What is there is used, what is not is refused and not registered."""
    async with serving() as it:
        it.server.add("t-value", 1, INT)
        find = functools.partial(Codecs(it.client).for_writing, auto_register=False)
        assert (await find(SchemaChoice("avro", text=INT), "json", "t-value")).schema_id == 1
        with pytest.raises(errors.SchemaNotFound):
            await find(SchemaChoice("avro", text=LONG), "json", "t-value")
        assert it.server.versions == {"t-value": [(1, INT)]}


async def test_a_format_whose_library_is_not_installed_says_how_to_get_it(
    serving: Callable[..., AbstractAsyncContextManager[Setting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Extras are optional; the rest of Headrace runs without them."""
    import sys

    monkeypatch.setitem(sys.modules, "headrace.formats.protobuf", None)
    async with serving() as it:
        it.server.add("p-value", 1, PLACE_PROTO, "PROTOBUF")
        with pytest.raises(errors.EnvironmentProblem, match=r"headrace\[protobuf\]"):
            await Codecs(it.client).for_writing(SchemaChoice("protobuf"), "json", "p-value")
