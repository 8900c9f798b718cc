"""Writes the pipeline file for a statement that needs several rows or tables."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from headrace_queries.statement_text import SqlToken, tokens_of

_WINDOWS: Final = ("TUMBLING", "HOPPING", "SESSION")
_AFTER_GROUP: Final = ("HAVING", "WINDOW", "ORDER", "LIMIT", "QUALIFY")
_SPAN: Final = re.compile(r"(\d+)\s+([A-Z]+)", re.IGNORECASE)
_LATER: Final = re.compile(r"\b(?:GRACE|RETENTION)\b", re.IGNORECASE)
"""Begins what does not belong to the window's length."""
_DELAY: Final = "10 MINUTES"
"""How late a row may be, if the statement does not say it."""


class SourceTopic(NamedTuple):
    """What a table is kept from."""

    topic: str
    value_format: str = "json"
    schema: str = ""
    """Columns as in CREATE TABLE; empty for those of the schema registry, and for one column `value`."""


class PipelineExample(NamedTuple):
    """A pipeline that computes what a statement says."""

    name: str
    """Of the pipeline, its flow and its topic."""
    text: str
    """The file."""


def pipeline_example(sql: str, sources: Mapping[str, SourceTopic]) -> PipelineExample:
    """Return the pipeline for a statement; `sources` are the topics of the tables by name in lower case."""
    tokens = tokens_of(sql)
    window = _window(tokens)
    tables = _tables(tokens) or ["orders"]
    keys = _keys(tokens)
    suffix = f"_by_{keys[0]}" if keys else "_result"
    name = re.sub(r"[^a-z0-9_]", "_", "_".join(tables[:2]).lower() + suffix.lower())[:60]
    words = {token.text.lower() for token in tokens if token.kind == "word"}
    lines = [f"# {name}.yaml", f"name: {name}", "sources:"]
    for table in dict.fromkeys(tables):
        source = sources.get(table.lower()) or SourceTopic(table)
        lines.append(f"  {table}: {_source(source, words, timed=bool(window))}")
    lines += ["flows:", f"  {name}:", "    sql: |"]
    lines += [f"      {line}".rstrip() for line in _flow_sql(sql, tokens, window).splitlines()]
    aggregates = keys and not window
    rest = f", key: {keys[0]}, mode: update" if aggregates else ", mode: append" if window or not keys else ""
    lines.append(f"    sink: {{topic: {name}{rest}}}")
    return PipelineExample(name, "\n".join(lines) + "\n")


class _TimeWindow(NamedTuple):
    first: int
    last: int
    """Indexes of its tokens."""
    call: str
    delay: str


def _window(tokens: Sequence[SqlToken]) -> _TimeWindow | None:
    for index, token in enumerate(tokens[:-2]):
        kind = tokens[index + 1].word
        if token.word == "WINDOW" and kind in _WINDOWS and tokens[index + 2].text == "(":
            depth = tokens[index + 2].depth
            last = next(i for i in range(index + 3, len(tokens)) if tokens[i].depth == depth and tokens[i].text == ")")
            inside = " ".join(part.text for part in tokens[index + 3 : last])
            grace = re.search(r"GRACE\s+PERIOD\s+(\d+\s+\w+)", inside, re.IGNORECASE)
            spans = [f"'{n} {unit}'" for n, unit in _SPAN.findall(_LATER.split(inside)[0])]
            function = "session_window" if kind == "SESSION" else "window"
            return _TimeWindow(index, last, f"{function}(timestamp, {', '.join(spans)})", grace[1] if grace else _DELAY)
    return None


def _tables(tokens: Sequence[SqlToken]) -> list[str]:
    found = []
    for index, token in enumerate(tokens[:-1]):
        behind = tokens[index + 1 : index + 3]
        names = token.word == "JOIN" or (token.word == "FROM" and index and tokens[index - 1].word != "DISTINCT")
        if names and behind[0].identifier and [part.text for part in behind[1:]] != ["("]:
            found.append(behind[0].identifier)
    return found


def _keys(tokens: Sequence[SqlToken]) -> list[str]:
    """Return the first column of GROUP BY in a list, if it is a name without a table."""
    for index, token in enumerate(tokens[:-2]):
        if token.word == "GROUP" and tokens[index + 1].word == "BY":
            key, behind = tokens[index + 2], tokens[index + 3 : index + 4]
            alone = not behind or behind[0].text == "," or behind[0].word in _AFTER_GROUP
            return [key.identifier] if key.identifier and alone else []
    return []


def _source(source: SourceTopic, words: set[str], *, timed: bool) -> str:
    parts = [f"topic: {source.topic}"]
    if source.value_format == "json" and not source.schema:
        parts.append("value_format: string")
    elif source.value_format != "json":
        parts.append(f"value_format: {source.value_format}")
    parts += [f"schema: {json.dumps(source.schema, ensure_ascii=False)}"] if source.schema else []
    parts += ["key_column: key"] if "key" in words else []
    parts += ["timestamp_column: timestamp"] if timed or "timestamp" in words else []
    return "{" + ", ".join(parts) + "}"


def _flow_sql(sql: str, tokens: Sequence[SqlToken], window: _TimeWindow | None) -> str:
    """Return the statement in Spark's dialect, without its limit."""
    parts: list[str] = []
    at = 0
    for index, token in enumerate(tokens):
        gap = sql[at : token.start]
        at = token.start + len(token.text)
        if token.word == "LIMIT" and token.depth == 0:
            break
        if window and window.first <= index <= window.last:
            continue
        parts.append(gap + _in_spark(tokens, index, window))
    return "".join(parts).strip()


def _in_spark(tokens: Sequence[SqlToken], index: int, window: _TimeWindow | None) -> str:
    token = tokens[index]
    before = tokens[index - 1] if index else token
    if token.kind == "name":
        return f"`{token.identifier}`"
    if window and before.word == "FROM" and token.identifier:
        return f"{token.text} WATERMARK timestamp DELAY OF INTERVAL {window.delay}"
    if window and token.word == "BY" and before.word == "GROUP":
        return f"{token.text} {window.call},"
    if window and token.word in ("WINDOWSTART", "WINDOWEND"):
        bound = f"{window.call.partition('(')[0]}.{token.word.removeprefix('WINDOW').lower()}"
        has_name = index + 1 < len(tokens) and tokens[index + 1].word == "AS"
        return bound if has_name else f"{bound} AS {token.text.lower()}"
    return token.text
