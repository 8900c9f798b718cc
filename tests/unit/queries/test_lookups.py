"""Rows by key: every request has a response, also those that arrive while others run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import duckdb
import pytest

from headrace.errors import StatementRejected, TooManyRequests
from headrace.runtime import ThreadPool
from headrace_devkit.testing import ManualClock
from headrace_queries.callers import Caller, CallerEnds
from headrace_queries.engine.pull import Pulls
from headrace_queries.engine.statements import Statements
from headrace_queries.engine_protocol import MOST_FRAME_BYTES, Ask, Lookup, RequestFailed, Row, Rows, encode_message

LIMIT_SECONDS = 20.0


ALIKE = (
    "SELECT * FROM stock WHERE key = ?",
    "select N as m, KEY, n from Stock where KEY = $1;",
    "SELECT nothing FROM stock WHERE key = ?",
    "SELECT * FROM late WHERE key = ?",
    "SELECT * FROM secret WHERE key = ?",
)
OTHER = (
    "SELECT * FROM stock WHERE n = ?",
    "SELECT count(*) FROM stock WHERE key > ?",
    "SELECT * EXCLUDE (n) FROM stock WHERE key = ?",
    "SELECT DISTINCT n FROM stock WHERE key = ?",
    "SELECT n FROM stock WHERE key = ? LIMIT 0",
    "SELECT n FROM stock AS t(key) WHERE key = ?",
)


@pytest.mark.parametrize("key_type", ["VARCHAR", "BLOB", "JSON"])
async def test_requests_for_keys_are_joined(key_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gets what its statement gives by itself: rows, names of columns, or the same error."""
    connection = duckdb.connect()
    connection.execute(f"CREATE TABLE stock AS SELECT i::VARCHAR::{key_type} AS key, i AS n FROM range(0, 9, 2) t(i)")
    keys = {"stock": "key", "late": "", "secret": "key"}
    responses: list[asyncio.Future[Any]] = []
    alone = Pulls(connection, Statements(connection.cursor()), keys, lambda m: responses[m.number].set_result(m))
    joined = Pulls(connection, Statements(connection.cursor()), keys, alone._send, ["stock", "late", "secret"])
    sizes: list[int] = []
    look_up = Pulls._look_up

    def counted(pulls: Pulls, requests: Sequence[Any]) -> Any:
        sizes.append(len(requests))
        return look_up(pulls, requests)

    monkeypatch.setattr(Pulls, "_look_up", counted)
    params: list[Any] = [*map(str, range(9)), "x", 2]
    requests = [(value, form) for form in ("objects", "arrays", "arrow") for value in params]

    async def ask(pulls: Pulls, sql: str) -> list[Any]:
        responses[:] = [asyncio.get_running_loop().create_future() for _ in requests]
        for number, (value, form) in enumerate(requests):
            pulls.ask(Ask(number, sql, [value], ["stock", "late"], form, 100, LIMIT_SECONDS))
        async with asyncio.timeout(LIMIT_SECONDS):
            return await asyncio.gather(*responses)

    for sql in ALIKE + OTHER:
        expected = await ask(alone, sql)
        assert await ask(joined, sql) == expected, sql
        sizes.clear()
        assert await ask(joined, sql) == expected, sql
        assert (max(sizes, default=0) > 1) is (sql in ALIKE[:3]), sql
    whole = await ask(joined, ALIKE[0])
    responses[:] = [asyncio.get_running_loop().create_future() for _ in range(11)]
    for number, key in enumerate(params[:10]):
        joined.look_up(Lookup(number, "stock", key))
    joined.look_up(Lookup(10, "late", "1"))
    *found, failed = await asyncio.gather(*responses)
    rows = [next(iter(rows.rows), None) if isinstance(rows, Rows) else "failed" for rows in whole[:10]]
    assert [getattr(response, "row", "failed") for response in found] == rows
    assert "GET /tables says why" in failed.reason


async def test_a_look_up_without_a_thread_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system refuses a thread once; the look-ups behind it have their rows."""
    connection = duckdb.connect()
    connection.execute("CREATE TABLE stock AS SELECT i::VARCHAR AS key FROM range(40) t(i)")
    refusals = iter([RuntimeError("can't start new thread")])
    run = ThreadPool.run

    async def run_or_refuse(pool: ThreadPool, *arguments: Any) -> Any:
        if refusal := next(refusals, None):
            raise refusal
        return await run(pool, *arguments)

    monkeypatch.setattr(ThreadPool, "run", run_or_refuse)
    found = [asyncio.get_running_loop().create_future() for _ in range(40)]
    pulls = Pulls(connection, Statements(connection), {"stock": "key"}, lambda m: found[m.number].set_result(m))
    for number in range(40):
        pulls.look_up(Lookup(number, "stock", str(number)))
        await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_SECONDS):
        responses = await asyncio.gather(*found)
    assert isinstance(responses[0], RequestFailed)
    assert responses[39].row == b'{"key":"39"}'


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
