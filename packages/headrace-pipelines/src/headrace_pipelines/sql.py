"""The SQL of a pipeline, read without Spark: which tables it reads, and mistakes that are certain.

The parser is sqlglot, of the extra `pipelines`. It does not know all of Spark's SQL, so what it cannot parse is only a
warning, and Spark decides.
"""

import contextlib
import csv
import functools
import importlib.util
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.config.spelling import nearest
from headrace_pipelines.sources import CHANGE_COLUMNS, TableSource
from headrace_pipelines.spec import PipelineSpec

_STREAMING = re.compile(
    r"""
    (?P<kept>'(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" | `(?:[^`]|``)+` | --[^\n]* | /\*.*?\*/)
  | \bSTREAM\s*\(\s*(?P<called>[\w.`]+)\s*\) | (?P<before>\b(?:FROM|JOIN)\s+ | ,\s*)STREAM\s+(?=[A-Za-z_`])
  | \bWATERMARK\s+.+?\s+DELAY\s+OF\s+INTERVAL\s+(?:'[^']*'|[\d.]+)
    (?:\s+(?:MICRO|MILLI)?(?:SECOND|MINUTE|HOUR|DAY|WEEK)S?\b)?
    """,
    re.VERBOSE | re.DOTALL | re.IGNORECASE,
)
_WATERMARK = re.compile(r"(\w+)\s*\)?\s+WATERMARK\s+(\w+)\s+DELAY", re.IGNORECASE)
_TABLE = re.compile(r"\b(?:FROM|JOIN)\s+([\w.]+)", re.IGNORECASE)
_WINDOW = re.compile(r"\bwindow(?=\s*\()", re.IGNORECASE)
"""Spark's function, which the parser takes for the clause of the same name."""
_VOID = re.compile(r"\bvoid\b", re.IGNORECASE)
"""The one type that the parser does not know."""
_STARTS = ("SELECT", "WITH", "FROM", "TABLE", "VALUES", "MAP", "REDUCE")
_TYPES = re.findall(
    r"\w+",
    "STRING BOOLEAN BYTE TINYINT SHORT SMALLINT INT INTEGER LONG BIGINT FLOAT REAL DOUBLE DECIMAL DEC NUMERIC CHAR "
    "CHARACTER VARCHAR BINARY DATE TIMESTAMP TIMESTAMP_NTZ TIMESTAMP_LTZ INTERVAL ARRAY MAP STRUCT VARIANT VOID",
)
_IMPLICIT = {"window", "session_window", "_metadata", "col", "pos", "key", "value", "*"}
"""Columns that functions and file sources give without a name in the query."""
_UNSUPPORTED = {
    key: (reported, sentence)
    for key, reported, sentence in csv.reader(Path(__file__).with_name("unsupported.csv").read_text().splitlines())
}
"""What Spark rejects: a pattern of its report, and the sentence with the remedy."""
Columns = Collection[str] | None
"""Names of a table's columns; None if they are not known."""


class SqlFinding(NamedTuple):
    """A problem, or a possible one, of a part of a pipeline."""

    path: tuple[str | int, ...]
    sentence: str
    is_problem: bool
    word: str = ""
    """The word of the SQL that it is about, if there is one."""
    line: int = 1
    """The line of the SQL that it is about, if it is known without the word."""


def tables_read(sql: str) -> list[str]:
    """Return the tables that a query names, in lower case, in order of first use, without its own CTEs.

    A name with dots is returned whole.
    """
    tree, _ = _parsed(sql)
    if tree is None:
        return list(dict.fromkeys(name.lower() for name in _TABLE.findall(without_streaming(sql))))
    exp = importlib.import_module("sqlglot.expressions")
    own = {cte.alias.lower() for cte in tree.find_all(exp.CTE)}
    tables = [table for table in tree.find_all(exp.Table, bfs=False) if not isinstance(table.this, exp.Func)]
    names = dict.fromkeys(".".join(part.name.lower() for part in table.parts) for table in tables)
    return [name for name in names if name not in own]


def without_streaming(sql: str) -> str:
    """Return a query for tables that end, and for parsers that do not know STREAM and WATERMARK."""
    return _STREAMING.sub(lambda found: found["kept"] or found["called"] or found["before"] or "", sql)


def watermarked(sql: str) -> list[str]:
    """Return the tables that have a WATERMARK in a query, in lower case."""
    return [table.lower() for table, _ in _WATERMARK.findall(sql)]


def with_views(sql: str, views: Mapping[str, str]) -> str:
    """Return a query with the views that it reads as CTEs before its own."""
    ctes = ",\n".join(f"{name} AS (\n{text.strip()}\n)" for name, text in views.items())
    own = re.match(r"\s*WITH\b", sql, re.IGNORECASE)
    return f"WITH {ctes}{',' if own else ''}\n{sql[own.end() :] if own else sql}".strip() if views else sql.strip()


def in_plain_words(reported: str) -> str:
    """Return what Spark reports on a query: with the remedy if it is known, always without codes."""
    for pattern, sentence in _UNSUPPORTED.values():
        if found := re.search(pattern, reported):
            return found.expand(sentence)
    return re.sub(r"^\[[A-Z_.0-9]+\] | SQLSTATE: \w+|; line \d+ pos \d+|;$", "", reported)


def position_of(word: str, sql: str) -> tuple[int, int] | None:
    """Return line and column of the first use of a word in a query, both from 1; texts and comments do not count."""
    use = rf"'(?:[^'\\]|\\.|'')*'|--[^\n]*|/\*.*?\*/|(?<!\w)({re.escape(word)})(?!\w)"
    for found in re.finditer(use, sql, re.IGNORECASE | re.DOTALL):
        if found[1]:
            before = sql[: found.start()]
            return before.count("\n") + 1, found.start() - before.rfind("\n")
    return None


def reported_position(reported: str, sql: str) -> tuple[int, int] | None:
    """Return line and column of what Spark reports on a query, both from 1; None if another text has this position."""
    if not (found := re.search(r"line (\d+),? pos (\d+)", reported)):
        return None
    line, column = int(found[1]), int(found[2])
    at = "".join(sql.splitlines()[line - 1 : line])[column:].lstrip("`").lower()
    names = re.findall(r"[`'\"](\w+)[`'\"]", reported)
    return (line, column + 1) if any(at.startswith(name.lower()) for name in names) else None


def check_sql(spec: PipelineSpec, views: Iterable[str] | None) -> Iterator[SqlFinding]:
    """Yield the findings in the schemas, queries and keys of a pipeline.

    Each of `views` comes after those that it reads; None if the parts do not fit together, so that little can be found.
    """
    if not importlib.util.find_spec("sqlglot"):
        sentence = f"the SQL of pipeline {spec.name} is not checked: install headrace[pipelines]"
        yield SqlFinding((), sentence, False)
        return
    texts: dict[tuple[str, ...], str | None] = {("views", name): view.sql for name, view in spec.views.items()}
    texts |= {("flows", name, "sql"): flow.sql for name, flow in spec.flows.items()}
    for path, sql in texts.items():
        yield from (SqlFinding(path, text, True, word) for word, text in _wrong_start(sql or "TABLE t"))
    if views is None:
        return
    yield from _shared_sinks(spec)
    tables: dict[str, Columns] = {}
    queries: dict[str, _Query] = {}
    yield from _declare_sources(spec, tables)
    other = {name for name, source in spec.sources.items() if isinstance(source, TableSource)}
    other |= {name for name, view in spec.views.items() if not view.sql}
    for name in views:
        if sql := spec.views[name].sql:
            query = queries[name] = _Query(("views", name), sql, queries)
            yield from query.findings(tables)
            tables[name] = query.outputs(tables)
    for name, flow in spec.flows.items():
        query = _Query(("flows", name, "sql"), flow.sql or "SELECT * FROM unknown", queries)
        if flow.sql:
            yield from query.findings(tables)
            yield from (
                SqlFinding(query.path, _UNSUPPORTED[key][1], True)
                for key in query.refused(
                    flow.sink.mode, other, marked=bool(flow.late_rows), realtime=spec.trigger.realtime
                )
            )
        known = tables.get(flow.reads[0]) if flow.key and flow.reads else None
        if known and str(flow.key).lower() not in known:
            sentence = f"is not a column of {flow.reads[0]}{_near(str(flow.key), known)}"
            yield SqlFinding(("flows", name, "key"), sentence, True)
        expressions: dict[tuple[str, ...], str] = {
            ("rules", rule, "check"): each.check for rule, each in flow.rules.items()
        }
        expressions |= {("sink", key): text for key, text in flow.sink.expressions.items()}
        for path, text in expressions.items():
            expression = _Query(("flows", name, *path), f"SELECT {text} FROM rows", {})
            yield from expression.findings({"rows": query.outputs(tables)})


def _declare_sources(spec: PipelineSpec, tables: dict[str, Columns]) -> Iterator[SqlFinding]:
    """Add the columns of the sources to `tables`, and yield what is wrong with their schemas."""
    for name, source in spec.sources.items():
        columns, wrong = columns_of_schema(getattr(source, "value_schema", None) or "")
        yield from (SqlFinding(("sources", name, "schema"), text, True) for text in wrong)
        further = [getattr(source, key, None) for key in ("key_column", "timestamp_column")]
        further += CHANGE_COLUMNS if getattr(source, "change", None) else []
        tables[name] = columns and {*map(str.lower, filter(None, further)), *columns}


def columns_of_schema(schema: str) -> tuple[Columns, list[str]]:
    """Return the names of `name TYPE, name TYPE` in lower case, and what is wrong with it; None if it is not known."""
    if not importlib.util.find_spec("sqlglot"):
        return None, []
    tree, failure = _parsed(f"CREATE TABLE t ({_VOID.sub('int', schema)})") if schema else (None, None)
    wrong: list[str] = []
    if failure:
        word = str(failure.get("highlight", ""))
        what = f"has {word}, which is not a type of Spark or not expected here" if word else failure["description"]
        wrong.append(f"{what}{_near(word.upper(), _TYPES)}")
    columns = tree.this.expressions if tree else []
    untyped = [column.name for column in columns if not getattr(column, "kind", None)]
    wrong += [f"has no type for {name}: write {name} STRING" for name in untyped]
    return ({column.name.lower() for column in columns} if tree else None), wrong


def _wrong_start(sql: str) -> Iterator[tuple[str, str]]:
    first = re.match(r"(?:\s|--[^\n]*\n|/\*.*?\*/)*([A-Za-z]*)", sql, re.DOTALL)
    if first and (word := first[1].upper()) and word not in _STARTS:
        near = nearest(word, _STARTS)
        yield (
            word,
            f"expected {near}, found {word}" if near else f"expected SELECT, WITH or FROM, found {word}: correct it",
        )


def _shared_sinks(spec: PipelineSpec) -> Iterator[SqlFinding]:
    writers: dict[str, str] = {}
    for name, flow in spec.flows.items():
        ends = [(topic, "so their rows are mixed", False) for topic in flow.sink.topics]
        ends += [(*flow.sink.only_writer, True)] if flow.sink.only_writer else []
        for end, reason, is_problem in ends:
            if (first := writers.setdefault(end, name)) != name:
                sentence = f"writes to {end}, as flow {first} does, {reason}"
                yield SqlFinding(("flows", name, "sink"), sentence, is_problem)


class _Query:
    """One query as the parser reads it."""

    def __init__(self, path: tuple[str, ...], sql: str, views: Mapping[str, "_Query"]) -> None:
        self.path, self._sql = path, sql
        self._tree, self._failure = _parsed(sql)
        self._all: list[_Query] = [
            self,
            *(below for name in tables_read(sql) if name in views for below in views[name]._all),
        ]
        """The query, and the views that it reads."""

    def findings(self, tables: Mapping[str, Columns]) -> Iterator[SqlFinding]:
        """Yield what is wrong with the query by itself."""
        if any(_wrong_start(self._sql)):
            return
        if cause := self._failure:
            where = f" near {cause['highlight']} in line {cause['line']} of it" if "highlight" in cause else ""
            sentence = (
                f"may not be valid SQL of Spark: {cause['description']}{where}. Spark decides when the pipeline starts"
            )
            yield SqlFinding(self.path, sentence, False, line=cause.get("line", 1))
        else:
            for column, known in self._unknown_columns(tables):
                near = nearest(column, known)
                close = f": did you mean {near}?" if near else ""
                sentence = f"unknown column {column}{close} (available: {', '.join(sorted(known))})"
                yield SqlFinding(self.path, sentence, True, column)
            for name, near in self._unknown_functions():
                yield SqlFinding(self.path, f"calls {name}, which may not be a function of Spark{near}", False, name)

    def outputs(self, tables: Mapping[str, Columns]) -> Columns:
        """Return the columns of the query's rows."""
        qualify = importlib.import_module("sqlglot.optimizer.qualify").qualify
        schema = {name: dict.fromkeys(columns, "UNKNOWN") for name, columns in tables.items() if columns}
        with contextlib.suppress(importlib.import_module("sqlglot.errors").SqlglotError, RecursionError):
            if self._tree and all(tables.get(name) for name in tables_read(self._sql)):
                found = qualify(self._tree.copy(), schema=schema, dialect="spark", validate_qualify_columns=False)
                return None if "*" in found.named_selects else {name.lower() for name in found.named_selects}
        return None

    def refused(self, mode: str, other: Collection[str], *, marked: bool, realtime: bool) -> Iterator[str]:
        """Yield the keys of the operations that Spark certainly rejects, if no table is `other` than a stream.

        `marked` is whether the flow brings a watermark by itself.
        """
        exp = importlib.import_module("sqlglot.expressions")
        if any(query._tree is None or not {*tables_read(query._sql)}.isdisjoint(other) for query in self._all):
            return
        nodes: list[Any] = [node for query in self._all for node in query._tree.walk()]

        def has(*kinds: Any, below: Any = object) -> bool:
            return any(isinstance(node, kinds) and isinstance(node.parent, below) for node in nodes)

        aggregates = any(isinstance(node, exp.AggFunc) and not node.find_ancestor(exp.Window) for node in nodes)
        aggregates = aggregates or has(exp.Group) or has(exp.Distinct, below=exp.Select)
        watermark = marked or any("WATERMARK" in query._sql.upper() for query in self._all)
        outer = any(isinstance(node, exp.Join) and node.side for node in nodes)
        inner = any(node.args.get("query") for node in nodes if isinstance(node, exp.In))
        applies = {
            "order": has(exp.Order, exp.Sort, below=exp.Query) and not (mode == "complete" and aggregates),
            "distinct": has(exp.Distinct, below=exp.AggFunc),
            "window": has(exp.Window),
            "append": mode == "append" and aggregates and not watermark,
            "complete": mode == "complete" and not aggregates,
            "limit": mode == "update" and has(exp.Limit),
            "offset": has(exp.Offset),
            "outer": outer and not watermark,
            "subquery": inner,
            "set": has(exp.Except, exp.Intersect),
            "sample": has(exp.TableSample),
            "realtime": realtime and (aggregates or has(exp.Join)),
        }
        yield from (key for key, does in applies.items() if does)

    def _unknown_columns(self, tables: Mapping[str, Columns]) -> Iterator[tuple[str, Collection[str]]]:
        """Yield columns that neither a table nor the query itself has, with those that there are."""
        exp = importlib.import_module("sqlglot.expressions")
        read = {one.alias_or_name.lower(): one.name.lower() for one in self._tree.find_all(exp.Table)}
        own = {one.alias_or_name.lower() for one in self._tree.find_all(exp.CTE, exp.Subquery)}
        if any(not tables.get(name) for name in {*read.values()} - own):
            return
        names = (part for part in self._tree.find_all(exp.Identifier) if not isinstance(part.parent, exp.Column))
        made = {part.name.lower() for part in names} | _IMPLICIT
        everything = {column for name in read.values() for column in tables.get(name) or ()}
        for table, time in _WATERMARK.findall(self._sql):
            if time.lower() not in made | {*(tables.get(table.lower()) or [time.lower()])}:
                yield time, everything
        for column in self._tree.find_all(exp.Column):
            first, *rest = (part.name.lower() for part in column.parts)
            known = everything
            if rest and first in read and first not in own:
                first, known = rest[0], {*(tables.get(read[first]) or made)}
            if first not in known and first not in made:
                yield first, known

    def _unknown_functions(self) -> Iterator[tuple[str, str]]:
        """Yield functions that neither the parser nor PySpark's list knows."""
        called = self._tree.find_all(importlib.import_module("sqlglot.expressions").Anonymous)
        names, package = {str(node.this).lower() for node in called} - {"window_"}, importlib.util.find_spec("pyspark")
        if names and package and package.origin:
            text = (Path(package.origin).parent / "sql/functions/__init__.py").read_text()
            listed = re.findall(r'^    "(\w+)",', text, re.MULTILINE)
            yield from ((name, _near(name, listed)) for name in sorted(names - set(listed)))


@functools.lru_cache(maxsize=256)
def _parsed(sql: str) -> tuple[Any, dict[str, Any] | None]:
    """Return the tree of a text, or the parser's first error as it describes it; neither without the parser."""
    try:
        errors, parse_one = importlib.import_module("sqlglot.errors"), importlib.import_module("sqlglot").parse_one
    except ImportError:
        return None, None
    try:
        return parse_one(_WINDOW.sub("window_", without_streaming(sql)), dialect="spark"), None
    except (errors.SqlglotError, RecursionError) as cause:
        return None, (getattr(cause, "errors", None) or [{"description": str(cause)}])[0]


def _near(word: str, known: Iterable[str]) -> str:
    near = nearest(word, known)
    return f": did you mean {near}?" if near else ": correct it"
