"""The text of a push query: what is understood, and what is refused."""

from __future__ import annotations

import time

import duckdb
import pytest

from headrace.errors import StatementRejected
from headrace_queries.push_statement import PushStatement, read_push
from headrace_queries.statement_text import read_statement
from yaml_table import table


@pytest.mark.parametrize(("text", "sql", "is_push"), table(__file__, "statements"))
def test_a_statement_is_read_as_ksqldb_does(text: str, sql: str, is_push: bool) -> None:
    """Texts, comments and quoted names are not searched for clauses, and positions stay the same."""
    found = read_statement(text, ksqldb=True, variables={"name": "orders"})
    assert (found.sql, found.is_push) == (sql, is_push)


@pytest.mark.parametrize(("text", "problem"), table(__file__, "refused_texts"))
def test_a_text_that_is_not_one_statement_is_refused(text: str, problem: str) -> None:
    """The sentence has the position and what to do."""
    with pytest.raises(StatementRejected, match=problem):
        read_statement(text, variables={"name": "orders"})


@pytest.mark.parametrize(
    "text",
    ["x" * 65_537, "${a}" * 16_000, "$a$" * 21_000 + "'" * 2_001, "(" * 65_000, "/*" * 32_000],
    ids=["long", "variables", "dollars", "brackets", "comments"],
)
def test_a_hostile_text_is_refused_soon(text: str) -> None:
    """It is read on the loop, where other requests wait for it."""
    begun = time.process_time()
    with pytest.raises(StatementRejected):
        read_statement(text, variables={"a": "b" * 1_000_000})
    assert time.process_time() - begun < 2


@pytest.mark.parametrize(("sql", "parts"), table(__file__, "push_queries"))
def test_a_push_query_has_columns_and_a_condition_of_one_table(sql: str, parts: list[object]) -> None:
    """A clause is one outside of brackets, texts and the operator IS DISTINCT FROM."""
    found = read_push(read_statement(sql + " EMIT CHANGES").sql)
    assert found == PushStatement(*parts)  # type: ignore[arg-type]


@pytest.mark.parametrize(("sql", "problem"), table(__file__, "refused_push"))
def test_another_form_is_refused(sql: str, problem: str) -> None:
    """What needs several rows belongs to a pipeline; what is only not available has its position."""
    with pytest.raises(StatementRejected, match=problem) as refused:
        read_push(sql)
    assert ("needs" in refused.value.parameters) == ("needs more" in problem)


def test_each_aggregate_of_duckdb_is_known() -> None:
    """One that is not would be computed over a batch of changes, and give a wrong row."""
    names = duckdb.sql("SELECT DISTINCT function_name FROM duckdb_functions() WHERE function_type = 'aggregate'")
    unknown = []
    for (name,) in names.fetchall():
        try:
            read_push(f"SELECT {name}(a) FROM t")
            unknown.append(name)
        except StatementRejected:
            pass
    assert unknown == []
