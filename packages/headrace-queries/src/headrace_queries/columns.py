"""The columns of a table: their names and types in DuckDB, and how a value's JSON text becomes a row."""

from collections.abc import Sequence
from functools import cached_property
from typing import Final, NamedTuple

import sqlglot
from sqlglot import expressions as exp

from headrace.config.format_list import SCHEMA_TYPES, STRINGS
from headrace.config.spelling import nearest
from headrace.errors import ConfigError
from headrace_queries.table_config import TableConfig

KEY, PARTITION, OFFSET, TIMESTAMP, HEADERS = "key", "partition", "offset", "timestamp", "headers"
_BUILT_IN: Final = {
    PARTITION: "INTEGER",
    OFFSET: "BIGINT",
    TIMESTAMP: "TIMESTAMP WITH TIME ZONE",
    HEADERS: "STRUCT(key VARCHAR, value BLOB)[]",
}
_LONGEST_MS: Final = 9_223_372_022_400_000
"""The times of DuckDB end this long before and after 1970: it counts in microseconds."""
_ANY: Final = ("text", "varchar", "json")
"""Any JSON has a form in these types."""
_TYPES: Final = (
    *("BOOLEAN", "TINYINT", "SMALLINT", "INT", "BIGINT", "FLOAT", "DOUBLE", "DECIMAL", "STRING", "BINARY", "DATE"),
    *("TIMESTAMP", "ARRAY", "MAP", "STRUCT", "JSON"),
)
"""The usual types, for advice."""
STORED: Final = "record_"
"""Begins the names under which a file has the built-in columns."""


class Column(NamedTuple):
    """A column of a table."""

    name: str
    type: str
    """In DuckDB."""


def whole_type(format_name: str) -> str:
    """Return the type of a column that holds a whole key or value of a format."""
    if format_name == "binary":
        return "BLOB"
    return "VARCHAR" if format_name in STRINGS else "JSON"


def quoted(name: str) -> str:
    """Return a name as SQL has it."""
    return '"' + name.replace('"', '""') + '"'


def declared(text: str) -> list[Column]:
    """Return columns that are written as in CREATE TABLE, with the names of types that Spark has.

    Raises:
        ConfigError: The text is not a list of columns.
    """
    try:
        table = sqlglot.parse_one(f"CREATE TABLE t ({text})", read="spark")
    except sqlglot.errors.SqlglotError as cause:
        raise ConfigError(f"schema is not valid{_position_of(cause)} Write it as: item STRING, n BIGINT") from cause
    parts = table.this.expressions if isinstance(table.this, exp.Schema) else []
    if not parts or not all(isinstance(part, exp.ColumnDef) and part.kind for part in parts):
        advice = "write it as: item STRING, n BIGINT. A name that is a word of SQL is in backticks"
        raise ConfigError(f"schema {text[:100]!r} is not a list of columns: {advice}")
    for part in parts:
        for rule in part.constraints:
            if not isinstance(rule.kind, exp.CommentColumnConstraint):
                what = rule.sql("spark")[:60]
                raise ConfigError(f"column {part.name} has {what}, which is not kept: write its name and type alone")
        if any(kind.is_type("array") and not kind.expressions for kind in part.kind.find_all(exp.DataType)):
            raise ConfigError(f"column {part.name} has an ARRAY without the type of its elements: write ARRAY<STRING>")
    found = [Column(part.name, part.kind.sql("duckdb")) for part in parts]
    _check(found)
    return found


def _position_of(cause: sqlglot.errors.SqlglotError) -> str:
    """Return where a schema is not valid, and the type that was probably intended."""
    errors = cause.errors if isinstance(cause, sqlglot.errors.ParseError) else []
    found = str(errors[0]["highlight"] or "") if errors and errors[0]["end_context"] else ""
    if not found:
        return " at its end."
    near = nearest(found, _TYPES, 0.8)
    return f" at {found[:40]!r}" + (f": did you mean {near}?" if near else ".")


def of_fields(text: str) -> list[Column]:
    """Return the columns of fields as a schema in the registry gives them: `item`: STRING, `n`: BIGINT.

    Raises:
        ConfigError: A table cannot have such columns.
    """
    fields = exp.DataType.build(f"STRUCT<{text}>", dialect="spark").expressions
    found = [Column(field.name, field.kind.sql("duckdb")) for field in fields]
    _check(found)
    return found


def _check(columns: Sequence[Column]) -> None:
    names: dict[str, str] = {}
    for column in columns:
        other = names.setdefault(column.name.lower(), column.name)
        if other != column.name or [each.name for each in columns].count(column.name) > 1:
            raise ConfigError(f"schema has column {column.name} twice (SQL ignores case): rename or remove one")
        if column.name.lower().startswith(STORED):
            raise ConfigError(f"schema has column {column.name}: names that begin with {STORED} are Headrace's own")
        if "BLOB" in column.type and column.type != "BLOB":
            raise ConfigError(f"column {column.name} has BINARY inside of another type: declare that part as STRING")


class Columns:
    """The columns of one table."""

    def __init__(self, config: TableConfig, values: Sequence[Column] | None) -> None:
        """Take the columns of the value; None for a table that has the value in one column."""
        self.values = [Column("value", whole_type(config.value_format))] if values is None else [*values]
        self._whole = values is None
        self.built_in = [Column(STORED + KEY, whole_type(config.key_format))]
        self.built_in += [Column(STORED + name, kind) for name, kind in _BUILT_IN.items()]

    @property
    def stored(self) -> list[Column]:
        """All columns as the file has them."""
        return [*self.built_in, *self.values]

    @property
    def shown(self) -> list[tuple[str, str]]:
        """All columns in the order of the table: the stored name, and the name in statements.

        A column of the value hides a built-in one of the same name, which keeps its stored name then.
        """
        taken = {column.name.lower() for column in self.values}
        plain = [(column.name, column.name.removeprefix(STORED)) for column in self.built_in]
        built_in = [(stored, stored if name in taken else name) for stored, name in plain]
        return [built_in[0], *((column.name, column.name) for column in self.values), *built_in[1:]]

    @property
    def key(self) -> str:
        """Name of the column of the key in statements."""
        return self.shown[0][1]

    @property
    def view(self) -> str:
        """The list of a SELECT that shows the stored columns under their names in statements."""
        return ", ".join(f"{quoted(stored)} AS {quoted(name)}" for stored, name in self.shown)

    @property
    def parsed_key(self) -> str:
        """The expression that makes a key of the column `key`; NULL if it is not of its format."""
        return f"TRY_CAST(key AS {self.built_in[0].type})"

    @property
    def parsed(self) -> str:
        """The expression that makes a row of the column `value` of JSON text; NULL if it is not such a row."""
        if self._whole:
            return f"TRY_CAST(value AS {self.values[0].type})"
        return f"TRY_CAST(TRY_CAST(value AS JSON) AS {self._row})"

    @property
    def _row(self) -> str:
        fields = (f"{quoted(c.name)} {'VARCHAR' if c.type == 'BLOB' else c.type}" for c in self.values)
        return f"STRUCT({', '.join(fields)})"

    @cached_property
    def misfit(self) -> str:
        """The condition that a record with a value is corrupt; `r` is what `parsed` has made."""
        if self._whole:
            return "r IS NULL"
        wrong = _misfit(exp.DataType.build(self._row, dialect="duckdb"), "r", "value", "$")
        bytes_ = "".join(
            f" OR (r.{quoted(c.name)} IS NOT NULL AND {cell} IS NULL)"
            for c, cell in zip(self.values, self.cells, strict=True)
            if c.type == "BLOB"
        )
        # CASE, because the functions of JSON fail at text that is not JSON, of which no row was made.
        return f"CASE WHEN r IS NULL THEN true ELSE {wrong}{bytes_} END"

    @property
    def cells(self) -> list[str]:
        """The expressions of the columns of the value, of `r`."""
        if self._whole:
            return ["r"]
        return [
            f"TRY(from_base64(r.{quoted(c.name)}))" if c.type == "BLOB" else f"r.{quoted(c.name)}" for c in self.values
        ]


TIME: Final = (
    f"CASE WHEN timestamp BETWEEN -{_LONGEST_MS} AND {_LONGEST_MS} THEN make_timestamptz(timestamp * 1000) END"
)
"""The expression of the time of a record, of its milliseconds; NULL beyond the times that DuckDB has."""


def _misfit(kind: exp.DataType, row: str, text: str, path: str, depth: int = 0) -> str:
    """Return the condition that a part of JSON is not of its type at any depth; DuckDB has made NULL of such a part.

    Args:
        row: The expression of what was made of the part.
        text: The expression of the JSON; the part is at `path` of it.
        depth: Of lambdas around this.
    """
    if kind.is_type(*_ANY):
        return "false"
    at = "'" + path.replace("'", "''") + "'"
    # CASE rather than AND, so that the text is only parsed again where a cell is null.
    lost = f"WHEN {row} IS NULL THEN coalesce(json_type({text}, {at}), 'NULL') <> 'NULL'"
    if kind.is_type("struct"):
        fields = [
            (f"{row}.{quoted(field.name)}", field.kind, f"{path}.{_step(field.name)}") for field in kind.expressions
        ]
        wrong = " OR ".join(_misfit(of, part, text, where, depth) for part, of, where in fields)
        # Any other JSON than an object makes a row of nulls.
        nothing = " AND ".join(f"{part} IS NULL" for part, _, _ in fields)
        other = f"CASE WHEN {nothing} THEN json_type({text}, {at}) <> 'OBJECT' ELSE false END"
        return f"CASE {lost} WHEN {other} THEN true ELSE {wrong} END"
    if kind.is_type("array", "list", "map") and kind.expressions and not kind.expressions[-1].is_type(*_ANY):
        inner = kind.expressions[-1]
        parts = f"map_values({row})" if kind.is_type("map") else row
        every = "'" + f"{path}{'.*' if kind.is_type('map') else '[*]'}".replace("'", "''") + "'"
        name = f"x{depth}"
        suspects = f"len(list_filter({parts}, lambda {name}: {_has_null(inner, name, depth + 1)})) > 0"
        wrong_part = _misfit(inner, f"{name}[1]", f"{name}[2]", "$", depth + 1)
        pairs = f"list_zip({parts}, json_extract({text}, {every}))"
        found = f"len(list_filter({pairs}, lambda {name}: {wrong_part})) > 0"
        return f"CASE {lost} WHEN {suspects} THEN {found} ELSE false END"
    return f"CASE {lost} ELSE false END"


def _has_null(kind: exp.DataType, row: str, depth: int) -> str:
    """Return the condition that a part, or a part of it at any depth, is NULL."""
    found = [f"{row} IS NULL"]
    if kind.is_type("struct"):
        found += [_has_null(field.kind, f"{row}.{quoted(field.name)}", depth) for field in kind.expressions]
    elif kind.is_type("array", "list", "map") and kind.expressions:
        parts = f"map_values({row})" if kind.is_type("map") else row
        inner = _has_null(kind.expressions[-1], f"x{depth}", depth + 1)
        found.append(f"len(list_filter({parts}, lambda x{depth}: {inner})) > 0")
    return f"({' OR '.join(found)})"


def _step(name: str) -> str:
    """Return the step of a JSON path to a field."""
    return '"' + name.replace("\\", "\\\\").replace('"', '\\"') + '"'


def needs_registry(config: TableConfig) -> bool:
    """Whether the columns of a table are in the schema registry."""
    return config.value_schema is None and config.value_format in SCHEMA_TYPES
