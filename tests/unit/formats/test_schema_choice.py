"""Which codec a request or a record gets: sidecar.md 5.2, row by row."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace import errors
from headrace.formats.codecs import Codecs, SchemaChoice
from headrace.formats.framing import header_of

INT, LONG = '"int"', '"long"'


@pytest.mark.parametrize(
    ("choice", "schema_id"),
    [
        (SchemaChoice("avro"), 2),
        (SchemaChoice("AVRO", id=1), 1),
        (SchemaChoice("AVRO", version=1), 1),
        (SchemaChoice("AVRO", version=1, subject="other"), 3),
        (SchemaChoice("AVRO", subject="other"), 3),
        (SchemaChoice("AVRO", id=3, subject="other"), 3),
        (SchemaChoice("AVRO", text=LONG), 2),
        (SchemaChoice(id=1), 1),
        (SchemaChoice(version=1), 1),
    ],
)
def test_a_schema_is_found_by_what_the_request_says(serving: Any, choice: SchemaChoice, schema_id: int) -> None:
    """Id, version, text, subject, nothing; in the order of the specification."""

    async def main() -> None:
        async with serving() as it:
            it.server.add("t-value", 1, INT)
            it.server.add("t-value", 2, LONG)
            it.server.add("other", 3, '"string"')
            writing = await Codecs(it.client).for_writing(choice, "json", "t-value")
            assert writing.schema_id == schema_id
            text = b'"x"' if schema_id == 3 else b"5"
            assert writing.codec.encode(text).startswith(header_of(schema_id))
            assert writing.codec.decode(writing.codec.encode(text)) == text

    asyncio.run(main())


@pytest.mark.parametrize(
    ("choice", "error"),
    [
        (SchemaChoice("AVRO", id=1, version=1), errors.SchemaConflict),
        (SchemaChoice("AVRO", id=1, text=INT), errors.SchemaWithSchemaId),
        (SchemaChoice("AVRO", version=1, text=INT), errors.SchemaWithSchemaVersion),
        (SchemaChoice(text=INT), errors.SchemaWithoutFormat),
        (SchemaChoice("AVRO", id=3), errors.SchemaNotFound),
        (SchemaChoice("AVRO", id=9), errors.SchemaNotFound),
        (SchemaChoice("AVRO", version=9), errors.SchemaNotFound),
        (SchemaChoice("AVRO", subject="none"), errors.SchemaNotFound),
        (SchemaChoice("AVRO", id=4), errors.SchemaInvalid),
        (SchemaChoice("YAML"), errors.InvalidRequest),
    ],
)
def test_what_excludes_itself_or_does_not_exist_is_said(
    serving: Any, choice: SchemaChoice, error: type[errors.HeadraceError]
) -> None:
    """Each conflict has its own error; an id of another subject counts as not found."""

    async def main() -> None:
        async with serving() as it:
            it.server.add("t-value", 1, INT)
            it.server.add("other", 3, LONG)
            it.server.add("t-value", 4, "{}", "JSON")
            with pytest.raises(errors.HeadraceError) as raised:
                await Codecs(it.client).for_writing(choice, "json", "t-value")
            assert type(raised.value) is error
            assert raised.value.status == 400

    asyncio.run(main())


def test_formats_without_schema_ignore_schema_fields_and_ask_nobody(serving: Any) -> None:
    """As the original."""

    async def main() -> None:
        async with serving() as it:
            for name in ("json", "String", "BINARY"):
                choice = SchemaChoice(name, text=INT, id=1, version=1)
                assert (await Codecs(it.client).for_writing(choice, "avro", "t-value")).schema_id is None
            assert it.server.asked == []

    asyncio.run(main())


def test_records_are_read_by_the_schema_they_name(serving: Any) -> None:
    """One reader serves many schemas; null stays null; each schema is asked for once."""

    async def main() -> None:
        async with serving() as it:
            it.server.add("a", 1, INT)
            it.server.add("b", 2, '"string"')
            reader = Codecs(it.client).for_reading("avro")
            stored = [header_of(1) + b"\x0a", None, header_of(2) + b"\x02x", header_of(1) + b"\x0c"]
            for _ in range(2):
                await reader.prepare(stored)
            assert [reader.decode(data) for data in stored] == [b"5", None, b'"x"', b"6"]
            assert len(it.server.asked) == 2

    asyncio.run(main())


def test_a_record_of_an_unknown_schema_is_a_decode_error_of_that_record_only(serving: Any) -> None:
    """It can go to the dead letter topic while its neighbours are delivered."""

    async def main() -> None:
        async with serving() as it:
            it.server.add("a", 1, INT)
            it.server.add("a", 4, "{}", "JSON")
            reader = Codecs(it.client).for_reading("AVRO")
            bad = [header_of(9) + b"x", header_of(4) + b"x", b"plain", header_of(1)]
            await reader.prepare([*bad, header_of(1) + b"\x0a"])
            for data in bad:
                with pytest.raises(errors.DecodeError):
                    reader.decode(data)
            assert reader.decode(header_of(1) + b"\x0a") == b"5"

    asyncio.run(main())


def test_while_the_registry_is_down_reading_waits_instead_of_failing_records(serving: Any) -> None:
    """An outage is not the record's fault."""

    async def main() -> None:
        async with serving(url="http://127.0.0.1:1") as it:
            with pytest.raises(errors.RegistryUnavailable):
                await Codecs(it.client).for_reading("avro").prepare([header_of(1) + b"\x0a"])

    asyncio.run(main())
