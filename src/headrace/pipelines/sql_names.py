"""Which tables a SQL text reads, found without Spark: so a misspelt name is told when the file is loaded.

This is no SQL parser. It looks at the words after FROM and JOIN; what it does not understand it leaves to Spark.
"""

import re
from collections.abc import Iterator

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
    found = [name for at in _table_places(words) if (name := _name_at(words, at)) and name not in own]
    return list(dict.fromkeys(found))


def first_word(sql: str) -> str:
    """Return the first word or sign of a SQL text in lower case, empty if there is none."""
    return next(_words(sql), "")


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


def _table_places(words: list[str]) -> Iterator[int]:
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
