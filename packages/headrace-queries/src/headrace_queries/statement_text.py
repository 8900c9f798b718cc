"""Reads the text of one statement: its tokens, whether it ends with EMIT CHANGES, and ksqlDB's spelling of SQL."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

import duckdb

from headrace.errors import StatementRejected

_KINDS: Final = {
    duckdb.token_type.identifier: "word",
    duckdb.token_type.keyword: "word",
    duckdb.token_type.string_const: "text",
    duckdb.token_type.numeric_const: "number",
    duckdb.token_type.comment: "comment",
}
_OPERATORS: Final = {**dict.fromkeys("([{", "open"), **dict.fromkeys(")]}", "close"), ";": "end", "->": "arrow"}
_OPENING: Final = re.compile(r"/\*|\$\w*\$|\w*['\"`]")
_END: Final = "\n;"
"""Behind a text, so that its last token shows whether it has an end."""
_BLANKS: Final = " \t\r\n\f\v"
MOST_CHARACTERS: Final = 65_536
"""Of a statement."""
_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
_UNSEEN: Final = ("space", "comment")


class SqlToken(NamedTuple):
    """A part of a statement."""

    kind: str
    """`word`, `name` (in quotes), `text`, `number`, `open`, `close`, `end`, `arrow`, `other`, `comment` or `space`."""
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
        StatementRejected: It is empty, has several statements, or is too long. A quote, comment or bracket has
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
    for kind, part, start in _lexed(text):
        token = SqlToken(kind, part, start, len(brackets))
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


def _lexed(text: str) -> Iterator[tuple[str, str, int]]:
    """Return kind, text and index of each token that DuckDB's own lexer finds, and of the blanks between them."""
    data = (text + _END).encode(errors="replace")
    found = duckdb.tokenize(data.decode())
    at = found[0][0]
    index = len(data[:at].decode())
    if index:
        yield "space", text[:index], 0
    for (_, kind), (end, _) in pairwise(found):
        start, at = at, max(end, at + 1)  # what follows a `$` has the same offset as it
        part = data[start:at].decode()
        token = part.rstrip(_BLANKS)
        yield _kind(token, kind), token, index
        if token != part:
            yield "space", part[len(token) :], index + len(token)
        index += len(part)
    if found[-1][0] != len(data) - 1:
        opening = _OPENING.match(text, index)
        what = opening[0] if opening else text[index : index + 1]
        raise StatementRejected(f"{what} at {position(text, index)} has no end: close it, or remove it")


def _kind(token: str, kind: duckdb.token_type) -> str:
    return "name" if token[0] in '"`' else _KINDS.get(kind) or _OPERATORS.get(token, "other")


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
