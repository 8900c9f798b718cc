"""Decides what a push query may be: columns and a condition of one table, each row seen alone."""

import re
from typing import Final, NamedTuple

from headrace.errors import StatementRejected
from headrace_queries.statement_text import SqlToken, position, tokens_of

_FORM: Final = "SELECT columns FROM table [WHERE condition] EMIT CHANGES [LIMIT n]"
_AGGREGATES: Final = frozenset(
    re.findall(
        r"\w+",
        """
    any_value approx_count_distinct approx_quantile approx_top_k arbitrary arg_max arg_max_null arg_max_nulls_last
    arg_min arg_min_null arg_min_nulls_last argmax argmin array_agg avg bit_and bit_or bit_xor bitstring_agg bool_and
    bool_or combine_aggr corr count count_if count_star countif covar_pop covar_samp decimal_average entropy favg first
    fsum group_concat grouping grouping_id histogram histogram_exact kahan_sum kurtosis kurtosis_pop last list listagg
    lttb mad max max_by mean median min min_by mode product quantile quantile_cont quantile_disc regr_avgx regr_avgy
    regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy reservoir_quantile sem skewness stddev
    stddev_pop stddev_samp string_agg sum sum_no_overflow sumkahan var_pop var_samp variance variant_group_object
    collect_list collect_set count_distinct earliest_by_offset latest_by_offset topk topkdistinct
    """,
    )
)
"""Aggregate functions of DuckDB, then those of ksqlDB alone."""
_OVER_ROWS: Final = {
    "JOIN": "a join",
    "GROUP": "GROUP BY",
    "HAVING": "HAVING",
    "WINDOW": "WINDOW",
    "QUALIFY": "QUALIFY",
    "UNION": "UNION",
    "INTERSECT": "INTERSECT",
    "EXCEPT": "EXCEPT",
    "PARTITION": "PARTITION BY",
}
"""Words after FROM that make a statement one over several rows or tables."""

_QUERIES: Final = ("SELECT", "FROM", "TABLE", "VALUES", "WITH")
"""Words that begin a query in brackets."""
_BEHIND_CONDITION: Final = ("LIMIT", "ORDER", "OFFSET", "FETCH", "USING", "FOR")
"""Reserved words of clauses that may follow a condition."""


class PushStatement(NamedTuple):
    """The parts of a push query, as written."""

    columns: str
    """The select list: `*`, `id, price * 2 AS twice`."""
    table: str
    """Without quotes."""
    alias: str
    """Name of the table in the statement, without quotes; empty for its own name."""
    condition: str
    """Empty for none."""
    limit: int | None
    """Rows after which the query ends."""

    def over(self, relation: str) -> str:
        """Return the statement over another relation that has the table's columns, without its limit."""
        name = (self.alias or self.table).replace('"', '""')
        where = f" WHERE {self.condition}" if self.condition else ""
        return f'SELECT {self.columns} FROM {relation} AS "{name}"{where}'


def read_push(sql: str) -> PushStatement:
    """Read a push query; `sql` is what `read_statement` returned.

    Raises:
        StatementRejected: It has another form. If several rows or tables are needed, `needs` says for what.
    """
    tokens = tokens_of(sql)
    if needed := _needs_rows(tokens):
        raise StatementRejected(
            f"a push query sees each changed row alone, and {needed} needs more: compute it in a pipeline whose sink "
            "is a topic, keep a table of that topic, and select from that",
            needs=needed,
        )
    start = _from(tokens)
    if tokens[0].word != "SELECT" or start < 2 or start + 1 == len(tokens) or not tokens[start + 1].identifier:
        raise StatementRejected(f"this is not a push query: write it as {_FORM}")
    table, rest = tokens[start + 1], tokens[start + 2 :]
    alias = ""
    if rest and rest[0].word == "AS":
        rest = rest[1:]
    if rest and rest[0].identifier and rest[0].word not in ("WHERE", *_BEHIND_CONDITION):
        alias, rest = rest[0].identifier, rest[1:]
    condition, rest = _condition(sql, rest)
    limit = _limit(sql, rest)
    columns = sql[tokens[1].start : tokens[start].start].strip()
    return PushStatement(columns, table.identifier, alias, condition, limit)


def _needs_rows(tokens: list[SqlToken]) -> str:
    start = _from(tokens)
    if tokens[0].word == "WITH":
        return "WITH"
    if len(tokens) > 1 and tokens[1].word == "DISTINCT":
        return "DISTINCT"
    for index, token in enumerate(tokens):
        behind = tokens[index + 1] if index + 1 < len(tokens) else None
        called = behind is not None and behind.text == "("
        if called and token.identifier.lower() in _AGGREGATES:
            return f"the function {token.identifier}"
        if token.word == "OVER" and index and tokens[index - 1].text == ")":
            return "OVER"
        begins = index > 0 and tokens[index - 1].text == "(" and token.word in _QUERIES
        if begins and (token.word != "VALUES" or called):  # otherwise a column
            return "a subquery"
        if token.depth == 0 and 0 < start < index and (token.word in _OVER_ROWS or token.text == ","):
            is_column = token.word == "PARTITION" and (behind is None or behind.word != "BY")
            if not is_column:
                return _OVER_ROWS.get(token.word, "a second table")
    return ""


def _from(tokens: list[SqlToken]) -> int:
    """Return the index of the clause FROM; 0 if there is none. `IS DISTINCT FROM` is an operator."""
    for index, token in enumerate(tokens):
        if token.word == "FROM" and token.depth == 0 and index and tokens[index - 1].word != "DISTINCT":
            return index
    return 0


def _condition(sql: str, rest: list[SqlToken]) -> tuple[str, list[SqlToken]]:
    if not rest or rest[0].word != "WHERE":
        return "", rest
    ends = (index for index, token in enumerate(rest) if token.depth == 0 and token.word in _BEHIND_CONDITION)
    end = next(ends, len(rest))
    if end == 1:
        if rest[1:] and rest[1].word == "OFFSET":
            raise StatementRejected('offset is a word of SQL: write "offset" in double quotes')
        raise StatementRejected("the condition behind WHERE is missing: write one, or remove WHERE")
    until = rest[end].start if end < len(rest) else len(sql)
    return sql[rest[1].start : until].strip(), rest[end:]


def _limit(sql: str, rest: list[SqlToken]) -> int | None:
    if not rest:
        return None
    if rest[0].word == "LIMIT" and len(rest) == 2 and rest[1].text.isdecimal() and int(rest[1].text) > 0:
        return int(rest[1].text)
    raise StatementRejected(
        f"{rest[0].text[:40]!r} at {position(sql, rest[0].start)} cannot be in a push query: write it as {_FORM}"
    )
