"""`headrace sql`: how rows are printed, what its prompt does, and which options go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO

import pytest

from headrace_queries.sql_command import print_statement
from headrace_queries.sql_sources import SqlRows
from tests.command_line import headrace
from yaml_table import table

ROW = b'{"text":"a\\nb, \\"c\\"","n":0.10,"none":null,"yes":true,"list":[1,2]}'
PRINTED = {
    "text": 'text         n     none  yes   list\na\\nb, "c"  0.10  -     true  [1,2]\n',
    "csv": 'text,n,none,yes,list\n"a\nb, ""c""",0.10,,true,"[1,2]"\n',
}


class FakeSource:
    """A source of one row, whose tables have the given columns."""

    def __init__(self, *rows: bytes) -> None:
        self.asked: list[str] = []
        self._rows = rows
        self.known = {"orders.eu": [("amount", "DOUBLE")]}

    def rows(self, sql: str) -> SqlRows:
        self.asked.append(sql)
        return SqlRows(["text", "n", "none", "yes", "list"], iter(self._rows))

    def write_parquet(self, sql: str, file: IO[bytes]) -> None:
        file.write(b"PAR1")

    def tables(self) -> dict[str, list[tuple[str, str]]]:
        return self.known

    def columns(self, table: str) -> list[tuple[str, str]]:
        return self.known[table]


def test_rows_are_printed_without_losing_digits(capsys: pytest.CaptureFixture[str]) -> None:
    """In each form; without rows the names are left."""
    for form in ("text", "csv"):
        print_statement(FakeSource(ROW), "SELECT 1;", form)
        assert capsys.readouterr().out.split() == PRINTED[form].split()
    print_statement(FakeSource(ROW, ROW), "SELECT 1", "json")
    out = capsys.readouterr().out
    assert json.loads(out) == [json.loads(ROW)] * 2
    assert '"n":0.10' in out
    print_statement(FakeSource(), "SELECT 1", "json")
    assert json.loads(capsys.readouterr().out) == []
    print_statement(FakeSource(), "SELECT 1", "csv")
    assert capsys.readouterr().out == "text,n,none,yes,list\n"


@pytest.mark.parametrize(("words", "problem"), table(__file__, "wrong_usage"))
def test_wrong_usage(
    words: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before Kafka or a server gets a request."""
    monkeypatch.chdir(tmp_path)
    assert headrace("sql", *words) == 2
    assert problem in " ".join(capsys.readouterr().err.split())
