"""Checks the SQL of a pipeline without Spark: certain mistakes are problems, what the parser cannot read is a warning.

The parser is sqlglot, of the extra `pipelines`. It does not know all of Spark's SQL (`WATERMARK ... DELAY OF`), so
only Spark itself refuses a query.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.pipelines.spec import PipelineSpec
from headrace.pipelines.sql_names import first_word

_STARTS = ("select", "with", "from", "table", "values", "map", "reduce")
_TYPES = re.findall(
    r"\w+",
    "string boolean byte tinyint short smallint int integer long bigint float real double decimal dec numeric char "
    "character varchar binary date timestamp timestamp_ntz timestamp_ltz interval array map struct variant void",
)
_WINDOW = re.compile(r"\bwindow(?=\s*\()", re.IGNORECASE)
"""Spark's function, which the parser takes for the clause of the same name."""


class SqlFinding(NamedTuple):
    """What is wrong, or may be, with a part of a pipeline."""

    path: tuple[str | int, ...]
    sentence: str
    is_problem: bool


def check_sql(spec: PipelineSpec) -> Iterator[SqlFinding]:
    """Yield what is found in the schemas, queries and keys of a pipeline."""
    try:
        parse = importlib.import_module("sqlglot").parse
    except ImportError:
        sentence = f"the SQL of pipeline {spec.name} is not checked: install headrace[pipelines]"
        yield SqlFinding((), sentence, False)
        return
    for name, source in spec.sources.items():
        yield from _check_schema(("sources", name, "schema"), source.value_schema, parse)
    for name, sql in spec.views.items():
        yield from _check_query(("views", name), sql, parse)
    for name, flow in spec.flows.items():
        yield from _check_query(("flows", name, "sql"), flow.sql, parse)
        if flow.sink.key:
            yield from _doubt(("flows", name, "sink", "key"), f"SELECT {flow.sink.key}", parse)


def _check_query(path: tuple[str | int, ...], sql: str, parse: Any) -> Iterator[SqlFinding]:
    first = first_word(sql)
    if first.isidentifier() and first not in _STARTS:
        sentence = f"begins with {first.upper()}, which begins no query{_near(first, _STARTS)}"
        yield SqlFinding(path, sentence, True)
    else:
        yield from _doubt(path, sql, parse)


def _doubt(path: tuple[str | int, ...], sql: str, parse: Any) -> Iterator[SqlFinding]:
    if cause := _failure(_WINDOW.sub("window_", sql), parse):
        where = f" near {cause['highlight']} in line {cause['line']} of it" if "highlight" in cause else ""
        sentence = f"may be no SQL of Spark: {cause['description']}{where}. Spark decides when the pipeline starts"
        yield SqlFinding(path, sentence, False)


def _check_schema(path: tuple[str | int, ...], schema: str, parse: Any) -> Iterator[SqlFinding]:
    known_schema = re.sub(r"\bvoid\b", "int", schema, flags=re.IGNORECASE)  # the one type the parser does not know
    if cause := _failure(f"CREATE TABLE t ({known_schema})", parse):
        word = str(cause.get("highlight", ""))
        what = f"has {word}, which is no type of Spark or not expected here" if word else cause["description"]
        yield SqlFinding(path, f"{what}{_near(word.lower(), _TYPES)}", True)


def _failure(sql: str, parse: Any) -> dict[str, Any] | None:
    """Return the parser's first error as it describes it, None if it reads the text."""
    errors = importlib.import_module("sqlglot.errors")
    try:
        parse(sql, dialect="spark")
    except errors.SqlglotError as cause:
        found: list[dict[str, Any]] = getattr(cause, "errors", None) or [{"description": str(cause)}]
        return found[0]
    return None


def _near(word: str, known: tuple[str, ...] | list[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f": did you mean {near[0].upper()}?" if near else ": correct it"
