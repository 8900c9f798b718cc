"""The fields of `POST /ksqldb/active`, light-4j's way to run one statement of ksqlDB."""

from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal

import msgspec

from headrace.errors import HeadraceError, StatementRejected
from headrace_queries.ksqldb import KsqlColumn
from headrace_queries.statement_text import StatementText, read_statement

TIMEOUT_SECONDS: Final = 3.0
"""Longest wait for the rows."""
_PREFIX: Final = "Ksql execution error: "
_decode_row = msgspec.json.Decoder(list[msgspec.Raw]).decode


class ActiveQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /ksqldb/active`."""

    query: str
    r"""One SELECT statement; `\'` means `'`."""
    offset: Literal["earliest", "latest"] | None = None
    """Where a push query starts."""
    queryType: Literal["pull", "push"] = "pull"  # noqa: N815 light-4j's field
    """A statement with EMIT CHANGES is a push query."""
    deserializationError: bool | None = None  # noqa: N815
    """Whether ksqlDB fails at a record that it cannot read. Tables of Headrace count such records."""
    tableScanEnable: bool | None = None  # noqa: N815
    """Whether ksqlDB may read a whole table. Headrace always may."""
    properties: dict[str, Any] = {}
    """Further properties of the query."""

    @property
    def text(self) -> str:
        """The statement as ksqlDB reads it."""
        return self.query.replace("\\'", "'")

    def statement(self) -> StatementText:
        """Return the statement.

        Raises:
            StatementRejected: See `read_statement`.
            StatementRejected: `queryType` is that of another kind of statement.
        """
        statement = read_statement(self.text, ksqldb=True)
        if statement.is_push and self.queryType == "pull":
            raise StatementRejected(
                _PREFIX + "the statement has EMIT CHANGES: set queryType push, or remove EMIT CHANGES"
            )
        if not statement.is_push and self.queryType == "push":
            raise StatementRejected(_PREFIX + "a push query ends with EMIT CHANGES: add it, or set queryType pull")
        return statement

    def query_properties(self) -> dict[str, Any]:
        """Return the properties of the query: those of `properties`, and those of the fields, which have priority."""
        fields = {
            "auto.offset.reset": self.offset,
            "fail.on.deserialization.error": self.deserializationError,
            "ksql.query.pull.table.scan.enabled": self.tableScanEnable,
        }
        return {**self.properties, **{name: value for name, value in fields.items() if value is not None}}


def objects(columns: Sequence[KsqlColumn], rows: Iterable[bytes]) -> bytes:
    """Return the response: an array with an object for each row, which is the text of a JSON array."""
    names = [msgspec.json.encode(column.name) + b":" for column in columns]
    fields = (zip(names, _decode_row(row), strict=True) for row in rows)
    return b"[" + b",".join(b"{" + b",".join(name + value for name, value in row) + b"}" for row in fields) + b"]"


def refused(error: HeadraceError) -> StatementRejected:
    """Return the error of a statement that could not be executed, whatever the cause."""
    if isinstance(error, StatementRejected) and error.description.startswith(_PREFIX):
        return error
    return StatementRejected(_PREFIX + error.description, **error.parameters)
