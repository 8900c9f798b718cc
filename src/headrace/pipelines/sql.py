"""The SQL of a pipeline, read without Spark: which tables it reads, and certain mistakes.

The parser is sqlglot, of the extra `pipelines`. It does not know all of Spark's SQL (`WATERMARK ... DELAY OF`), so
only Spark itself refuses a query, and the names of tables are found by the words behind FROM and JOIN.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from headrace.pipelines.sinks import KafkaSink
from headrace.pipelines.spec import PipelineSpec

_TOKEN = re.compile(
    r"""
    (?P<skip>\s+ | --[^\n]* | /\*.*?\*/)
  | (?P<text>'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*")
  | `(?P<quoted>(?:[^`]|``)+)`
  | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<sign>.)
    """,
    re.VERBOSE | re.DOTALL,
)
_QUERY_STARTS = frozenset({"select", "with", "from", "table", "values", "("})
_NO_TABLE = frozenset({"values", "lateral", "select", "("})
_CLAUSE = re.compile(
    r"where|group|having|order|sort|cluster|distribute|limit|offset|window|union|except|intersect|minus|lateral|pivot"
    r"|unpivot|select|on|using|inner|left|right|full|cross|natural|semi|anti|watermark|tablesample"
)


def tables_read(sql: str) -> list[str]:
    """Return the names that follow FROM and JOIN, in lower case, in order of first use, without the text's own CTEs.

    A name with dots is returned whole.
    """
    words = list(_words(sql))
    own = set(_ctes(words))
    found = [name for at in _table_positions(words) if (name := _name_at(words, at)) and name not in own]
    return list(dict.fromkeys(found))


_STREAMING = re.compile(
    r"""
    (?P<kept>'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `(?:[^`]|``)+` | --[^\n]* | /\*.*?\*/)
  | \bSTREAM\s*\(\s*(?P<called>[\w.`]+)\s*\) | (?P<before>\b(?:FROM|JOIN)\s+ | ,\s*)STREAM\s+(?=[A-Za-z_`])
  | \bWATERMARK\s+.+?\s+DELAY\s+OF\s+INTERVAL\s+(?:'[^']*'|[\d.]+)
    (?:\s+(?:MICRO|MILLI)?(?:SECOND|MINUTE|HOUR|DAY|WEEK)S?\b)?
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)


def without_streaming(sql: str) -> str:
    """Return a query for tables that end, and for parsers that do not know STREAM and WATERMARK."""
    return _STREAMING.sub(lambda found: found["kept"] or found["called"] or found["before"] or "", sql)


def _words(sql: str) -> Iterator[str]:
    for match in _TOKEN.finditer(sql):
        if match["text"]:
            yield "''"
        elif not match["skip"]:
            yield (match["quoted"] or match["word"] or match["sign"]).lower()


def _ctes(words: list[str]) -> Iterator[str]:
    if "with" not in words:
        return
    for at, word in enumerate(words[:-1]):
        if word == "as" and words[at + 1] == "(" and at:
            name = at - 1
            if words[name] == ")":  # a list of column names in between
                name = _opening(words, name) - 1
            yield words[name]


def _opening(words: list[str], closing: int) -> int:
    depth = 0
    for at in range(closing, -1, -1):
        depth += (words[at] == ")") - (words[at] == "(")
        if depth == 0:
            return at
    return 0


def _table_positions(words: list[str]) -> Iterator[int]:
    """Yield where a table's name should begin."""
    queries = [True]  # per open parenthesis: whether it holds a query, so that FROM in it means a table
    listing = [False]  # ... and whether a comma in it separates tables
    for at, word in enumerate(words):
        if word == "(":
            queries.append(words[at + 1 : at + 2] != [] and words[at + 1] in _QUERY_STARTS)
            listing.append(False)
        elif word == ")" and len(queries) > 1:
            queries.pop()
            listing.pop()
        elif word == "join":
            listing[-1] = False
            yield at + 1
        elif word == "from" and queries[-1] and words[at - 1 : at] != ["distinct"]:
            listing[-1] = True
            yield at + 1
        elif word == "," and listing[-1]:
            yield at + 1
        elif _CLAUSE.fullmatch(word):
            listing[-1] = False


def _name_at(words: list[str], at: int) -> str | None:
    if words[at : at + 1] == ["stream"]:
        at += 2 if words[at + 1 : at + 2] == ["("] else 1
    if at >= len(words) or words[at] in _NO_TABLE or not re.match(r"\w", words[at]):
        return None
    name = words[at]
    while words[at + 1 : at + 2] == ["."] and at + 2 < len(words):
        name, at = f"{name}.{words[at + 2]}", at + 2
    called = words[at + 1 : at + 2] == ["("]
    return None if called else name


_STARTS = ("select", "with", "from", "table", "values", "map", "reduce")
_TYPES = re.findall(
    r"\w+",
    "string boolean byte tinyint short smallint int integer long bigint float real double decimal dec numeric char "
    "character varchar binary date timestamp timestamp_ntz timestamp_ltz interval array map struct variant void",
)
_WINDOW = re.compile(r"\bwindow(?=\s*\()", re.IGNORECASE)
"""Spark's function, which the parser takes for the clause of the same name."""


class SqlFinding(NamedTuple):
    """A problem, or a possible one, of a part of a pipeline."""

    path: tuple[str | int, ...]
    sentence: str
    is_problem: bool


def check_sql(spec: PipelineSpec) -> Iterator[SqlFinding]:
    """Yield the findings in the schemas, queries and keys of a pipeline."""
    try:
        parse = importlib.import_module("sqlglot").parse
    except ImportError:
        sentence = f"the SQL of pipeline {spec.name} is not checked: install headrace[pipelines]"
        yield SqlFinding((), sentence, False)
        return
    for name, source in spec.sources.items():
        if schema := getattr(source, "value_schema", None):
            yield from _check_schema(("sources", name, "schema"), schema, parse)
    for name, view in spec.views.items():
        if view.sql:
            yield from _check_query(("views", name), view.sql, parse)
    for name, flow in spec.flows.items():
        if flow.sql:
            yield from _check_query(("flows", name, "sql"), flow.sql, parse)
        for rule, each in flow.rules.items():
            yield from _warning(("flows", name, "rules", rule, "check"), f"SELECT {each.check}", parse)
        if isinstance(flow.sink, KafkaSink) and flow.sink.key:
            yield from _warning(("flows", name, "sink", "key"), f"SELECT {flow.sink.key}", parse)


def _check_query(path: tuple[str | int, ...], sql: str, parse: Any) -> Iterator[SqlFinding]:
    first = next(_words(sql), "")
    if first.isidentifier() and first not in _STARTS:
        sentence = f"begins with {first.upper()}, which begins no query{_near(first, _STARTS)}"
        yield SqlFinding(path, sentence, True)
    else:
        yield from _warning(path, sql, parse)


def _warning(path: tuple[str | int, ...], sql: str, parse: Any) -> Iterator[SqlFinding]:
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
