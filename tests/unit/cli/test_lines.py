from __future__ import annotations

import asyncio
import io
import os
from typing import Any

import pytest

from headrace.cli import produce_consume as records_module
from headrace.cli.output import print_rows
from headrace.cli.produce_consume import encode_lines, encoder, json_to_line, open_codecs, read_lines
from headrace.cli.replay_jobs import print_job
from headrace.config.kafka import SchemaRegistryConfig
from headrace.errors import InvalidRequest
from headrace.records import OutgoingRecord


def encode(lines: list[bytes], value_format: str = "string", keys: bool = False) -> Any:
    async def make() -> Any:
        async with open_codecs(SchemaRegistryConfig()) as codecs:
            encode_key = await encoder(codecs, "string", "t-key") if keys else None
            return encode_key, await encoder(codecs, value_format, "t-value")

    return encode_lines("t", lines, 0, *asyncio.run(make()))


def decode(data: bytes | None, name: str) -> str:
    async def read() -> str:
        async with open_codecs(SchemaRegistryConfig()) as codecs:
            return json_to_line(codecs.for_reading(name).decode(data))

    return asyncio.run(read())


@pytest.mark.parametrize(
    ("name", "data", "shown"),
    [
        ("string", None, "null"),
        ("string", b"null", '"null"'),
        ("string", b'"null"', r'"\"null\""'),
        ("string", b"nulls", "nulls"),
        ("string", b"", ""),
        ("string", 'tab\t"\u00e9"'.encode(), 'tab\t"\u00e9"'),
        ("json", b'{"a": 1.50}', '{"a": 1.50}'),
        ("json", None, "null"),
        ("binary", b"\x00\xff", "AP8="),
    ],
)
def test_values_are_printed_in_their_format(name: str, data: bytes | None, shown: str) -> None:
    """Strings as text, JSON as it is stored, binary as base64; only a text that would read as null has quotes."""
    assert decode(data, name) == shown


def test_lines_become_records() -> None:
    """Each line is a value; empty lines are passed over."""
    assert encode([b"a", b"", b"\xc3\xa9"]) == (
        [OutgoingRecord("t", None, b"a"), OutgoingRecord("t", None, b"\xc3\xa9")],
        None,
    )
    assert encode([b'{"a": 1.50}'], "json")[0] == [OutgoingRecord("t", None, b'{"a": 1.50}')]
    assert encode([b"AP8="], "binary")[0] == [OutgoingRecord("t", None, b"\x00\xff")]
    assert encode([b"k\tv\tw"], keys=True)[0] == [OutgoingRecord("t", b"k", b"v\tw")]


@pytest.mark.parametrize(
    ("line", "value_format", "keys", "sentence"),
    [
        (b"{", "json", False, "not JSON text"),
        (b"\xff", "string", False, "not UTF-8 text"),
        (b"?", "binary", False, "BINARY takes"),
        (b"no tab", "string", True, "requires a tab between key and value"),
    ],
)
def test_a_bad_line_is_named_and_lines_before_it_are_sent(
    line: bytes, value_format: str, keys: bool, sentence: str
) -> None:
    """The error has the number of the line, and later lines are not sent."""
    good = {"json": b"1", "string": b"a\tb", "binary": b"AA=="}[value_format]
    records, problem = encode([good, line, good], value_format, keys)
    assert len(records) == 1
    assert problem.parameters["line"] == 2
    assert sentence in problem.description
    assert "This line and later ones were not sent" in problem.description


def test_lines_come_out_whole_however_the_bytes_arrive() -> None:
    """Lines cut by a buffer's end, Windows line ends and a last line without an end are whole."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as file, os.fdopen(write, "wb", buffering=0) as pipe:

        async def feed() -> list[list[bytes]]:
            pipe.write(b"a\r\nb")
            chunks = read_lines(file)
            found = [await anext(chunks)]
            pipe.write(b"c\nd")
            found.append(await anext(chunks))
            pipe.close()
            return [*found, *[lines async for lines in chunks]]

        assert asyncio.run(feed()) == [[b"a"], [b"bc"], [b"d"]]


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is no text does not fill the memory."""
    monkeypatch.setattr(records_module, "MAX_LINE_BYTES", 10)
    with pytest.raises(InvalidRequest, match="longer than 10 bytes"):
        asyncio.run(anext(read_lines(io.BytesIO(b"x" * 11))))


def test_rows_are_columns_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Text aligns columns, shows switches as words and escapes control characters; JSON keeps types."""
    rows = [{"topic": "a", "in_sync": [1, 2], "errors": {}}, {"topic": "longer", "in_sync": [], "errors": {"E": 2}}]
    print_rows(rows, "text", "none")
    assert capsys.readouterr().out == "TOPIC   IN SYNC  ERRORS\na       1, 2     -\nlonger           E: 2\n"
    print_rows(rows[:1], "json", "none")
    assert capsys.readouterr().out.replace("\n", "").replace(" ", "") == '[{"topic":"a","in_sync":[1,2],"errors":{}}]'
    print_rows([{"plate": "B\x1b[2J 1\nready", "running": True, "ready": False}], "text", "none")
    assert capsys.readouterr().out == "PLATE              RUNNING  READY\nB\\x1b[2J 1\\nready  yes      no\n"
    print_rows([], "text", "none")
    print_rows([], "json", "none")
    assert capsys.readouterr().out == "none\n[]\n"


def test_how_far_a_job_is_waits_until_its_size_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    """A job that has only begun, or was refused, has counted nothing yet."""
    job = {"id": "redrive-1", "kind": "redrive", "state": "failed", "spec": {"topic": "t.dlq"}, "by": "ann"}
    job |= {"since": "now", "message": "nothing matches"}
    print_job({**job, "progress": {"done": 0}}, "text")
    assert "done" not in capsys.readouterr().out
    print_job({**job, "progress": {"done": 0, "total": 2}}, "text")
    assert "done      0 of 2" in capsys.readouterr().out
