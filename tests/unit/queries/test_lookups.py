"""Rows by key: every request has a response, also those that arrive while others run."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import duckdb
import pytest

from headrace.errors import StatementRejected, TooManyRequests
from headrace.runtime import ThreadPool
from headrace_devkit.testing import ManualClock
from headrace_queries.callers import Caller, CallerEnds
from headrace_queries.engine.pull import Pulls
from headrace_queries.engine.statements import Statements
from headrace_queries.engine_protocol import MOST_FRAME_BYTES, Lookup, RequestFailed, Row, ToParent, encode_message

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


def test_a_look_up_without_a_thread_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses a thread once; the look-ups behind it have their rows."""
    connection = duckdb.connect()
    connection.execute("CREATE TABLE stock AS SELECT i::VARCHAR AS key, i::INTEGER AS n FROM range(40) t(i)")
    refusals = iter([RuntimeError("can't start new thread")])
    run = ThreadPool.run

    async def run_or_refuse(pool: ThreadPool, *arguments: Any) -> Any:
        if refusal := next(refusals, None):
            raise refusal
        return await run(pool, *arguments)

    monkeypatch.setattr(ThreadPool, "run", run_or_refuse)
    responses = asyncio.run(_look_up_all(connection))
    failed = {number for number, response in responses.items() if isinstance(response, RequestFailed)}
    assert 0 in failed
    assert 39 not in failed


def test_a_caller_waits_longer_after_each_end() -> None:
    """From seconds to minutes; no other caller does, and a long time without an end is a new start."""
    clock = ManualClock()
    ends = CallerEnds(clock)
    culprit, other = Caller("", "10.0.0.1"), Caller("other", "10.0.0.1")
    seconds = [ends.count(culprit) for _ in range(9)]
    assert seconds == [5, 10, 20, 40, 80, 160, 320, 600, 600]
    with pytest.raises(TooManyRequests) as refused:
        ends.check(culprit)
    assert refused.value.retry_after_seconds == 600
    ends.check(other)
    asyncio.run(clock.advance(4_000))
    ends.check(culprit)
    assert ends.count(culprit) == 5


def test_a_message_has_a_bound() -> None:
    """The engine does not send a longer one."""
    with pytest.raises(StatementRejected):
        encode_message(Row(1, b"x" * MOST_FRAME_BYTES))


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
