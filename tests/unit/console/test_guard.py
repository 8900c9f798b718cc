"""What the console refuses in a browser, and that foreign text is shown as text."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

import headrace_console
from headrace_console.feeds import Feed
from headrace_console.guard import SESSION, Guard
from headrace_console.server_api import Servers
from headrace_console.sessions import Session, Sessions
from tests.running_server import OpenServer

ANN, BOB = "a-token-of-an-operator", "a-token-of-a-reader.."
SECURITY = {
    "mode": "token",
    "principals": {"ann": {"token": ANN, "scopes": ["admin"]}, "bob": {"token": BOB, "scopes": ["kafka:r"]}},
}
FORBIDDEN = {"html", "markdown", "run_javascript", "add_head_html", "innerHTML", "restructured_text", "mermaid"}
SELF, OTHER = "http://127.0.0.1:8090", "http://evil.example"


async def shown(scope: Any, receive: Any, send: Any) -> None:
    """A page that shows which token it has."""
    body = f"<script>{scope[SESSION].token}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/html")]})
    await send({"type": "http.response.body", "body": body})


async def test_a_login_is_a_cookie_and_other_sites_are_refused(opened: OpenServer) -> None:
    """The token is in no address and no page; the cookie is no use to scripts, to other sites, or after its end."""
    async with opened(security=SECURITY) as server:
        sessions, servers = Sessions(), Servers([server.web.url])
        guard = Guard(shown, servers=servers, sessions=sessions, hosts=["127.0.0.1"], cookie="c", secure=True)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=SELF) as client:
            assert await servers.needs_token()
            form, own = {"token": ANN}, {"Origin": SELF}
            refused = [
                await client.post("/login", data=form, headers={"Origin": OTHER}),
                await client.post("/login", data=form),
                await client.get("/", headers={"Host": "evil.example"}),
                await client.get("/_nicegui_ws/socket.io/?transport=polling"),
            ]
            assert [one.status_code for one in refused] == [403] * 4
            headers, closed = [(b"host", b"127.0.0.1"), (b"origin", b"http://127.0.0.1")], list[Any]()
            socket = {"type": "websocket", "path": "/_nicegui_ws/socket.io/", "query_string": b"", "headers": headers}
            await guard(socket, client.get, AsyncMock(side_effect=closed.append))
            assert closed[0]["reason"] == "a web socket belongs to one page"
            wrong = await client.post("/login", data={"token": "<b>" + "x" * 20}, headers=own)
            assert wrong.status_code == 401 and "<b>" not in wrong.text and not wrong.cookies
            done = await client.post("/login", data=form, headers=own)
            assert done.headers["location"] == "/" and ANN not in done.text + str(done.headers)
            for part in ("HttpOnly", "SameSite=strict", "Secure"):
                assert part in done.headers["set-cookie"]
            cookie = {"Cookie": done.headers["set-cookie"].partition(";")[0]}
            page = await client.get("/", headers=cookie)
            assert ANN in page.text and page.headers["x-frame-options"] == "DENY"
            nonce = page.text.partition('nonce="')[2].partition('"')[0]
            assert f"script-src 'self' 'nonce-{nonce}'" in page.headers["content-security-policy"]
            await client.post("/logout", headers={**cookie, **own})
            assert ANN not in (await client.get("/", headers=cookie)).text
            await client.post("/login", data={"token": BOB}, headers=own)
            [session] = sessions._sessions.values()
            assert session.problem_with("admin") and not session.problem_with("kafka:r")
        await servers.close()


def test_sessions_are_bounded_and_end_when_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A browser that is left alone is logged out, and a flood of logins takes no memory."""
    sessions = Sessions()
    cookies = [sessions.open(str(number)) for number in range(101)]
    assert [sessions.find(cookies[number]).token for number in (0, 1, 100)] == ["", "1", "100"]
    shown_by_an_open_page = sessions.find(cookies[7])
    sessions.end(cookies[7])
    assert shown_by_an_open_page.token == "", "its buttons cannot act any more"
    sessions.find(cookies[5]).used_at -= 1801
    assert sessions.find(cookies[5]).token == ""
    assert Session("e30.eyJzY29wZSI6ImthZmthOnIifQ.x").problem_with("admin") == "your token has no scope admin"


async def test_polls_continue_whatever_responds(opened: OpenServer) -> None:
    """Requests at the same time find the process that lives; a response that is no response is an outage."""
    async with opened() as server:
        servers = Servers(["http://127.0.0.1:9", server.web.url])
        await asyncio.gather(*(servers.send(Session(""), "GET", "/health/liveness") for _ in range(4)))
        await servers.close()
    text = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}"
    async with await asyncio.start_server(
        lambda _, writer: [writer.write(text), writer.close()], "127.0.0.1", 0
    ) as other:
        sessions, servers = Sessions(), Servers([f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}"])
        feed, delivered = Feed(servers, sessions, sessions.shared, "/x", 1), list[Any]()
        shows: Any = [SimpleNamespace(deliver=one) for one in (None, lambda *found: delivered.append(found))]
        feed.subscribers = shows
        await feed.refresh()
        await servers.close()
    assert delivered[0][1].status == 502


async def test_a_silent_server_and_a_busy_user_do_not_stop_others() -> None:
    """One login has 30 requests at a time, and the next one still has a connection; of many logins, 8 are tried."""
    connections = asyncio.Queue[asyncio.StreamWriter]()
    async with await asyncio.start_server(lambda *pair: connections.put_nowait(pair[1]), "127.0.0.1", 0) as silent:
        servers = Servers([f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"])
        guard = Guard(shown, servers=servers, sessions=Sessions(), hosts=["127.0.0.1"], cookie="c", secure=False)
        async with (
            httpx.AsyncClient(transport=httpx.ASGITransport(guard), base_url=SELF) as client,
            asyncio.timeout(30),
        ):
            busy = Session("busy")
            waiting = [servers.send(session, "GET", "/x") for session in [busy] * 200 + [Session("")]]
            waiting += [client.post("/login", data={"token": "x"}, headers={"Origin": SELF}) for _ in range(9)]
            tasks = [*map(asyncio.ensure_future, waiting)]
            [refused], _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            assert "too many others log in now" in (await refused).text
            writers = [await connections.get() for _ in range(30 + 1 + 8)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            assert connections.empty()
            for writer in writers:
                writer.close()
        await servers.close()


def test_no_page_makes_html_of_text() -> None:
    """Nothing that takes HTML, Markdown or code is used with a text that is not fixed."""
    found = [
        f"{path.name}:{node.lineno} {node.attr}"
        for path in Path(headrace_console.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in FORBIDDEN and ast.unparse(node.value) != "html"
    ]
    assert found == []
    assert "v-html" not in "".join(path.read_text() for path in Path(headrace_console.__path__[0]).rglob("*.js"))
