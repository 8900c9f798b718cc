"""Which statements are run: one SELECT over tables that the caller may read, without files, settings or catalogues.

DuckDB parses the statement, and only its syntax tree is judged. So a form of SQL that this file does not know is
rejected with the rest that is not on a list here.
"""

import re
import threading
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final, NamedTuple

import duckdb
import msgspec
from cachetools import LRUCache

from headrace.config.spelling import hint, nearest
from headrace.errors import Forbidden, QueriesUnavailable, StatementRejected
from headrace_queries.columns import quoted
from headrace_queries.statement_text import MOST_CHARACTERS, position

_FUNCTIONS: Final = frozenset(
    ("unnest", "range", "generate_series", "json_each", "json_tree", "repeat", "repeat_row", "generate_subscripts")
)
"""Functions that a FROM may have. Others read files, catalogues, or tables by a name in a string."""
_REFUSED: Final = frozenset(
    (
        "setval",
        "nextval",
        "currval",
        "getvariable",
        "write_log",
        "pg_sleep",
        "sleep_ms",
        "__internal_barrier",
        "current_setting",
        "setseed",
        "json_execute_serialized_sql",
        "current_query",
        "query",
        "query_table",
        "json_serialize_plan",
        "stats",
        "index_key",
        "finalize",
        "combine",
        "to_aggregate_state",
        "variant_bytes_to_variant",
    )
)
_REFUSED_BEGINNINGS: Final = ("pg_", "duckdb_", "pragma_", "__")
_SOURCES: Final = frozenset(
    ("BASE_TABLE", "EMPTY", "JOIN", "SUBQUERY", "TABLE_FUNCTION", "EXPRESSION_LIST", "COLUMN_DATA", "PIVOT")
)
"""Kinds of entries of a FROM."""
_QUERIES: Final = frozenset(("SELECT_NODE", "SET_OPERATION_NODE", "CTE_NODE", "RECURSIVE_CTE_NODE"))
_SELECT_ONLY: Final = (
    "only a SELECT is run here: the tables are kept from their topics, and nothing else can change them"
)
_MOST_CACHED: Final = 4_096
_MOST_DEPTH: Final = 400
_DEPTH: Final = "expression depth"
"""In messages of DuckDB's limit, which name a setting that no statement can change here."""
_MOST_BRACKETS: Final = 500
"""Open at a time. DuckDB parses more of them too slowly, and cannot be interrupted meanwhile."""
_MOST_TABLES: Final = 50
"""Of a statement, each counted as often as it occurs. DuckDB plans larger joins too slowly."""
_BRACKET: Final = re.compile(r"[][(){}]")
_CARET: Final = re.compile(r"^LINE (\d+): (.*)\n( *)\^", re.MULTILINE)
_ADVICE: Final = re.compile(r"\n\n?LINE \d+:.*", re.DOTALL)
_EMIT: Final = re.compile(r"\bEMIT\s+CHANGES\b(?=[\s;]*$|\s+LIMIT\b)", re.IGNORECASE)
_WORD: Final = re.compile(r"[^\W\d]\w*")
_CLAUSES: Final = (
    "SELECT",
    "DISTINCT",
    "FROM",
    "JOIN",
    "WHERE",
    "GROUP",
    "HAVING",
    "ORDER",
    "LIMIT",
    "BETWEEN",
    "UNION",
)
_PLAIN_WORDS: Final = [
    (re.compile(pattern), instead)
    for pattern, instead in (
        (
            r"No function matches the given name and argument types '(.+?)\((.*?)\)'\. You might need to .*? casts\.",
            r"\1 does not take values of the types (\2): cast them, such as n::VARCHAR.",
        ),
        (r"(Type with name \w+ does not exist!) Did you mean .*", r"\1 Use one such as VARCHAR, BIGINT or TIMESTAMP"),
        (r"Values list (.*) does not have", r"\1 does not have"),
        (r"WHERE clause cannot contain aggregates!", "WHERE cannot contain aggregates: use HAVING"),
    )
]
"""Parts of DuckDB's messages, and what is said instead."""
_UNKNOWN: Final = re.compile(r'olumn (?:named )?"([^"]+)"(?: does not exist on left side of join!)?$')
_MOST_FUNCTIONS: Final = 200
"""Characters of a list of functions of the same name; a longer one is left out."""


class KeyQuery(NamedTuple):
    """`SELECT columns FROM table WHERE column = ?`, without anything else."""

    selected: str
    """The list of its SELECT."""
    table: str
    column: str


class Statement(NamedTuple):
    """A statement that may be run."""

    tables: frozenset[str]
    """The tables that it reads, in lower case."""
    own: frozenset[str]
    """The names that its WITH gives, in lower case."""
    key_query: KeyQuery | None
    """None if it has another form."""


class Statements:
    """Checks statements, and remembers those that were accepted; for any thread."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._accepted: LRUCache[str, Statement] = LRUCache(1_000)
        self._lock = threading.Lock()
        found = connection.execute("SELECT lower(view_name) FROM duckdb_views() WHERE internal").fetchall()
        self._catalogue = frozenset(name for (name,) in found)
        """Views that a statement could read by their names alone."""

    def accepted(self, text: str) -> Statement | None:
        """Return a statement that was accepted lately; it is not parsed again."""
        with self._lock:
            return self._accepted.get(text)

    def check(self, text: str, tables: Mapping[str, str], readable: Collection[str]) -> Statement:
        """Return a statement that may be run.

        Args:
            tables: Names of all tables, each with its key column, which is empty while the table is not available.
            readable: Names of those that the caller may read.

        Raises:
            StatementRejected: It is not one SELECT over tables, or DuckDB does not understand it.
            Forbidden: The caller may not read one of the tables.
            QueriesUnavailable: A table is not available now.
        """
        statement = self.accepted(text)
        if statement is None:
            statement = self._judged(text)
            if len(text) <= _MOST_CACHED:
                with self._lock:
                    self._accepted[text] = statement
        by_name = {name.lower(): name for name in tables}
        if hidden := statement.own & by_name.keys():
            raise StatementRejected(f"WITH gives the name of table {by_name[min(hidden)]} to a query: use another name")
        for name in sorted(statement.tables):
            if name not in by_name:
                visible = sorted(by_name[known] for known in by_name if by_name[known] in readable)
                raise StatementRejected(f"table {name[:60]!r} does not exist: {hint(name, visible)}")
            if by_name[name] not in readable:
                raise Forbidden(f"the caller may not read the topic of table {by_name[name]}")
            if not tables[by_name[name]]:
                raise QueriesUnavailable(f"table {by_name[name]} is not available now: GET /tables says why")
        return statement

    def tree(self, text: str) -> dict[str, Any]:
        """Return the syntax tree of one SELECT, which may be of any kind; raises StatementRejected as `check`."""
        if len(text) > MOST_CHARACTERS:
            raise StatementRejected(f"the statement has {len(text)} characters; at most {MOST_CHARACTERS} are accepted")
        if _brackets(text) > _MOST_BRACKETS:
            raise _too_deep()
        try:
            with self._connection.cursor() as cursor:  # another thread must not get the tree of this statement
                found = cursor.execute("SELECT json_serialize_sql(?::VARCHAR)", [text]).fetchone()
        except duckdb.Error as cause:
            raise refused(cause) from None
        assert found
        try:
            tree = msgspec.json.decode(found[0])
        except RecursionError:
            raise _too_deep() from None
        if tree["error"]:
            raise _syntax_error(tree, text)
        if not tree["statements"]:
            raise StatementRejected("the statement is empty: write a SELECT over the tables that GET /tables lists")
        if len(tree["statements"]) != 1:
            raise StatementRejected("one statement is run per request: send the others in requests of their own")
        statement: dict[str, Any] = tree["statements"][0]
        return statement

    def _judged(self, text: str) -> Statement:
        own: set[str] = set()
        read: list[str] = []
        outside: set[str] = set()
        tree = self.tree(text)
        for node, visible in _nodes(tree, frozenset(), 0):
            first = len(read)
            _judge(node, own, read)
            outside.update(name for name in read[first:] if name not in visible)
        if len(read) > _MOST_TABLES:
            raise StatementRejected(f"the statement reads {len(read)} tables; at most {_MOST_TABLES} are accepted")
        if hidden := own & self._catalogue:
            raise StatementRejected(f"{min(hidden)} is a name of DuckDB's own catalogue: use another name in WITH")
        return Statement(frozenset(outside), frozenset(own), self._key_query(tree))

    def _key_query(self, tree: dict[str, Any]) -> KeyQuery | None:
        """Return what a tree asks for if it is that of a `KeyQuery`: DuckDB makes the same tree of one."""
        node = tree["node"]
        try:
            [column] = node["where_clause"]["left"]["column_names"]
            table = node["from_table"]["table_name"]
            selected = ", ".join(map(_selected, node["select_list"]))
        except (KeyError, TypeError, ValueError):
            return None
        same = self.tree(f"SELECT {selected} FROM {quoted(table)} WHERE {quoted(column)} = ?")
        return KeyQuery(selected, table, column) if _without_positions(same) == _without_positions(tree) else None


def _judge(node: dict[str, Any], own: set[str], read: list[str]) -> None:
    """Collect the tables and the CTEs of a node, and raise StatementRejected if it is of a kind that is not run."""
    kind = node.get("type")
    own.update(entry["key"].lower() for entry in node.get("cte_map", {}).get("map", ()))
    if isinstance(kind, str) and kind.endswith("_NODE"):
        if kind not in _QUERIES:
            raise StatementRejected(_SELECT_ONLY)
    elif "sample" in node and "alias" in node:
        _judge_source(node, read)
    elif node.get("class") == "FUNCTION":
        name = str(node.get("function_name", "")).lower()
        if name in _REFUSED or name.startswith(_REFUSED_BEGINNINGS):
            raise StatementRejected(
                f"function {name[:60]!r} is not available here: use one that computes from its input"
            )


def _judge_source(node: dict[str, Any], read: list[str]) -> None:
    kind = node["type"]
    if kind == "BASE_TABLE":
        if node.get("schema_name") or node.get("catalog_name"):
            raise StatementRejected(f"write table {node['table_name'][:60]} without a schema or database before it")
        read.append(node["table_name"].lower())
    elif kind == "TABLE_FUNCTION":
        name = str(node["function"].get("function_name", "")).lower()
        if name not in _FUNCTIONS:
            raise StatementRejected(
                f"function {name[:60]!r} is not available in FROM: {hint(name, sorted(_FUNCTIONS))}"
            )
    elif kind == "SHOW_REF":
        raise StatementRejected(f"{_SELECT_ONLY}. GET /tables lists them with their columns")
    elif kind not in _SOURCES:
        raise StatementRejected(f"a FROM with {str(kind).lower().replace('_', ' ')} is not available here: use a table")


def _nodes(tree: Any, visible: frozenset[str], depth: int) -> Iterator[tuple[dict[str, Any], frozenset[str]]]:
    """Return every object of a tree, with the names of the CTEs that it sees."""
    if depth > _MOST_DEPTH:
        raise _too_deep()
    if isinstance(tree, dict):
        for entry in tree.get("cte_map", {}).get("map", ()):
            name = frozenset((entry["key"].lower(),))
            sees_itself = entry["value"].get("query_node", {}).get("type") == "RECURSIVE_CTE_NODE"
            yield from _nodes(entry["value"], visible | name if sees_itself else visible, depth + 1)
            visible |= name
        yield tree, visible
        for field, value in tree.items():
            if field != "cte_map":
                yield from _nodes(value, visible, depth + 1)
    elif isinstance(tree, list):
        for value in tree:
            yield from _nodes(value, visible, depth + 1)


def _selected(part: dict[str, Any]) -> str:
    """Return a column of a SELECT, or all of them; whatever else a part is, it gets another tree."""
    if part["type"] == "STAR":
        return "*"
    [column] = part["column_names"]
    return quoted(column) + (f" AS {quoted(part['alias'])}" if part["alias"] else "")


def _without_positions(tree: Any) -> Any:
    """Return a tree without the positions of its parts in the text."""
    if isinstance(tree, dict):
        return {name: _without_positions(part) for name, part in tree.items() if not name.startswith("query_location")}
    return [_without_positions(part) for part in tree] if isinstance(tree, list) else tree


def _brackets(text: str) -> int:
    """Return how many brackets are open at a time, those in its literals included."""
    steps = [1 if bracket in "([{" else -1 for bracket in _BRACKET.findall(text)]
    return max(accumulate(steps), default=0)


def _too_deep() -> StatementRejected:
    return StatementRejected("the statement is nested too deeply: make it simpler")


def _syntax_error(tree: dict[str, Any], text: str) -> StatementRejected:
    message = str(tree.get("error_message", ""))
    if _DEPTH in message:
        return _too_deep()
    if "Only SELECT" in message:
        word = text.split(maxsplit=1)[0][:20].upper() if text.split() else ""
        if word.startswith("PIVOT"):
            return StatementRejected("PIVOT needs its values here: write PIVOT ... ON column IN (...), or GROUP BY")
        return StatementRejected(f"{_SELECT_ONLY}" + (f"; this begins with {word}" if word else ""))
    at = str(tree.get("position", ""))
    start = len(text.encode(errors="replace")[: int(at)].decode(errors="ignore")) if at.isdigit() else len(text)
    return StatementRejected(
        f"the statement is not valid SQL: {message} ({position(text, start)}){_advice(text, start)}"
    )


def _advice(text: str, start: int) -> str:
    """Return the end of a sentence about a statement whose syntax fails at an index: what was probably intended."""
    if _EMIT.search(text):
        return ": EMIT CHANGES makes it a push query: send it with Accept: text/event-stream, or remove EMIT CHANGES"
    if text[start : start + 1] in ("'", '"'):
        return ": close the quote"
    near = [*_WORD.findall(text[:start])[-1:], *_WORD.findall(text[start:])[:1]]
    if "OFFSET" in map(str.upper, near):
        return ': offset is a word of SQL: write the column as "offset", in double quotes'
    for word in near:
        if (found := nearest(word, _CLAUSES, 0.7)) and word.upper() not in (found, f"{found}S"):
            return f": did you mean {found}?"
    return ""


def refused(cause: duckdb.Error, columns: Collection[str] = ()) -> StatementRejected:
    """Return the error for a statement that DuckDB has rejected, with its reason and position.

    Args:
        columns: Those of its tables, of which one may have been intended.
    """
    if isinstance(cause, duckdb.IOException):  # its text has the paths of files
        return StatementRejected("the statement was rejected: DuckDB could not read or write a file of the tables")
    text = str(cause)
    if _DEPTH in text:
        return _too_deep()
    caret = _CARET.search(text)
    text = _ADVICE.sub("", text).strip()
    kind, _, rest = text.partition(": ")
    text = rest if kind.endswith("Error") else text
    text = " ".join(text.replace("Candidate bindings:", "Columns with similar names:").split())
    for pattern, instead in _PLAIN_WORDS:
        text = pattern.sub(instead, text)
    if (unknown := _UNKNOWN.search(text)) and (intended := nearest(unknown[1], columns)):
        text = f"{text.removesuffix('!')}. Did you mean {intended}?"
    what, _, functions = text.partition(" Candidate functions: ")
    text = text if len(functions) <= _MOST_FUNCTIONS else what
    near = caret[2][len(caret[3]) - len(caret[1]) - 7 :][:30].strip() if caret else ""
    where = f" (line {caret[1]}, near {near!r})" if caret else ""
    if what.startswith("Referenced column") and near.startswith('"'):
        where += ": double quotes are for names, and single quotes for text"
    return StatementRejected(f"the statement was rejected: {text[:500]}{where}")
