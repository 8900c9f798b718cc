"""Requests over a real socket, good and bad, and their responses."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvloop

from headrace import errors
from headrace.http.connection import ClientConnection
from tests.raw_server import Authority, until
from tests.running_server import OpenServer, RunningServer

RECORD = b'{"records":[{"key":"k","value":{"n":1}}]}'


def post(body: bytes, kind: str | None = "application/json", more: str = "", path: str = "/producers/t") -> bytes:
    typed = f"Content-Type: {kind}\r\n" if kind else ""
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\n{typed}Content-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = (
        "POST /producers/t HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head.encode() + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end


BAD = [
    (post(RECORD, None), 400, "ERR10015"),
    (post(b""), 400, "ERR11014"),
    (post(b"", None), 400, "ERR11014"),
    (post(b"{"), 400, "ERR10015"),
    (post(b"\xef\xbb\xbf{}"), 400, "ERR10015"),
    (post(b'{"records":[{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"), 400, "ERR11004"),
    (post(b'{"valueFormat":"string","records":[{"value":1}]}'), 400, "ERR12206"),
    (post(b'{"records":[{"key":1,"partition":3}]}'), 404, "ERR40007"),
    (post(RECORD, path="/producers/missing"), 404, "ERR40006"),
    (post(RECORD, path="/producers"), 404, "ERR10007"),
    (post(RECORD, path='/no"quotes'), 404, "ERR10007"),
    (post(b"{" * 65_537, path="/reactive-consumers/t").replace(b"POST", b"PUT", 1), 400, "ERR11004"),
    (b"GET /nowhere HTTP/1.1\r\nHost: h\r\n\r\n", 404, "ERR10007"),
    (b"GET /producers/t HTTP/1.1\r\nHost: h\r\n\r\n", 405, "ERR10008"),
    (b"DELETE /health/liveness HTTP/1.1\r\nHost: h\r\n\r\n", 405, "ERR10008"),
]


async def test_what_does_not_fit_is_answered_with_the_one_error_body(server: RunningServer) -> None:
    """Correct JSON with the code of the case and an id, and nothing reaches Kafka; the server goes on."""
    for request_bytes, status, code in BAD:
        response = await server.ask(request_bytes)
        assert (response.status, response.json["code"]) == (status, code), request_bytes[:200]
        assert list(response.json) == ["statusCode", "code", "message", "description", "severity", "metadata"]
        assert response.json["statusCode"] == status
        assert response.headers["content-type"] == "application/json"
        assert len(response.headers["x-correlation-id"]) == 22
        assert "Traceback" not in response.body.decode()
    assert server.kafka.producer.records == []
    assert (await server.ask(post(RECORD))).status == 200


@pytest.mark.parametrize("request_bytes", [post(b'{"records":[' + b" " * 2000), chunked(*[b"x" * 500] * 4, end=b"")])
async def test_a_body_over_the_limit_is_refused_and_the_connection_ends(
    opened: OpenServer, request_bytes: bytes
) -> None:
    """By its announced length or by counting; the response arrives, and 413 is not waited for by the whole body."""
    async with opened(max_body_bytes=1000) as server:
        reader, writer = await server.connect()
        writer.write(request_bytes)
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in head
        rest = await asyncio.wait_for(reader.read(), 60)
        assert json.loads(rest)["code"] == "ERR10068"
        assert server.kafka.producer.records == []


async def test_a_large_body_is_refused_before_it_is_sent_when_the_client_asks(opened: OpenServer) -> None:
    """With Expect: 100-continue nothing of the body travels."""
    async with opened(max_body_bytes=1000) as server:
        head = post(b"", more="Expect: 100-continue\r\n").replace(b"Length: 0", b"Length: 5000")
        assert (await server.ask(head)).status == 413


@pytest.mark.parametrize("body", [RECORD, b"{"])
async def test_an_id_of_the_client_comes_back_if_it_is_valid(server: RunningServer, body: bytes) -> None:
    """With errors too. Spaces, other alphabets and long texts do not get into logs and records."""
    for identity in ("c-1", "a b", "\u00e9", "x" * 201, ""):
        request = post(body, more="X-Correlation-Id: ?\r\nX-Traceability-Id: t-1\r\n")
        headers = (await server.ask(request.replace(b"?", identity.encode("latin-1")))).headers
        found = headers["x-correlation-id"]
        assert found == "c-1" if identity == "c-1" else len(found) == 22
        assert headers["x-traceability-id"] == "t-1"


async def test_bytes_of_one_request_are_not_those_of_another(server: RunningServer) -> None:
    """A trailer is not a header, and a half-closed client gets its response."""
    raw = post(b"GET /nope HTTP/1.1\r\nHost: h\r\n\r\n", "text/plain")
    trailer = chunked(b"v", end=b"0\r\nX-Headrace-Key: k\r\n\r\n").replace(b"application/json", b"text/plain")
    reader, writer = await server.connect()
    writer.write(raw)
    assert (await server.read(reader)).status == 200
    writer.write(trailer)
    assert (await server.read(reader)).status == 200
    for lines, rest in ((100_000, b""), (6_000, b"\r\n" + raw)):
        reader, writer = await server.connect()
        writer.write(chunked(b"v", end=b"0\r\n" + b"a: b\r\n" * lines + rest))
        assert (await server.read(reader)).status == 431
    assert [record.key for record in server.kafka.producer.records] == [None, None]
    reader, writer = await server.connect()
    writer.write(chunked(b"v", end=b"0\r\nConnection: close\r\n\r\n") + raw)  # the parser would read no more
    assert (await server.read(reader)).status == 400
    assert await reader.read() == b""
    reader, writer = await server.connect()
    writer.write(post(RECORD))
    writer.write_eof()
    assert (await server.read(reader)).status == 200
    assert await reader.read() == b""


async def test_a_defect_is_one_error_body_without_a_trace(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the trace under the response's id; the client does not."""

    server.kafka.failure = ZeroDivisionError("inner secret")
    response = await server.ask(post(RECORD))
    assert (response.status, response.json["code"]) == (500, "ERR10010")
    assert "secret" not in response.body.decode()

    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize("request_bytes", [post(RECORD), b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n"])
@pytest.mark.uvloop
async def test_a_connection_has_a_limit_of_pipelined_requests(server: RunningServer, request_bytes: bytes) -> None:
    """Sixteen are answered; of thousands the first are, and the connection ends with the last response."""

    reader, writer = await server.connect()
    for _ in range(3):
        writer.write(request_bytes * 16)
        assert [(await server.read(reader)).status for _ in range(16)] == [200] * 16
    server.kafka.producer.records.clear()
    reader, writer = await server.connect()
    writer.write(request_bytes * 300)
    responses = [await server.read(reader) for _ in range(17)]
    assert [response.status for response in responses] == [200] * 17
    assert [response.headers.get("connection") for response in responses] == [None] * 16 + ["close"]
    assert len(server.kafka.producer.records) in (0, 17)


def _read_of(path: str = "/consumers/g/instances/i/records") -> bytes:
    return b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path.encode()


@pytest.mark.parametrize("path", ["/consumers/g/instances/i/records?timeout=1", "/consumers/g/instances/%69/%72ecords"])
async def test_readers_and_other_clients_have_limits_of_their_own(opened: OpenServer, path: str) -> None:
    """Neither kind is refused because of the other, and a connection counts as what it did last."""
    async with opened(max_connections=2) as server:
        reading = await server.connect()
        reading[1].write(_read_of(path))
        assert (await server.read(reading[0])).status == 200
        refused = await server.ask(_read_of())
        assert (refused.status, refused.json["code"], refused.headers["connection"]) == (503, "ERR40031", "close")
        assert "half of http.max_connections" in refused.json["description"]
        others = [await server.connect() for _ in range(2)]
        for reader, writer in others:
            writer.write(post(RECORD))
            assert (await server.read(reader)).status == 200
        assert (await server.ask(post(RECORD))).status == 503
        for request in (post(RECORD), _read_of()):  # a reader commits on its own connection
            reading[1].write(request)
            assert (await server.read(reading[0])).status == 200
        others[0][1].write(_read_of())  # a request is refused, not the connection of another kind
        assert (await server.read(others[0][0])).status == 503
        assert await others[0][0].read() == b""
        reading[1].write(post(RECORD))
        assert (await server.read(reading[0])).status == 200
        shown = (await server.get("/metrics")).body.decode()
        assert 'headrace_http_connections{kind="reads"} 0.0' in shown
        assert 'headrace_http_connections{kind="requests"} 2.0' in shown
        assert (await server.ask(_read_of())).status == 200


def test_a_limit_of_open_files_that_is_too_low_is_refused_at_start(
    opened: OpenServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the number that is needed; a soft limit is raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def start(connections: int) -> None:
        async with opened(max_connections=connections):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)

    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        asyncio.run(start(1000))
        with pytest.raises(errors.EnvironmentProblem, match=r"http\.max_connections .* need \d+ open files"):
            asyncio.run(start(hard))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("loop_factory", "count"), [(asyncio.new_event_loop, 1), (uvloop.new_event_loop, 600)])
def test_a_reset_behind_many_requests_ends_only_its_connection(
    opened: OpenServer, loop_factory: Callable[[], asyncio.AbstractEventLoop], count: int
) -> None:
    """The first responses fail, so the connection is lost before the task of the last request takes its first step."""

    async def main() -> None:
        async with opened() as server:
            connections = server.web.shared.connections
            for _ in range(5):
                client = socket.create_connection(("127.0.0.1", urlsplit(server.web.url).port or 0))
                await until(lambda: connections)
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(post(b"{]") * count + b"GET /nope HTTP/1.1\r\nHost: h\r\n\r\n")
                client.close()
                await until(lambda: not connections)
                assert server.web.death is None
            assert (await server.ask(post(RECORD))).status == 200

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


READ = b"GET /consumers/g/instances/i/records HTTP/1.1\r\nHost: h\r\n\r\n"


class Reader:
    """A client that sends a read. Its goodbye of TLS leaves unread what it has not read."""

    def __init__(self, url: str, tls: bool) -> None:
        host, _, port = url.rpartition("/")[2].partition(":")
        self.raw = socket.create_connection((host, int(port)), 60)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        self._tls: Any = context.wrap_bio(self._in, self._out) if tls else None
        self._call(self._tls.write if tls else self.raw.sendall, READ)

    def read(self) -> None:
        while not self._call(self._tls.read if self._tls else self.raw.recv, 1000).endswith(b"[]"):
            pass

    def goodbye(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self._tls.unwrap()
        self.raw.sendall(self._out.read())

    def _call(self, method: Any, argument: Any) -> Any:
        while True:
            try:
                return method(argument)
            except ssl.SSLWantReadError:
                self.raw.sendall(self._out.read())
                self._in.write(self.raw.recv(100_000))
            finally:
                self.raw.sendall(self._out.read())


@pytest.fixture
def with_tls(tmp_path: Path) -> dict[str, dict[str, Path]]:
    """Settings of a server with a certificate."""
    Authority(tmp_path).issue("server")
    return {"tls": {"certificate": tmp_path / "server.pem", "key": tmp_path / "server.key"}}


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("how", ["plain", "tls", "goodbye", "idle"])
@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_how_a_client_closes_says_whether_it_has_received_the_response(
    opened: OpenServer, with_tls: dict[str, dict[str, Path]], loop_factory: Any, how: str, reads: bool
) -> None:
    """With unread bytes its system resets the connection, also after a goodbye of TLS, which we answer."""

    async def main() -> None:
        tls = how != "plain"
        async with opened(**with_tls if tls else {}) as server:
            client = await asyncio.to_thread(Reader, server.web.url, tls)
            if reads:
                await asyncio.to_thread(client.read)
            connections: Any = server.web.shared.connections
            await until(lambda: any(one._arrival and not one.is_answering for one in connections))
            [(connection, arrival)] = ((one, one._arrival) for one in connections)
            await asyncio.sleep(0.1)
            if how == "goodbye":
                client.goodbye()
                await asyncio.sleep(0.02)  # the server's own end of TLS would arrive meanwhile
            if how == "idle":
                connection._end_idle()
                await asyncio.sleep(0.02)  # the client does not read the server's end
            await asyncio.to_thread(client.raw.close)
            await until(lambda: not connections)
            assert await arrival.received() is (reads or how == "idle")

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


CLOSES_AT_ONCE = f"""
import socket, ssl, sys
for _ in range(20):
    raw = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 60)
    client = ssl._create_unverified_context().wrap_socket(raw)
    client.sendall({READ!r})
    while not client.recv(1000).endswith(b"[]"):
        pass
    client.close()
"""


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_client_that_closes_at_once_has_received_what_it_has_read(
    opened: OpenServer, with_tls: dict[str, dict[str, Path]], monkeypatch: pytest.MonkeyPatch, loop_factory: Any
) -> None:
    """It is quicker than a busy server, which has not looked yet whether the system has its response."""
    arrivals, written = [], ClientConnection.written

    async def observed(connection: ClientConnection, *given: Any) -> Any:
        arrivals.append(await written(connection, *given))
        return arrivals[-1]

    monkeypatch.setattr(ClientConnection, "written", observed)

    async def main() -> None:
        async with opened(**with_tls) as server:
            port = server.web.url.rpartition(":")[2]
            client = subprocess.Popen([sys.executable, "-c", CLOSES_AT_ONCE, port])  # noqa: ASYNC220 a thread is slower
            while client.poll() is None:
                time.sleep(0.001)  # noqa: ASYNC251 the server has other work in each turn
                await asyncio.sleep(0)
            await until(lambda: len(arrivals) == 20)
            assert [arrival and await arrival.received() for arrival in arrivals] == [True] * 20

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())
