"""What callers may run, and what becomes of their deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from headrace.errors import Forbidden, HeadraceError
from headrace_queries.engine.pull import Pulls
from headrace_queries.engine.statements import Statements
from headrace_queries.engine_protocol import Ask, Rows
from yaml_table import table

HOSTILE = yaml.safe_load((Path(__file__).parents[2] / "hostile_statements.yaml").read_text())
KEYS = {"moves": "key", "secret": "key", "starting": "", "stock": "key"}
ENDLESS = "SELECT count(*) FROM range(1000000000) a, range(1000000000) b"


@pytest.fixture
def connection() -> duckdb.DuckDBPyConnection:
    made = duckdb.connect(":memory:", config={"threads": "1", "memory_limit": "100MB"})
    columns = "SELECT range AS n, 'i' || range AS item, 'k' || range AS key"
    for name in ("moves", "secret"):
        made.execute(f"CREATE TABLE {name} AS {columns} FROM range(10)")
    return made


@pytest.mark.parametrize(("text", "says"), HOSTILE["rejected"], ids=range(len(HOSTILE["rejected"])))
def test_hostile_statements_are_rejected(connection: duckdb.DuckDBPyConnection, text: str, says: str) -> None:
    """Before they run, with a reason."""
    with pytest.raises(HeadraceError) as rejected:
        Statements(connection).check(text, KEYS, ["moves"])
    assert says in rejected.value.description


def test_threads_do_not_judge_the_statements_of_others(connection: duckdb.DuckDBPyConnection) -> None:
    """Each statement is judged by its own syntax tree, however many are judged at a time."""
    statements = Statements(connection)
    wrong: list[str] = []

    def judge(forbidden: bool, thread: int) -> None:
        for number in range(200):
            text = f"SELECT {number} AS t{thread} FROM {'secret' if forbidden else 'moves'}"
            try:
                statements.check(text, KEYS, ["moves"])
                rejected = False
            except Forbidden:
                rejected = True
            except Exception as cause:  # noqa: BLE001 every other outcome is wrong
                wrong.append(f"{text}: {cause}")
                continue
            if rejected is not forbidden:
                wrong.append(text)

    threads = [threading.Thread(target=judge, args=(n % 2 == 0, n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


class Running:
    """Statements at work, and their responses by number."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.responses: dict[int, asyncio.Future[Any]] = {}
        self.pulls = Pulls(connection, Statements(connection.cursor()), KEYS, self._take)

    def _take(self, message: Any) -> None:
        self.responses[message.number].set_result(message)

    def send(self, sql: str, seconds: float = 60, params: Any = (), rows: int = 100, form: Any = "objects") -> int:
        number = len(self.responses)
        self.responses[number] = asyncio.get_running_loop().create_future()
        self.pulls.ask(Ask(number, sql, params or [], ["moves", "stock"], form, rows, seconds))
        return number

    async def response(self, number: int) -> Any:
        async with asyncio.timeout(60):
            return await self.responses[number]

    async def ask(self, sql: str, **more: Any) -> Any:
        return await self.response(self.send(sql, **more))

    async def rows(self, sql: str, **more: Any) -> list[Any]:
        found = await self.ask(sql, **more)
        assert isinstance(found, Rows), found
        return [json.loads(row) for row in found.rows]


@contextlib.asynccontextmanager
async def running(connection: duckdb.DuckDBPyConnection) -> AsyncIterator[Running]:
    made = Running(connection)
    await made.pulls.start()
    yield made
    await made.pulls.stop()


async def test_deadlines_also_hold_for_statements_that_wait(connection: duckdb.DuckDBPyConnection) -> None:
    """One that finds no thread in time is told so; those that run are interrupted, and others follow."""
    async with running(connection) as at_work:
        long = [at_work.send(ENDLESS) for _ in range(4)]
        waited = await at_work.ask("SELECT 1", seconds=0.2)
        assert (waited.kind, "other statements" in waited.reason) == ("unavailable", True)
        left = at_work.send("SELECT 1")
        at_work.pulls.cancel(left)
        await at_work.response(left)
        assert not any(at_work.responses[number].done() for number in long)
        at_work.pulls.cancel(long[0])
        assert (await at_work.response(long[0])).kind == "timeout"
        assert await at_work.rows("SELECT 1 AS one") == [{"one": 1}]
        late = await at_work.ask(ENDLESS, seconds=0.2)
        assert (late.kind, "interrupted after 0.2 s" in late.reason) == ("timeout", True)
        for number in long[1:]:
            at_work.pulls.cancel(number)
            await at_work.response(number)


async def test_rows_are_json_whatever_is_in_them(connection: duckdb.DuckDBPyConnection) -> None:
    """One line each; what has no form in JSON is named."""
    async with running(connection) as at_work:
        cases = table(__file__, "rows_are_json_whatever_is_in_them")
        for expression, value in cases:
            found = await at_work.ask(f"SELECT {expression} AS v")
            assert isinstance(found, Rows), (expression, found)
            assert b"\n" not in found.rows[0]
            shown = json.loads(found.rows[0])["v"]
            assert shown == value or str(shown).replace("+00:00", "Z").replace("500000", "5") == value, expression
        for expression in ("2::HUGEINT ** 70", "TIMESTAMP 'infinity'", "MAP {[1]: 1}"):
            found = await at_work.ask(f"SELECT {expression} AS v")
            assert isinstance(found, Rows) or "cast its column" in found.reason, (expression, found)


async def test_typical_mistakes_are_explained(connection: duckdb.DuckDBPyConnection) -> None:
    """With the position, and the name that was probably intended."""
    connection.execute('CREATE VIEW stock AS SELECT key, item, n, n AS "offset" FROM moves')
    async with running(connection) as at_work:
        for sql, says in table(__file__, "mistakes"):
            found = await at_work.ask(sql)
            assert (found.kind, found.reason) == ("invalid", says), sql


async def test_the_limit_of_rows_says_whether_there_are_more(connection: duckdb.DuckDBPyConnection) -> None:
    """In each form."""
    async with running(connection) as at_work:
        for form in ("objects", "arrays", "arrow"):
            for limit, more in (9, True), (10, False), (11, False):
                found = await at_work.ask("SELECT n FROM moves", rows=limit, form=form)
                assert found.more is more, (form, limit)
