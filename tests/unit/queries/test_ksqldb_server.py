"""The client of a ksqlDB server, against raw servers that play recorded exchanges."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace import errors
from headrace.errors import KsqldbUnavailable, StatementRejected
from headrace_devkit.testing import ManualClock
from headrace_queries.callers import Caller
from headrace_queries.ksqldb import KsqlColumn
from headrace_queries.ksqldb_config import KsqldbConfig
from headrace_queries.ksqldb_server import MAX_LINE_BYTES, KsqldbServer
from headrace_queries.ksqldb_statements import KsqldbStatements
from tests.raw_server import OK, Authority, Server, Talk, always, served, until
from yaml_table import table

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def response(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nLocation: /x\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def in_chunks(server: Server, body: bytes, size: int, *, ends: bool) -> Talk:
    """Answer in chunks of a size; then end the response and answer the next request, or keep it open."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await server.request(reader)
            writer.write(CHUNKED)
            for start in range(0, len(body), size):
                piece = body[start : start + size]
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await asyncio.sleep(0)
            if not ends:
                await reader.read()
            writer.write(b"0\r\n\r\n")

    return talk


@contextlib.asynccontextmanager
async def client_of(server: Server, **settings: Any) -> AsyncIterator[KsqldbServer]:
    url = f"http://127.0.0.1:{server.port}/"
    client = KsqldbServer(KsqldbConfig.model_validate({"url": url, "timeout_seconds": 20, **settings}), ManualClock())
    try:
        yield client
    finally:
        await client.close()


async def rows_of(client: KsqldbServer, sql: str = "SELECT 1", found: list[bytes] | None = None) -> list[bytes]:
    found = [] if found is None else found
    async with client.query(sql, {}) as rows:
        async for batch in rows:
            found += batch
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
async def test_rows_arrive_whole_whatever_the_chunks(size: int) -> None:
    """A chunk may end within a character; blank lines and tokens are no rows."""
    body = table(__file__, "push").rstrip().encode()
    async with served(lambda server: in_chunks(server, body, size, ends=True)) as server, client_of(server) as client:
        async with client.query("SELECT * FROM ORDERS", {}) as rows:
            found = [row async for batch in rows for row in batch]
        assert rows.query_id == "transient_ORDERS_7"
        assert rows.columns == [KsqlColumn("ID", "BIGINT"), KsqlColumn("NAME", "STRING")]
        assert [json.loads(row) for row in found] == [[1, "Müller \\n [x]"], [2, None], [3, {"a": [1.5]}]]
        assert found[2] == b'[3,{"a":[1.50]}]'
        assert len(server.requests) == 1, "a query that has ended is not closed"


async def test_a_request_has_the_statement_and_its_properties() -> None:
    """Each statement ends with a semicolon; the login is sent."""
    pull = response(200, table(__file__, "pull").encode())
    async with served(always(pull, pull)) as server, client_of(server, username="u", password="p") as client:
        async with client.query("SELECT 1 -- one", {"auto.offset.reset": "earliest"}, {"n": 1}) as rows:
            assert [row async for batch in rows for row in batch] == [b"[1.50]"]
        assert rows.query_id == ""
        assert await rows_of(client, "SELECT 1; ") == [b"[1.50]"]
        (head, first), (_, second) = server.requests
        assert head.startswith("POST /query-stream HTTP/1.1\r\n")
        assert "\r\nAuthorization: Basic dTpw\r\n" in head
        assert "\r\nAccept: application/vnd.ksqlapi.delimited.v1" in head
        assert "\r\nAccept-Encoding: identity\r\n" in head
        properties = {"auto.offset.reset": "earliest"}
        assert json.loads(first) == {
            "sql": "SELECT 1 -- one\n;",
            "properties": properties,
            "sessionVariables": {"n": 1},
        }
        assert json.loads(second) == {"sql": "SELECT 1; ", "properties": {}}


async def test_a_push_query_is_closed_when_its_reader_leaves() -> None:
    """Rows are there before the response ends; the server is asked to end the query, and the connection is closed."""
    body = table(__file__, "push").encode()
    talks = (lambda server: in_chunks(server, body, 1000, ends=False), always(OK))
    async with served(*talks) as server, client_of(server) as client:
        async with client.query("SELECT * FROM ORDERS EMIT CHANGES", {}) as rows:
            found: list[bytes] = []
            async for batch in rows:
                found += batch
                if len(found) == 3:
                    break
            assert (len(server.requests), server.ended) == (1, 0)
        head, closed = server.requests[1]
        assert head.startswith("POST /close-query HTTP/1.1\r\n")
        assert json.loads(closed) == {"queryId": "transient_ORDERS_7"}
        await until(lambda: server.ended == 1, "the connection of the query")


async def test_a_silent_push_query_can_be_closed() -> None:
    """Each second without rows is an empty batch, so that a client gets a sign of life; then the rows end."""
    body = table(__file__, "push").encode()
    talks = (lambda server: in_chunks(server, body, 1000, ends=False), always(OK))
    async with served(*talks) as server, client_of(server) as client:
        batches: list[int] = []
        async with client.query("SELECT * FROM ORDERS EMIT CHANGES", {}) as rows:
            async for batch in rows:
                batches.append(len(batch))
                if not batch:
                    rows.close()
        assert batches == [3, 0]
        assert [head.split()[1] for head, _ in server.requests] == ["/query-stream", "/close-query"]


async def test_the_endpoints_use_the_server_and_close_its_query() -> None:
    """Only the owner closes a query, under the id that Headrace gave it; names and types are the server's."""
    body = table(__file__, "push").encode()
    talks = (lambda server: in_chunks(server, body, 1000, ends=False), always(OK))
    async with served(*talks) as server, client_of(server) as client:
        statements = KsqldbStatements(None, client, 10)
        text, properties = "SELECT * FROM `Orders` EMIT CHANGES;", {"auto.offset.reset": "earliest"}
        async with statements.run(text, properties, {}, [], Caller("me")) as query:
            assert (query.push, query.columns[1]) == (True, KsqlColumn("NAME", "STRING"))
            with pytest.raises(StatementRejected, match="No query with id"):
                statements.close(query.id, "you")
            statements.close(query.id, "me")
            assert [len(batch) async for batch in query.rows] == [3]
        assert json.loads(server.requests[0][1]) == {"sql": text, "properties": properties}
        assert json.loads(server.requests[1][1]) == {"queryId": "transient_ORDERS_7"}


@pytest.mark.parametrize(("status", "body", "error", "problem"), table(__file__, "refusals"))
async def test_a_refusal_says_what_to_do(status: int, body: str, error: str, problem: str) -> None:
    """The statement is wrong, or the server is not usable; no redirect is followed."""
    talk = always(response(status, body.encode()))
    async with served(talk) as server, client_of(server, username="u", password="canary") as client:
        with pytest.raises(getattr(errors, error), match=problem) as refused:
            await rows_of(client)
        assert "canary" not in str(refused.value)
        assert len(server.requests) == 1


@pytest.mark.parametrize(("body", "count", "error", "problem"), table(__file__, "broken_responses"))
async def test_a_response_that_breaks_is_an_error(body: str, count: int, error: str, problem: str) -> None:
    """Rows before it are given; such a query is not closed once more."""
    async with served(always(response(200, body.encode()))) as server, client_of(server) as client:
        found: list[bytes] = []
        with pytest.raises(getattr(errors, error), match=problem):
            await rows_of(client, found=found)
        assert (len(found), len(server.requests)) == (count, 1)


async def test_a_line_is_bounded() -> None:
    """Also one that never ends."""
    body = table(__file__, "pull").encode() + b"[" + b"1" * MAX_LINE_BYTES + b"]"
    talk = lambda server: in_chunks(server, body, 100_000, ends=False)  # noqa: E731
    async with served(talk) as server, client_of(server) as client:
        with pytest.raises(KsqldbUnavailable, match=r"longer than 4194304 bytes\. Select less"):
            await rows_of(client)


async def test_a_server_that_is_silent_or_down_is_unavailable() -> None:
    """The begin of a response has a limit, its rows have none; a refused connection has the address."""
    for talk in (lambda server: in_chunks(server, b"", 1, ends=False), lambda _: _silent):
        async with served(talk) as server, client_of(server, timeout_seconds=0.05) as client:
            with pytest.raises(KsqldbUnavailable, match=r"no response within 0\.05 s"):
                await rows_of(client)
    async with client_of(Server(), url="http://127.0.0.1:1") as client:
        with pytest.raises(KsqldbUnavailable, match=r"127\.0\.0\.1:1 .*Start it, or correct ksqldb\.url"):
            await client.check()


async def test_the_certificate_of_the_server_is_checked(tmp_path: Path) -> None:
    """By the authority of the section."""
    good, other = Authority(tmp_path), Authority(tmp_path, "other")
    shown = good.issue("server")
    async with served(always(response(200, b"{}")), tls=shown) as server:
        url = f"https://127.0.0.1:{server.port}"
        async with client_of(server, url=url, tls={"ca": good.file}) as client:
            await client.check()
            assert server.requests[0][0].startswith("GET /info HTTP/1.1\r\n")
        async with client_of(server, url=url, tls={"ca": other.file}) as client:
            with pytest.raises(KsqldbUnavailable, match=r"not trusted: .*ksqldb\.tls\.ca"):
                await client.check()


async def _silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await reader.read()
    await asyncio.Event().wait()
