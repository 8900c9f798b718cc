"""However a response is cut on its way, it is the same response, or the same refusal."""

import asyncio
import contextvars
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import DestinationUnavailable
from headrace.sidecar.reactive.backend_connection import BackendResponse, Broken, Connection
from headrace.sidecar.reactive.client import ConnectionPool
from raw_server import until

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\nX-A: 1\r\nx-a:\r\nX-A: 2\r\n\r\n"
RESPONSES = [
    HEAD + b"Content-Length: 5\r\n\r\nhello",
    CHUNKED + b"3\r\nabc\r\n2;x\r\nde\r\n0\r\nX-Trailer: 1\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\nX: 1\r\n\r\n" * 2 + b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
    HEAD + b"Connection: close\r\n\r\nuntil the end",
    b"HTTP/1.1 204 No Content\r\n\r\n",
    HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    CHUNKED + b"2\r\nabc\r\n0\r\n\r\n",
    HEAD + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\nx",
    HEAD + b"Content-Length: 101\r\n\r\n",
    CHUNKED + (b"9\r\n123456789\r\n" * 12) + b"0\r\n\r\n",
    b"HTTP/1.1 100 C\r\n\r\n" * 11,
    HEAD + b"X: " + b"y" * 70_000,
    HEAD + b"Content-Length: 5\r\n\r\nhel",
]


class Wire(asyncio.Transport):
    """A transport that goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.aborted = False
        self.waiting = 0

    def write(self, data: Any) -> None:
        self.sent += data

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return self.waiting


def read(pieces: list[bytes]) -> tuple[BackendResponse | str, bool]:
    """Feed a connection, then end it; return the response or refusal, and whether it would have been kept."""

    async def main() -> tuple[BackendResponse | str, bool]:
        connection, wire = Connection(100), Wire()
        connection.connection_made(wire)
        waiter = connection.send(b"requestbody", asyncio.get_running_loop().time() + 600)
        await asyncio.sleep(0)
        assert wire.sent == b"requestbody"
        for piece in pieces:
            if not wire.aborted:
                connection.data_received(piece)
        kept = connection.reusable
        if not wire.aborted:
            connection.eof_received()
        connection.connection_lost(None)
        try:
            return await waiter, kept
        except Broken as broken:
            return str(broken), kept

    return asyncio.run(main())


def same(one: tuple[BackendResponse | str, bool], other: tuple[BackendResponse | str, bool]) -> bool:
    """Refusals may be worded by what had come first; a response is the same to the last byte."""
    if isinstance(one[0], str):
        return isinstance(other[0], str) and not other[1]
    return one == other


@given(st.sampled_from(RESPONSES), st.lists(st.integers(0, 400), max_size=12))
def test_a_response_that_is_cut_anywhere_is_the_same(response: bytes, cuts: list[int]) -> None:
    """Slices of any length."""
    edges = sorted({0, len(response), *(cut for cut in cuts if cut < len(response))})
    assert same(read([response]), read([response[a:b] for a, b in itertools.pairwise(edges)]))


@given(st.binary(max_size=200), st.sampled_from([b"", *RESPONSES]), st.integers(0, 80))
def test_no_bytes_break_it(noise: bytes, response: bytes, at: int) -> None:
    """Noise before, in or behind a response: a response, or a refusal in words; never anything else."""
    got, kept = read([response[:at] + noise + response[at:]])
    assert isinstance(got, BackendResponse) or (got and not kept)


def test_headers_are_those_of_the_response_alone() -> None:
    """Not those of interim answers or behind the body; repeated ones are joined."""
    assert read([RESPONSES[1]])[0] == BackendResponse(200, {"transfer-encoding": "chunked", "x-a": "1, , 2"}, b"abcde")
    assert read([RESPONSES[2]])[0] == BackendResponse(404, {"content-length": "0"}, b"")


@pytest.mark.parametrize(("status", "counts"), [(b"200", False), (b"413", True)])
async def test_a_request_that_was_not_sent_is_not_done(status: bytes, counts: bool) -> None:
    """A success that comes before the whole request is none; a failure is one, and the connection ends."""
    connection, wire = Connection(100), Wire()
    connection.connection_made(wire)
    waiter = connection.send(b"x", asyncio.get_running_loop().time() + 600)
    await asyncio.sleep(0)
    wire.waiting = 1
    connection.data_received(b"HTTP/1.1 " + status + b" Early\r\nContent-Length: 0\r\n\r\n")
    assert not connection.reusable
    if counts:
        assert (await waiter).status == 413
    else:
        with pytest.raises(Broken, match="before it had the whole request"):
            await waiter
    connection.connection_lost(None)


@pytest.mark.parametrize("how", ["response", "lost", "cancelled"])
async def test_a_task_that_waits_continues_with_any_context(how: str) -> None:
    """What arrives takes the next step of the task at once, also of one whose context has no variable."""
    connection = Connection(100)
    connection.connection_made(Wire())
    loop = asyncio.get_running_loop()
    ends: list[object] = []

    async def wait() -> None:
        try:
            ends.append((await connection.send(b"x", loop.time() + 600)).status)
        except (Broken, asyncio.CancelledError) as cause:
            ends.append(type(cause))

    task = loop.create_task(wait(), context=contextvars.Context())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    what: dict[str, tuple[Callable[[], object], object]] = {
        "response": (lambda: connection.data_received(RESPONSES[0]), 200),
        "lost": (lambda: connection.connection_lost(None), Broken),
        "cancelled": (task.cancel, asyncio.CancelledError),
    }
    act, expected = what[how]
    loop.call_soon(act)
    async with asyncio.timeout(10):
        await task
    assert ends == [expected]
    if how != "lost":
        connection.connection_lost(None)


@pytest.mark.parametrize(("first", "second"), [(0.05, 600.0), (600.0, 0.05)])
async def test_each_request_on_a_connection_has_its_own_deadline(first: float, second: float) -> None:
    """An earlier one with less or more time left changes nothing."""
    connection = Connection(100)
    connection.connection_made(Wire())
    earlier = connection.send(b"x", asyncio.get_running_loop().time() + first)
    await asyncio.sleep(0)
    connection.data_received(RESPONSES[0])
    assert (await earlier).body == b"hello"
    later = connection.send(b"x", asyncio.get_running_loop().time() + second)
    if second < first:
        with pytest.raises(Broken, match="no response arrived in time"):
            async with asyncio.timeout(60):
                await later
    else:
        await asyncio.sleep(4 * first)
        for part in (HEAD + b"Content-Length: %d\r\n\r\n" % len(RESPONSES[0]), RESPONSES[0]):
            connection.data_received(part)  # what was a response before is a body here
        assert (await later).body == RESPONSES[0]
    connection.connection_lost(None)


def test_one_that_is_cancelled_before_it_is_sent_is_not_sent() -> None:
    """Each of the others has its response, and one that is cancelled later closes its connection only."""
    got = bytearray()

    class Backend(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = transport

        def data_received(self, data: bytes) -> None:
            got.extend(data)
            self.transport.write(RESPONSES[0])

    async def main() -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(Backend, "127.0.0.1", 0)
        pool = ConnectionPool(
            *server.sockets[0].getsockname(),
            None,
            max_response_bytes=100,
            forbidden=lambda _: "",
            unavailable=lambda cause: DestinationUnavailable(str(cause), url=""),
        )
        await asyncio.gather(*(pool.request(b"first", 60) for _ in range(20)))
        await until(lambda: len(pool._idle) == 20)
        tasks = [loop.create_task(pool.request(b"<%d>" % number, 60)) for number in range(20)]
        tasks[18].cancel()
        await asyncio.sleep(0)
        tasks[19].cancel()  # its request waits for the next turn of the loop
        await asyncio.sleep(0)
        tasks[17].cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(end, BackendResponse) for end in ends] == [True] * 17 + [False] * 3
        await until(lambda: len(pool._idle) == 19)
        pool.close()
        server.close()

    uvloop.run(main())
    assert b"<16>" in got
    assert b"<18>" not in got
    assert b"<19>" not in got
