"""Reads the text of one statement: its tokens, whether it ends with EMIT CHANGES, and ksqlDB's spelling of SQL."""

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from headrace.errors import StatementRejected

_TOKEN: Final = re.compile(
    r"""
    (?P<space>\s+)
  | (?P<comment>--[^\n]*|/\*(?:(?!/\*).)*?\*/)
  | (?P<text>[eE]'(?:[^'\\]|\\.|'')*+'|'(?:[^']|'')*+'|\$(?P<tag>(?:[^\W\d]\w*)?)\$.*?\$(?P=tag)\$)
  | (?P<name>"(?:[^"]|"")++"|`(?:[^`]|``)++`)
  | (?P<word>[^\W\d]\w*)
  | (?P<number>\d[\w.]*)
  | (?P<open>[(\[{])
  | (?P<close>[)\]}])
  | (?P<end>;)
  | (?P<broken>['"`]|/\*|\$(?:[^\W\d]\w*)?\$)
  | (?P<arrow>->(?!>))
  | (?P<other>.)
    """,
    re.VERBOSE | re.DOTALL,
)
MOST_CHARACTERS: Final = 65_536
"""Of a statement."""
_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
_UNSEEN: Final = ("space", "comment")


class SqlToken(NamedTuple):
    """A part of a statement."""

    kind: str
    """A group of the expression: `word`, `name` (in quotes), `text`, `number`, `open`, `close`, `end`, `other`, ..."""
    text: str
    start: int
    depth: int
    """How many brackets are around it."""

    @property
    def word(self) -> str:
        """The word in upper case; empty for other tokens."""
        return self.text.upper() if self.kind == "word" else ""

    @property
    def identifier(self) -> str:
        """The name that a word or a quoted name stands for; empty for other tokens."""
        if self.kind == "name":
            return self.text[1:-1].replace(self.text[0] * 2, self.text[0])
        return self.text if self.kind == "word" else ""


class StatementText(NamedTuple):
    """One statement."""

    sql: str
    """In DuckDB's dialect, without comments, the last semicolon and EMIT CHANGES. Positions are those of the text."""
    is_push: bool
    """Whether it ends with EMIT CHANGES."""
    quoted: frozenset[str]
    """Names that are written in quotes. ksqlDB changes the others to upper case."""


def read_statement(text: str, *, ksqldb: bool = False, variables: Mapping[str, object] | None = None) -> StatementText:
    """Read a text that has one statement.

    Args:
        text: The statement; a semicolon may follow it.
        ksqldb: Whether it is in ksqlDB's dialect: names in backticks, and `->` to a field.
        variables: Values for `${name}` in the text, before anything else is read.

    Raises:
        StatementRejected: There is no statement, or more than one, or it is too long. A quote, comment or bracket has
            no end. A variable has no value. The statement ends with EMIT FINAL.
    """
    _check_length(len(text))
    text = _with_variables(text, variables) if variables else text
    tokens = list(_tokens(text))
    seen = [token for token in tokens if token.kind not in _UNSEEN]
    while seen and seen[-1].kind == "end":
        seen.pop()
    if not seen:
        raise StatementRejected("the statement is empty: send one such as SELECT * FROM orders")
    if any(token.kind == "end" for token in seen):
        raise StatementRejected("there are several statements: write one, with `;` at its end only")
    emit = _emit(seen)
    last = seen[-1].start
    parts = [_in_duckdb(token, ksqldb) if token not in emit else " " * len(token.text) for token in tokens]
    sql = "".join(part for part, token in zip(parts, tokens, strict=True) if token.start <= last)
    quoted = frozenset(token.identifier for token in seen if token.kind == "name")
    return StatementText(sql.rstrip(), bool(emit), quoted)


def tokens_of(sql: str) -> list[SqlToken]:
    """Return the tokens of a statement without blanks and comments; raises as `read_statement`."""
    return [token for token in _tokens(sql) if token.kind not in _UNSEEN]


def position(sql: str, start: int) -> str:
    """Return where an index of a text is, for people."""
    before = sql[:start]
    return f"line {before.count(chr(10)) + 1}, column {start - before.rfind(chr(10))}"


def _tokens(text: str) -> Iterator[SqlToken]:
    brackets: list[SqlToken] = []
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup or "other"
        token = SqlToken(kind, found[0], found.start(), len(brackets))
        if kind == "broken":
            raise StatementRejected(f"{token.text} at {position(text, token.start)} has no end: close it, or remove it")
        if kind == "close":
            opened = brackets.pop() if brackets else None
            if not opened or opened.text + token.text not in ("()", "[]", "{}"):
                raise StatementRejected(f"{token.text} at {position(text, token.start)} closes no bracket: remove it")
            token = token._replace(depth=len(brackets))
        yield token
        if kind == "open":
            brackets.append(token)
    if brackets:
        opened = brackets[-1]
        raise StatementRejected(f"{opened.text} at {position(text, opened.start)} has no end: close the bracket")


def _emit(tokens: list[SqlToken]) -> list[SqlToken]:
    for index, token in enumerate(tokens[:-1]):
        behind = tokens[index + 1]
        is_clause = token.word == "EMIT" and token.depth == 0 and behind.word in ("CHANGES", "FINAL")
        if is_clause and (index + 2 == len(tokens) or tokens[index + 2].word == "LIMIT"):
            if behind.word == "FINAL":
                raise StatementRejected(
                    "EMIT FINAL belongs to a pipeline: give its flow a WATERMARK, and its sink mode: append"
                )
            return [token, behind]
    return []


def _in_duckdb(token: SqlToken, ksqldb: bool) -> str:
    if token.kind == "comment":
        return re.sub(r"[^\n]", " ", token.text)
    if ksqldb and token.kind == "name" and token.text[0] == "`":
        return '"' + token.identifier.replace('"', '""') + '"'
    return ". " if ksqldb and token.kind == "arrow" else token.text


def _with_variables(text: str, variables: Mapping[str, object]) -> str:
    values = {name: str(value) for name, value in variables.items()}
    _check_length(len(text) + sum(len(values.get(name, "")) for name in _VARIABLE.findall(text)))

    def value_of(use: re.Match[str]) -> str:
        if use[1] not in values:
            raise StatementRejected(f"the variable {use[0][:60]} has no value: add it to sessionVariables")
        return values[use[1]]

    return _VARIABLE.sub(value_of, text)


def _check_length(count: int) -> None:
    if count > MOST_CHARACTERS:
        raise StatementRejected(f"the statement has {count} characters; at most {MOST_CHARACTERS} are accepted")
