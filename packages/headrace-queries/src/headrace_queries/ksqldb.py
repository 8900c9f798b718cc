"""The requests and responses of ksqlDB's HTTP API: `/query`, `/query-stream` and `/close-query`.

Source: ksqlDB's public pages on its REST API.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from headrace.errors import HeadraceError
from headrace_queries.statement_text import StatementText

JSON: Final = "application/json"
KSQL_JSON: Final = "application/vnd.ksql.v1+json"
DELIMITED: Final = "application/vnd.ksqlapi.delimited.v1"
REQUEST_TYPES: Final = (JSON, KSQL_JSON)
"""Media types of request bodies. The body of `/close-query` may have none."""
BLANK_SECONDS: Final = 1.0
"""Silence of a push query after which the client is sent `Renderer.blank`. Clients end after some seconds of silence,
and notice a timeout of their own only when something arrives."""


class QueryBody(msgspec.Struct):
    """The body of `POST /query`. Unknown fields are ignored, as ksqlDB does."""

    ksql: str
    """One SELECT statement."""
    streamsProperties: dict[str, Any] = {}  # noqa: N815 ksqlDB's field
    """Properties of the query; `auto.offset.reset` is used."""
    sessionVariables: dict[str, Any] = {}  # noqa: N815
    """Values for `${name}` in the statement."""


class QueryStreamBody(msgspec.Struct):
    """The body of `POST /query-stream`. Unknown fields are ignored, as ksqlDB does."""

    sql: str
    """One SELECT statement."""
    properties: dict[str, Any] = {}
    """Properties of the query; `auto.offset.reset` is used."""
    sessionVariables: dict[str, Any] = {}  # noqa: N815
    """Values for `${name}` in the statement."""


class CloseQueryBody(msgspec.Struct):
    """The body of `POST /close-query`."""

    queryId: str  # noqa: N815
    """Id in the header of the response to the push query."""


class KsqlColumn(NamedTuple):
    """A column of a result."""

    name: str
    type: str
    """ksqlDB's name of the type."""


def result_columns(columns: Iterable[tuple[str, str]], statement: StatementText) -> list[KsqlColumn]:
    """Return the columns of a result as ksqlDB has them.

    Their names are in upper case, unless the statement has the name in quotes.

    Args:
        columns: Names, and types in DuckDB.
        statement: The statement that they are from.
    """
    return [KsqlColumn(name if name in statement.quoted else name.upper(), column_type(kind)) for name, kind in columns]


def starts_at_earliest(properties: Mapping[str, object]) -> bool:
    """Return whether the properties of a push query ask for the rows of the table before its changes."""
    names = ("auto.offset.reset", "ksql.streams.auto.offset.reset")
    return any(str(properties.get(name, "")).lower() == "earliest" for name in names)


def error_body(error: HeadraceError, statement: str = "") -> bytes:
    """Return ksqlDB's body for an error; its status is `error.status`. A statement is that which was refused."""
    return msgspec.json.encode(_error(error, statement))


def _error(error: HeadraceError, statement: str) -> dict[str, object]:
    bad_statement = bool(statement) and error.status == 400
    return {
        "@type": "statement_error" if bad_statement else "generic_error",
        "error_code": error.status * 100 + bad_statement,
        "message": error.description,
        **({"statementText": statement, "entities": []} if bad_statement else {}),
    }


class Renderer:
    """Writes one response, piece by piece; each method returns the bytes to send.

    The base class is the delimited format: a line with the header, and a line for each row.
    """

    media_type: ClassVar[str] = DELIMITED

    def __init__(self, *, push: bool) -> None:
        self._push = push
        self.blank = b"\n" if push else b" "
        """Bytes that mean nothing, between two rows. Those of a pull query do not begin a line."""

    def header(self, query_id: str, columns: Sequence[KsqlColumn]) -> bytes:
        """Begin the response."""
        names = [column.name for column in columns]
        header = {"queryId": query_id, "columnNames": names, "columnTypes": [column.type for column in columns]}
        return msgspec.json.encode(header) + b"\n"

    def rows(self, rows: Iterable[bytes]) -> bytes:
        """Return rows, each of which is the text of a JSON array without newlines."""
        return b"".join(row + b"\n" for row in rows)

    def end(self, *, limit_reached: bool = False) -> bytes:
        """End the response; `limit_reached` if the push query has a LIMIT, and sent as many rows."""
        return b""

    def error(self, error: HeadraceError) -> bytes:
        """End the response with an error instead."""
        return error_body(error) + b"\n"


class _ArrayRenderer(Renderer):
    """One JSON array: the header, and an array for each row."""

    media_type = JSON

    def header(self, query_id: str, columns: Sequence[KsqlColumn]) -> bytes:
        return b"[" + super().header(query_id, columns).rstrip()

    def rows(self, rows: Iterable[bytes]) -> bytes:
        return b"".join(b"," + row for row in rows)

    def end(self, *, limit_reached: bool = False) -> bytes:
        return b"]"

    def error(self, error: HeadraceError) -> bytes:
        return b"," + error_body(error) + b"]"


class _ObjectRenderer(Renderer):
    """One JSON array with an object in each line: the header, a row, the last message, or an error.

    Each line of a push query ends with a comma, so that a row is complete when it is sent. Clients read it by lines,
    and the newline at the end is a part of that.
    """

    media_type = KSQL_JSON

    def header(self, query_id: str, columns: Sequence[KsqlColumn]) -> bytes:
        schema = ", ".join(f"{_in_backticks(column.name)} {column.type}" for column in columns)
        return b"[" + self._line({"header": {"queryId": query_id, "schema": schema}}, first=True)

    def rows(self, rows: Iterable[bytes]) -> bytes:
        before, behind = (b"", b",\n") if self._push else (b",\n", b"")
        return b"".join(b'%b{"row":{"columns":%b}}%b' % (before, row, behind) for row in rows)

    def end(self, *, limit_reached: bool = False) -> bytes:
        if not self._push:
            return b"]\n"
        return b'{"finalMessage":"%b"}]\n' % (b"Limit Reached" if limit_reached else b"Query Completed")

    def error(self, error: HeadraceError) -> bytes:
        return self._line({"errorMessage": _error(error, "")}).removesuffix(b",\n") + b"]\n"

    def _line(self, content: object, *, first: bool = False) -> bytes:
        before, behind = (b"", b",\n") if self._push else (b"" if first else b",\n", b"")
        return before + msgspec.json.encode(content) + behind


def query_renderer(*, push: bool) -> Renderer:
    """Return the renderer for a response of `/query`; `push` if the statement has EMIT CHANGES."""
    return _ObjectRenderer(push=push)


def query_stream_renderer(accept: str, *, push: bool) -> Renderer:
    """Return the renderer for a response of `/query-stream`, by the request's header `Accept` (empty for none)."""
    formats: dict[str, type[Renderer]] = {DELIMITED: Renderer, JSON: _ArrayRenderer, KSQL_JSON: _ObjectRenderer}
    accepted = [part.partition(";")[0].strip().lower() for part in accept.split(",")]
    return next((formats[kind] for kind in accepted if kind in formats), Renderer)(push=push)


_TYPES: Final = {
    **dict.fromkeys(("TINYINT", "SMALLINT", "UTINYINT", "USMALLINT"), "INTEGER"),
    "UINTEGER": "BIGINT",
    "UBIGINT": "DECIMAL(20, 0)",
    **dict.fromkeys(("HUGEINT", "UHUGEINT"), "DECIMAL(39, 0)"),
    "FLOAT": "DOUBLE",
    "BLOB": "BYTES",
    "TIME WITH TIME ZONE": "TIME",
    **dict.fromkeys(("TIMESTAMP_S", "TIMESTAMP_MS", "TIMESTAMP_NS", "TIMESTAMP WITH TIME ZONE"), "TIMESTAMP"),
}
"""ksqlDB's names for types of DuckDB."""
_SAME: Final = ("BOOLEAN", "INTEGER", "BIGINT", "DOUBLE", "DATE", "TIME", "TIMESTAMP")
_NESTED: Final = re.compile(r"(MAP|STRUCT|DECIMAL)\((.*)\)", re.DOTALL)
_FIELD: Final = re.compile(r'\s*("(?:[^"]|"")*"|\w+) (.*)', re.DOTALL)
_PARTS: Final = re.compile(r'"(?:[^"]|"")*"|\'(?:[^\']|\'\')*\'|.', re.DOTALL)


def column_type(name: str) -> str:
    """Return ksqlDB's name for a type of DuckDB. Types that ksqlDB does not have are STRING, as in the rows."""
    name = name.strip()
    if name in _SAME:
        return name
    if name.endswith("]"):
        return f"ARRAY<{column_type(name[: name.rindex('[')])}>"
    nested = _NESTED.fullmatch(name)
    if not nested:
        return _TYPES.get(name, "STRING")
    kind, inside = nested.groups()
    if kind == "DECIMAL":
        return f"DECIMAL({', '.join(part.strip() for part in inside.split(','))})"
    parts = _split(inside)
    if kind == "MAP":
        return f"MAP<{', '.join(map(column_type, parts))}>"
    fields = [found.groups() for part in parts if (found := _FIELD.fullmatch(part))]
    return f"STRUCT<{', '.join(f'{_in_backticks(_unquoted(field))} {column_type(kind)}' for field, kind in fields)}>"


def _split(text: str) -> list[str]:
    """Split at the commas that are in no bracket and no quotes."""
    parts, depth = [""], 0
    for piece in _PARTS.findall(text):
        depth += (piece == "(") - (piece == ")")
        if piece == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _unquoted(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _in_backticks(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"
