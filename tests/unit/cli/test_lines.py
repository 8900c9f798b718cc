from __future__ import annotations

import asyncio
import json
import os
from typing import Any
from unittest.mock import AsyncMock

import pytest
from click.testing import CliRunner

from headrace.cli import record_input
from headrace.cli.command_codecs import open_codecs
from headrace.cli.output import print_rows
from headrace.cli.produce_command import produce
from headrace.cli.record_input import read_lines
from headrace.cli.record_output import JsonLines, ShownBatch, Template, for_terminal
from headrace.config.kafka import SchemaRegistryConfig
from headrace.errors import HeadraceError, InvalidRequest
from headrace.formats.stored_values import StoredValues
from headrace.kafka import Admin
from headrace.records import OutgoingRecord, RecordBatch, TopicPartition
from headrace.runtime.invisible import escaped
from tests.command_line import headrace
from yaml_table import table


def to_bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode(errors="surrogateescape")


@pytest.mark.parametrize(
    ("words", "given", "expected", "problem"), [(*row, "")[:4] for row in table(__file__, "records")]
)
def test_input_becomes_records(
    monkeypatch: pytest.MonkeyPatch, words: str, given: str, expected: list[list[Any]], problem: str
) -> None:
    """A bad line is named, and those before it are sent."""
    sent: list[OutgoingRecord] = []

    async def send(_: Any, records: list[OutgoingRecord]) -> list[None]:
        sent.extend(records)
        return [None] * len(records)

    monkeypatch.setattr("headrace.kafka.Producer.produce", send)
    monkeypatch.setattr(Admin, "describe_topic", lambda *_: asyncio.sleep(0))
    done = CliRunner().invoke(produce, ["t", "-b", "localhost:1", *words.split()], input=to_bytes(given))
    rows = [[r.key, r.value, r.headers or [], r.partition, r.timestamp_ms] for r in sent]
    for row, (key, value, *more) in zip(rows, expected, strict=True):
        headers, partition, timestamp = [*more, *([], None, 0)[len(more) :]]
        assert row[:2] == [to_bytes(key), to_bytes(value)]
        assert row[2:] == [[(name, to_bytes(text)) for name, text in headers], partition, timestamp]
    assert done.exit_code == int(bool(problem))
    assert problem in str(done.exception)


def batch(key: bytes | None, value: bytes | None) -> RecordBatch:
    return RecordBatch(TopicPartition("t", 3), [7], [1000], [key], [value], [[("h", b"1"), ("n", None)]], [0])


def shown(name: str, value: bytes | None, key: bytes = b"k") -> ShownBatch:
    async def read() -> ShownBatch:
        async with open_codecs(SchemaRegistryConfig(url="http://127.0.0.1:1")) as codecs:
            side = StoredValues(codecs, name)
            await side.prepare([value])
            text = side.text_of([value])
            return ShownBatch(batch(key, value), key, side.shown([value]) if text is None else text, True)

    return asyncio.run(read())


@pytest.mark.parametrize(("name", "data", "text", "found"), [row[:4] for row in table(__file__, "shown")])
def test_values_are_printed_in_their_format(name: str, data: str | None, text: str, found: Any) -> None:
    """Strings as text, JSON as it is stored, binary as base64, and what is found by itself never ends the command."""
    value = to_bytes(data)
    record = shown(name, value)
    assert Template("%s\\n", terminal=False, exact=False)(record).decode() == text + "\n"
    row = json.loads(JsonLines(terminal=False)(record))
    assert (row["value"], row["key"], row["timestamp_type"], row["headers"][1]) == (
        found,
        "k",
        "log_append_time",
        ["n", None],
    )
    assert row.get("value_format") == ("binary" if found == "/wBh" else None)


@pytest.mark.parametrize(("template", "text"), table(__file__, "templates"))
def test_a_template_has_the_letters_of_kcat(template: str, text: str) -> None:
    """Bytes stay as they are, except on a terminal."""
    value = shown("auto", b"v\xff\x1b[2J")
    assert Template(template, terminal=False)(value) == to_bytes(text)
    assert Template("%s%S", terminal=False)(shown("auto", None)) == b"-1"
    assert not {b"\x1b", b"\xff"} & {bytes([each]) for each in Template(template, terminal=True)(value)}


def test_a_terminal_gets_no_control_characters_of_records() -> None:
    """Nor invisible ones, in key, value and headers; line ends, tabs and joiners stay. So in the console."""
    hostile = "\x1b[2J\x07\r\x9b1m\u202e\x7f\u200b\u2060\ufeff\U000e0041\x85".encode()
    record = shown("auto", b"a\tb\n" + hostile, hostile)
    record.batch.headers[0][0] = ("h", hostile)
    printed = Template("%D\t%k\t%s\n", terminal=True, exact=False)(record).decode()
    printed += Template("%h", terminal=True)(record).decode()
    assert printed.count("\\x1b[2J\\x07\\r\\x9b1m\\u202e\\x7f\\u200b\\u2060\\ufeff\\U000e0041\\x85") == 3
    row = JsonLines(terminal=True)(record).decode()
    assert json.loads(row)["key"].encode() == hostile
    for text in (printed, row):
        assert [each for each in text if not each.isprintable() and each not in "\t\n"] == []
    assert for_terminal("\u200d\ufe0f\t\n") == escaped("\u200d\ufe0f\t\n") == "\u200d\ufe0f\t\n"
    assert escaped("\x85\ufeff\ud83d\U000e0041") == r"\u0085\ufeff\ud83d\udb40\udc41"


@pytest.mark.parametrize(("words", "sentence"), table(__file__, "wrong_usage"))
def test_wrong_options_are_explained(capsys: pytest.CaptureFixture[str], words: str, sentence: str) -> None:
    """Before Kafka is asked."""
    assert headrace(*words.split(), "-b", "localhost:1") == 2
    assert sentence in capsys.readouterr().err


def test_lines_come_out_whole_however_the_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines cut by a buffer's end, Windows line ends and a last line without an end are whole; one too long ends it."""
    read, write = os.pipe()
    with os.fdopen(read, "rb") as file, os.fdopen(write, "wb", buffering=0) as pipe:

        async def feed() -> list[list[bytes]]:
            pipe.write(b"a\r\nb")
            chunks = read_lines(file)
            found = [await anext(chunks)]
            pipe.write(b"c\nd")
            found.append(await anext(chunks))
            monkeypatch.setattr(record_input, "MAX_LINE_BYTES", 10)
            pipe.write(b"x" * 11)
            with pytest.raises(InvalidRequest, match="longer than 10 bytes"):
                await anext(chunks)
            return found

        assert asyncio.run(feed()) == [[b"a"], [b"bc"]]


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


@pytest.mark.parametrize(
    ("words", "isolation"), [((), "read_committed"), (("-X", "isolation.level=read_uncommitted"), "read_uncommitted")]
)
def test_consume_reads_at_the_isolation_of_the_property(
    words: tuple[str, ...], isolation: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kafka's property has no option beside it that overrides it."""
    monkeypatch.setattr("headrace.cli.consume_command.find_topics", AsyncMock(return_value=[]))
    bounds = AsyncMock(side_effect=HeadraceError("enough"))
    monkeypatch.setattr("headrace.cli.consume_command.LogBounds.of", bounds)
    assert headrace("consume", "t", "-b", "k:1", *words) == 1
    assert capsys.readouterr().err == "enough\n"
    assert bounds.call_args.args[-1] == isolation
