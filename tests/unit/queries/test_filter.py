"""A standing query over batches of records: the row of each, and what is said of records and statements that fail."""

from __future__ import annotations

import asyncio
from typing import Any

import duckdb
import pytest

from headrace.config.kafka import SchemaRegistryConfig
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.runtime import SystemClock
from headrace_queries.engine.filter import Filters, statement_problem
from headrace_queries.engine.statements import Statements
from headrace_queries.engine_protocol import Filter, Filtered, Form, RequestFailed
from headrace_queries.push_statement import read_push
from headrace_queries.table_config import TableConfig
from yaml_table import table

TABLES = {
    "stock": TableConfig(topic="stock", schema="item STRING, n BIGINT, parts ARRAY<INT>"),  # type: ignore[call-arg]
    "moves": TableConfig(topic="stock", kind="log", schema="item STRING, n BIGINT"),  # type: ignore[call-arg]
    "raw": TableConfig(topic="raw"),
}
RECORDS: list[tuple[bytes | None, bytes | None]] = [
    (b"a", b'{"item": "pen", "n": 1, "parts": [1, 2]}'),
    (b"b", b'{"item": "ink", "n": 9}'),
    (b"c", b"{"),
    (b"d", None),
    (None, b'{"item": "cap", "n": 3}'),
    (b"e", b'{"item": "x", "n": "many"}'),
    (b"f\xff", b'{"item": "y", "n": 2}'),
    (b"g", b'{"item": "12", "n": 4}'),
]


def evaluate(sql: str, form: Form = "objects", records: Any = RECORDS) -> Filtered | RequestFailed:
    statement = read_push(sql)

    async def run() -> Any:
        response: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        registry = SchemaRegistry(SchemaRegistryConfig(), SystemClock())
        connection = duckdb.connect()
        filters = Filters(
            connection, TABLES, {}, Codecs(registry), Statements(connection.cursor()), response.set_result
        )
        keys, values = zip(*records, strict=True)
        places = [*range(len(records))]
        filters.filter(
            Filter(7, statement.table, statement, form, 0, places, [1000] * len(records), [*keys], [*values], None)
        )
        found = await response
        await filters.stop()
        await registry.close()
        return found

    return asyncio.run(run())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("sql", "failed", "reason"), table(__file__, "failures"))
def test_only_what_a_value_causes_is_held_against_its_record(sql: str, failed: list[int], reason: str) -> None:
    """For any other error all of them wait: a statement that does not fit must not make dead letters."""
    found = evaluate(sql)
    if not failed:
        assert isinstance(found, RequestFailed), found
        assert (found.number, found.kind) == (7, "unavailable")
        assert reason in found.reason
        return
    assert isinstance(found, Filtered), found
    reasons = {at: why for at, (kind, why) in found.problems.items() if kind == "failed"}
    assert [*reasons] == failed
    assert all(reason in why for why in reasons.values())


@pytest.mark.parametrize(("sql", "problem"), table(__file__, "misfits"))
def test_a_statement_is_checked_against_declared_columns(sql: str, problem: str) -> None:
    """Before any record is there; the place is that in the statement."""
    statement = read_push(sql)
    found = statement_problem(statement, TABLES[statement.table])
    assert (found == "") if not problem else (problem in found)
