"""Rows by key: every request has a response, also those that arrive while others run."""

from __future__ import annotations

import asyncio
import json

import duckdb
import pytest

from headrace.queries.engine.pull import Pulls
from headrace.queries.engine.statements import Statements
from headrace.queries.protocol import Lookup, RequestFailed, Row, ToParent

LIMIT_SECONDS = 20.0


@pytest.mark.parametrize("key_type", ["VARCHAR", "BLOB"])
def test_each_request_has_its_row(key_type: str) -> None:
    """Of 40 keys every other one has a row, and one table is not available."""
    connection = duckdb.connect()
    connection.execute(
        f"CREATE TABLE rows AS SELECT i::VARCHAR::{key_type} AS key, i::INTEGER AS n FROM range(0, 40, 2) t(i)"
    )
    connection.execute("CREATE INDEX keys ON rows(key)")
    connection.execute("CREATE VIEW stock AS SELECT key, n FROM rows")
    responses = asyncio.run(_look_up_all(connection))
    failed = [number for number, response in responses.items() if isinstance(response, RequestFailed)]
    rows = {number: json.loads(found.row)["n"] for number, found in responses.items() if _has_row(found)}
    assert failed == [40]
    assert rows == {number: number for number in range(0, 40, 2)}
    assert set(responses) == set(range(41))


def _has_row(response: ToParent) -> bool:
    return isinstance(response, Row) and response.row is not None


async def _look_up_all(connection: duckdb.DuckDBPyConnection) -> dict[int, ToParent]:
    """Send requests in groups, each while the one before runs."""
    responses: dict[int, ToParent] = {}
    complete = asyncio.Event()

    def take(message: ToParent) -> None:
        assert isinstance(message, Row | RequestFailed)
        responses[message.number] = message
        if len(responses) == 41:
            complete.set()

    pulls = Pulls(connection, Statements(connection.cursor()), {"stock": "key", "late": ""}, take)
    for number in range(40):
        pulls.look_up(Lookup(number, "stock", str(number)))
        if number % 7 == 0:
            await asyncio.sleep(0)
    pulls.look_up(Lookup(40, "late", "1"))
    async with asyncio.timeout(LIMIT_SECONDS):
        await complete.wait()
    return responses
