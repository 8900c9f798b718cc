"""Processes that do not respond like Headrace."""

from __future__ import annotations

import pytest

from headrace_console.server_api import ApiProblem, Servers
from headrace_console.sessions import Session
from tests.raw_server import always, served

REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:%d/stolen\r\nContent-Length: 0\r\n\r\n"
HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
GZIP = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x00\x00"
GOOD = b'HTTP/1.1 200 OK\r\nContent-Length: 11\r\nX-Correlation-Id: c\r\n\r\n{"ok":true}'


@pytest.mark.parametrize(("response", "serves"), [(HALF, True), (b"", True), (GZIP, True), (REDIRECT, False)])
async def test_the_next_process_gets_what_one_does_not_respond_to(response: bytes, serves: bool) -> None:
    """A GET; a redirect is a response of another server, and its target gets no token."""
    async with (
        served(always(GOOD)) as good,
        served(always(response.replace(b"%d", b"%d" % good.port), then="close")) as bad,
    ):
        servers = Servers([bad.url, good.url])
        try:
            if serves:
                reply = await servers.send(Session("secret"), "GET", "/adm/jobs", query={"limit": 3})
                assert (reply.body, reply.status, reply.correlation_id) == ({"ok": True}, 200, "c")
                assert good.requests[0][0].startswith("GET /in/adm/jobs?limit=3 HTTP/1.1\r\n")
            else:
                with pytest.raises(ApiProblem, match="it redirects to http"):
                    await servers.send(Session("secret"), "GET", "/adm/jobs")
                assert not good.requests
        finally:
            await servers.close()
