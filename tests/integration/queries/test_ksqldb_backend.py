"""A ksqlDB server behind the endpoints of a running Headrace, by a recorded exchange of its protocol."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from headrace_devkit.testing import StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.active_client import send
from tests.raw_server import Server, Talk, served_by_thread

HEADER = b'{"queryId":"transient_ORDERS_7","columnNames":["ID","NAME"],"columnTypes":["BIGINT","STRING"]}\n'
ROWS = b'[1,"tea"]\n[2,null]\n'
REFUSED = b'{"@type":"statement_error","error_code":40001,"message":"line 1:1: SELEC","statementText":"","entities":[]}'


def exchange(server: Server, closed: threading.Event) -> Talk:
    """Answer as the recorded server did; `closed` is set when a query is closed."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await server.request(reader)
            head, body = server.requests[-1]
            if head.startswith("POST /close-query "):
                closed.set()
            status, content = (400, REFUSED) if b"SELEC " in body else (200, HEADER + ROWS)
            if b"EMIT CHANGES" in body:  # it does not end
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                writer.write(b"%x\r\n%b\r\n" % (len(content), content))
            else:
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(content), content))

    return talk


def test_statements_run_on_the_ksqldb_server(site: Scenario, headrace: StartHeadrace) -> None:
    """All three endpoints send them to `/query-stream`, and give its rows and its refusal in their own formats."""
    server, closed = Server(), threading.Event()
    with served_by_thread(exchange(server, closed)) as port:
        process = headrace({**site.config, "ksqldb": {"url": f"http://127.0.0.1:{port}"}})
        pull = send(
            "POST", f"{process.url}/query-stream", {"sql": "SELECT * FROM ORDERS;"}, {"Accept": "application/json"}
        )
        assert pull.body[1:] == [[1, "tea"], [2, None]]
        active = send("POST", f"{process.url}/ksqldb/active", {"query": "SELECT * FROM ORDERS WHERE NAME = \\'a\\';"})
        assert active.body == [{"ID": 1, "NAME": "tea"}, {"ID": 2, "NAME": None}]
        assert json.loads(server.requests[-1][1])["sql"] == "SELECT * FROM ORDERS WHERE NAME = 'a';"
        push = {"query": "SELECT * FROM ORDERS EMIT CHANGES;", "queryType": "push", "offset": "earliest"}
        assert send("POST", f"{process.url}/ksqldb/active", push).body == active.body
        assert closed.wait(20), "the push query was not closed on the server"
        refused = send("POST", f"{process.url}/query", {"ksql": "SELEC 1;"})
        assert (refused.status, refused.body["@type"]) == (400, "statement_error")
        assert refused.body["message"] == "ksqlDB refused the statement: line 1:1: SELEC"
    ready = f"{process.url}/health/readiness"
    site.wait_until(lambda: "Start it, or correct ksqldb.url" in str(send("GET", ready).body), "readiness names it")
    down = send("POST", f"{process.url}/query", {"ksql": "SELECT 1;"})
    assert (down.status, down.body["error_code"]) == (502, 50200)
    assert "correct ksqldb.url" in down.body["message"]


def test_a_caller_with_patterns_cannot_use_the_ksqldb_server(site: Scenario, headrace: StartHeadrace) -> None:
    """The server sees one user, so a caller must be allowed to read every topic."""
    scopes = {"all": ["kafka:r"], "every": ["kafka:r", "consume:*"], "some": ["kafka:r", "consume:orders"]}
    tokens = {name: f"{name}-0123456789abcdef" for name in scopes}
    principals = {name: {"token": tokens[name], "scopes": scopes[name]} for name in scopes}
    security = {"mode": "token", "principals": principals}

    def status(url: str, name: str, body: Any) -> int:
        headers = {"Authorization": f"Bearer {tokens[name]}", "Accept": "application/json"}
        return send("POST", process.url + url, body, headers).status

    with served_by_thread(exchange(Server(), threading.Event())) as port:
        ksqldb = {"url": f"http://127.0.0.1:{port}"}
        process = headrace({**site.config, "security": security, "ksqldb": ksqldb})
        statement = "SELECT * FROM ORDERS;"
        found = {name: status("/query-stream", name, {"sql": statement}) for name in scopes}
        assert found == {"all": 200, "every": 200, "some": 403}
        assert status("/query", "some", {"ksql": statement}) == 403
        assert status("/ksqldb/active", "some", {"query": statement}) == 403
        assert status("/ksqldb/active", "every", {"query": statement}) == 200
