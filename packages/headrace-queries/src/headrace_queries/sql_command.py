"""`headrace sql`: one statement over topics or tables, printed as a table, JSON, CSV or Parquet; or a prompt."""

import csv
import functools
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from headrace.cli.api import Api
from headrace.cli.cluster_options import ClusterSettings, connection_options
from headrace.cli.global_options import ROW_FORMATS, HeadraceCommand, uses
from headrace.cli.options import span_options
from headrace.cli.output import print_columns
from headrace.cli.trust import trust
from headrace.config.format_list import FORMATS
from headrace.runs.selection import Span
from headrace_queries.sql_sources import ServerTables, SliceOptions, SqlRows, SqlSource, TopicSlices

_MOST_SHOWN: Final = 1_000
"""Rows of a table for people, which is aligned as a whole."""
_FORMAT: Final = click.Choice([*FORMATS])


@click.command(cls=HeadraceCommand)
@click.argument("statement", required=False)
@click.option(
    "--last", "most", type=click.IntRange(1), default=10_000, show_default=True, help="Most records of each topic."
)
@span_options
@click.option("--value-format", "--format", "value_format", type=_FORMAT, help="By default as they look.")
@click.option("--key-format", type=_FORMAT, help="By default as they look.")
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=10.0, help="Seconds of a statement there.")
@uses("url", "ca")
@functools.partial(connection_options, registry=True, formats=ROW_FORMATS)
def sql(
    statement: str | None, url: str | None, ca: Path | None, timeout: float, cluster: ClusterSettings, **others: Any
) -> None:
    """Run one SELECT of DuckDB's SQL over topics, or over the tables of a running Headrace (--url).

    Each table of the statement is a topic: its newest records (--last), or those of a part of it. Names with dots or
    dashes are quoted: "orders.eu". The columns are the fields of the value, and key, partition, offset, timestamp and
    headers; a value that is not an object is the column value. The formats are those that the records look like.

    Without STATEMENT it reads statements that end with ; from a prompt or standard input. \\d lists tables, \\d NAME
    lists columns, \\q ends it.

    Example: headrace sql 'SELECT carrier, count(*) FROM orders GROUP BY 1'
    """
    output = others["output"]
    if output == "parquet" and (statement is None or sys.stdout.isatty()):
        raise click.UsageError("--output parquet needs a STATEMENT, and a file: headrace sql ... > rows.parquet")
    source = _source(cluster, Api(url, tls=trust(ca)) if url else None, timeout, **others)
    if statement is not None:
        print_statement(source, statement, output)
        return
    from headrace_queries.sql_prompt import SqlPrompt

    SqlPrompt(source, lambda text: print_statement(source, text, output)).run()


def _source(
    cluster: ClusterSettings,
    api: Api | None,
    timeout: float,
    *,
    span: Span,
    most: int,
    key_format: str | None,
    value_format: str | None,
    output: str,
) -> SqlSource:
    if api is None:
        return TopicSlices(cluster, SliceOptions(span, most, key_format, value_format))
    if span != Span() or key_format or value_format:
        raise click.UsageError("--url asks whole tables: write a WHERE instead of selecting records or formats")
    return ServerTables(api, timeout)


def print_statement(source: SqlSource, statement: str, output: str) -> None:
    """Run a statement and print its rows.

    Raises:
        HeadraceError: It is rejected.
    """
    statement = statement.strip().rstrip(";")
    if output == "parquet":
        source.write_parquet(statement, sys.stdout.buffer)
        return
    found = source.rows(statement)
    if output == "json":
        _print_json(found.rows)
    elif output == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(found.names)
        writer.writerows(["" if cell is None else cell for cell in cells(row)] for row in found.rows)
    else:
        _print_table(found)


def _print_json(rows: Iterator[bytes]) -> None:
    before = "["
    for row in rows:
        sys.stdout.write(f"{before}\n  {row.decode()}")
        before = ","
    sys.stdout.write("[]\n" if before == "[" else "\n]\n")


def _print_table(found: SqlRows) -> None:
    lines = [["-" if cell is None else cell for cell in cells(row)] for row in islice(found.rows, _MOST_SHOWN)]
    print_columns([found.names, *lines])
    if next(found.rows, None) is not None:
        text = f"more than {_MOST_SHOWN} rows: only the first are shown; add a LIMIT, or pass --output csv or json"
        click.echo(text, err=True)


def cells(row: bytes) -> list[str | None]:
    """Return the values of a JSON object as texts: strings without quotes, other values as JSON, None for null."""
    found = msgspec.json.decode(row, type=dict[str, msgspec.Raw])
    return [_text(bytes(value)) for value in found.values()]


def _text(value: bytes) -> str | None:
    if value == b"null":
        return None
    return msgspec.json.decode(value, type=str) if value[:1] == b'"' else value.decode()
