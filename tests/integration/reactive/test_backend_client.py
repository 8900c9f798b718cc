"""The client of a backend against raw servers on loopback that keep to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import DestinationUnavailable
from headrace.runtime import LoopThread
from headrace.sidecar.reactive.backend_connection import MAX_HEAD_BYTES, MAX_INTERIMS
from tests.raw_server import OK, Authority, Server, always, client_for, rested, run, served, until, why_not
from tests.staged import staged
from yaml_table import table


@staged(run)
async def test_connections_are_kept_and_serve_one_request_at_a_time() -> None:
    """After a rest on one connection; at the same time on as many as there are requests."""
    async with served(always(*[OK] * 100)) as server:
        with client_for(server.url) as client:
            for _ in range(3):
                assert (await client.post(b"x")).body == b"ok"
                await rested(client)
            assert server.connections == 1
            await asyncio.gather(*(client.post(b"%d" % n) for n in range(4)))
            assert server.connections == 4
            assert sorted(body for _, body in server.requests[3:]) == [b"0", b"1", b"2", b"3"]


@staged(run)
async def test_a_request_is_what_was_asked_for_and_nothing_else() -> None:
    """Target, static headers and those of the request; what would change the way it is read is left out."""
    async with served(always(OK, OK)) as server:
        fixed = {"Authorization": "Bearer s", "Content-Type": "text/plain"}
        with client_for(f"{server.url}/a b?q=1&r=%20ü", headers=fixed) as client:
            sent = [(name, value) for name, value in table(__file__, "headers_of_a_record")]
            await client.post(b"body", client.lines(sent))
            await client.get("/health?full=1")
    head, body = server.requests[0]
    assert body == b"body"
    assert head.split("\r\n") == [
        "POST /in/a%20b?q=1&r=%20%C3%BC HTTP/1.1",
        f"Host: 127.0.0.1:{server.port}",
        "Accept-Encoding: identity",
        "Authorization: Bearer s",
        "Content-Type: text/plain",
        "X-Line: one%0D%0AX-Evil: 1%00",
        "X-Name: %C5%81%C3%B3d%C5%BA, 100%",
        "X-Line: again",
        "Content-Length: 4",
        "",
        "",
    ]
    assert server.requests[1][0].startswith("GET /health?full=1 HTTP/1.1\r\n")


COMPLETE = {
    "a length": (OK, 200, b"ok", True),
    "chunks": (
        b"HTTP/1.1 201 C\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n2;x=y\r\nbc\r\n0\r\n\r\n",
        201,
        b"abc",
        True,
    ),
    "a redirect": (b"HTTP/1.1 307 M\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n", 307, b"", True),
    "no body": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b"", True),
    "interims": (b"HTTP/1.1 103 Hint\r\nX: 1\r\n\r\n" * MAX_INTERIMS + OK, 200, b"ok", True),
    "an error": (b"HTTP/1.1 503 S\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n", 503, b"", True),
    "until close": (b"HTTP/1.1 200 OK\r\n\r\nall of it", 200, b"all of it", False),
    "told to close": (OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"), 200, b"ok", False),
    "HTTP/1.0": (OK.replace(b"/1.1", b"/1.0"), 200, b"ok", False),
    "another response behind": (OK + OK.replace(b"200 OK", b"500 Evil"), 200, b"ok", False),
}


@pytest.mark.parametrize("case", COMPLETE)
@staged(run)
async def test_whole_responses_are_read_and_only_sound_connections_kept(case: str) -> None:
    """Every framing of HTTP/1.1; what leaves doubt about where the next response begins ends the connection."""
    raw, status, body, kept = COMPLETE[case]
    first = always(raw, then="eof") if case == "until close" else always(raw, OK)
    async with served(first, always(OK)) as server:
        with client_for(server.url) as client:
            response = await client.post(b"x")
            assert (response.status, response.body) == (status, body)
            if kept:
                await rested(client)
            assert case != "an error" or response.headers == {"retry-after": "7", "content-length": "0"}
            assert (await client.post(b"x")).body == b"ok"
            assert server.connections == (1 if kept else 2)


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    **{name: (text.encode("latin-1"), reason) for name, (text, reason) in table(__file__, "broken").items()},
    "too many interims": (b"HTTP/1.1 100 C\r\n\r\n" * (MAX_INTERIMS + 1) + OK, "interim"),
    "a long head": (HEAD + b"X: " + b"a" * MAX_HEAD_BYTES + b"\r\nContent-Length: 0\r\n\r\n", "head of its response"),
    "long trailers": (CHUNKED + b"0\r\n" + b"X: 1\r\n" * 40_000 + b"\r\n", "head of its response"),
    "a large body until close": (HEAD + b"\r\n" + b"x" * 1_048_577, "larger than 1048576 bytes"),
    "large chunks": (CHUNKED + (b"40000\r\n" + b"x" * 0x40000 + b"\r\n") * 5, "larger than 1048576 bytes"),
}


@pytest.mark.parametrize("case", BROKEN)
@staged(run)
async def test_a_wrong_or_incomplete_response_is_an_error_and_ends_its_connection(case: str) -> None:
    """The reason names the backend without its query; the next request has a new connection."""
    raw, reason = BROKEN[case]
    ends = "response" in reason and not reason.startswith("head")
    async with served(always(raw, then="close") if ends else always(raw, OK)) as server:
        with client_for(f"{server.url}?key=secret") as client:
            text = await why_not(client)
            assert text.startswith(f"waiting for the backend {server.url}: ")
            assert re.search(reason, text), text
            assert "secret" not in text
            await why_not(client)
            assert server.connections == 2


@staged(run)
async def test_a_kept_connection_that_had_been_closed_costs_one_repetition() -> None:
    """Without a byte of a response, the request is repeated once on a new connection; after a byte it is not."""
    async with served(always(OK, b"", then="close"), always(OK, b"HTTP/1.1 ", then="close"), always(OK)) as server:
        with client_for(server.url) as client:
            await client.post(b"1")
            await rested(client)
            assert (await client.post(b"2")).body == b"ok"
            await rested(client)
            assert "before its response was complete" in await why_not(client, b"3")
            assert (await client.post(b"4")).body == b"ok"
    assert [body for _, body in server.requests] == [b"1", b"2", b"2", b"3", b"4"]


MISBEHAVIOUR = {
    # What follows the response, and after how many milliseconds; what is sent before the first request
    "twice at once": (True, 0.0, b""),
    "twice and late": (True, 5.0, b""),
    "twice in pieces": (True, 1.0, b""),
    "early": (False, 0.0, OK),
}


@pytest.mark.parametrize("in_flight", [1, 16])
@pytest.mark.parametrize("case", MISBEHAVIOUR)
@staged(run)
async def test_a_response_belongs_to_one_request(case: str, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that sends a response too many decides about no other request; none is left unsent."""
    is_twice, gap_ms, greeting = MISBEHAVIOUR[case]
    count = 20 if greeting else 200
    if greeting:
        monkeypatch.setattr("headrace.sidecar.reactive.client._REST_SECONDS", 0.2)

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Server()
        writer.write(greeting)
        while True:
            await connection.request(reader)
            number = int(connection.requests[-1][1])
            response = b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % (200 + number % 7)
            writer.write(response)
            if is_twice and number % 5 == 0:
                await asyncio.sleep(gap_ms / 1000)
                for part in (response[:9], response[9:]) if "pieces" in case else (response,):
                    writer.write(part)
                    await asyncio.sleep(0)

    async with served(talk) as server:
        with client_for(server.url) as client:
            numbers, wrong, refused = iter(range(count)), 0, 0

            async def lane() -> None:
                nonlocal wrong, refused
                for number in numbers:
                    try:
                        wrong += (await client.post(b"%d" % number)).status != 200 + number % 7
                    except DestinationUnavailable as error:
                        assert "belong to no request" in error.description
                        refused += 1

            await asyncio.gather(*(lane() for _ in range(in_flight)))
            assert (wrong, refused) == (0, count if greeting else 0)


@pytest.mark.parametrize("tls", [False, True])
def test_bytes_that_wait_on_a_kept_connection_are_of_an_earlier_request(tls: bool, tmp_path: Path) -> None:
    """Also if a response on another connection arrives in the same turn of the loop, and its task goes on at once."""
    authority, held = Authority(tmp_path), dict[bytes, asyncio.StreamWriter]()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Server()
        while True:
            await connection.request(reader)
            body = connection.requests[-1][1]
            held[body] = writer
            if body != b"first":
                await asyncio.sleep(0.02)  # so both of the warm ones have a connection of their own
                writer.write(OK)

    async def late() -> None:
        held[b"first"].write(OK)
        await asyncio.sleep(0.01)
        next(held[one] for one in (b"a", b"b") if held[one] is not held[b"first"]).write(
            b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n"
        )

    def client(port: int) -> Any:
        if not tls:
            return client_for(f"http://127.0.0.1:{port}/in")
        return client_for(f"https://127.0.0.1:{port}/in", tls=ssl.create_default_context(cafile=str(authority.file)))

    async def main(port: int) -> None:
        with client(port) as backend:

            async def lane() -> list[int]:
                return [(await backend.post(body)).status for body in (b"first", b"second")]

            await asyncio.gather(backend.post(b"a"), backend.post(b"b"))
            await rested(backend)
            statuses = asyncio.ensure_future(lane())
            await until(lambda: b"first" in held)
            thread.call(late(), 30)  # the loop stands still meanwhile, so it reads both in one turn
            assert await statuses == [200, 200]

    thread, stack = LoopThread("backend"), contextlib.AsyncExitStack()
    try:
        backend_tls = authority.issue("backend") if tls else None
        server = thread.call(stack.enter_async_context(served(talk, tls=backend_tls)), 30)
        run(lambda: main(server.port))
    finally:
        thread.call(stack.aclose(), 30)
        thread.stop()


async def _drip(writer: asyncio.StreamWriter, head: bytes) -> None:
    writer.write(head)
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("start", "drips"),
    [(b"", False), (HEAD + b"X-Long: ", True), (HEAD + b"Content-Length: 9999\r\n\r\n", True), (CHUNKED + b"1;", True)],
)
@staged(run)
async def test_a_request_has_one_deadline_for_everything(start: bytes, drips: bool) -> None:
    """Silence before, in and after the head, and bytes that come one by one without end; nothing is kept."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.request(reader)
        if drips:
            await _drip(writer, start)
        writer.write(start)
        await reader.read()

    async with served(talk) as server:
        with client_for(server.url, seconds=0.3) as client:
            assert "in time" in await why_not(client)
            await until(lambda: server.ended == server.connections)


@staged(run)
async def test_nothing_is_sent_once_the_client_is_closed() -> None:
    """Neither by a request in flight, which opens no new connection, nor by a later one."""
    async with served(always(OK, b"")) as server:
        with client_for(server.url) as client:
            await client.post(b"1")
            await rested(client)
            task = asyncio.ensure_future(why_not(client, b"2"))
            await until(lambda: len(server.requests) == 2)
            client.close()
            assert "is closed" in await task
            assert "is closed" in await why_not(client, b"3")
        assert [body for _, body in server.requests] == [b"1", b"2"]


@staged(run)
async def test_who_cannot_be_reached_is_named_with_the_next_step() -> None:
    """No process listens, no such name, or an address that is not allowed: no connection is opened."""
    async with served(always(OK)) as server:
        pass
    with client_for(server.url) as client:
        assert "no process listens there: start it, or correct the port" in await why_not(client)
    with client_for("http://nobody.invalid/") as client:
        assert "cannot be resolved" in await why_not(client)
    async with served(always(OK)) as server:
        with client_for(server.url, forbidden=lambda address: f"{address} is ours") as client:
            assert "not allowed: 127.0.0.1 is ours" in await why_not(client)
        assert server.connections == 0
