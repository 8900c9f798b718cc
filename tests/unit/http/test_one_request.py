"""One request is one request: whatever is in its head, its body is never read as the next head."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import h11
import pytest
import uvloop

from headrace.config.http import HttpConfig
from headrace.errors import HeadraceError
from headrace.http.connection import ClientConnection
from headrace.http.messages import HttpResponse, respond_error
from headrace.http.request import ClientGone, HttpRequest
from headrace.http.request_checks import RequestChecks
from headrace.http.shared import Shared
from headrace.http.targets import Targets

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: h\r\n\r\n"
METHODS = (b"GET", b"POST", b"POST", b"PUT", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH")
PATHS = (b"/direct", b"/direct?a=b", b"/task", b"/early", b"/producers/direct", b"http://h/task")
CONNECTION = (
    b"Upgrade",
    b"upgrade, HTTP2-Settings",
    b"keep-alive, Upgrade",
    b"UPGRADE",
    b"keep-alive",
    b"Upgrade, close",
)
UPGRADE = (b"h2c", b"websocket", b"TLS/1.0, HTTP/2.0", b"x", b"")
OTHERS = (
    b"HTTP2-Settings: AAMAAABk",
    b"Content-Type: application/json",
    b"Expect: 100-continue",
    b"X: \xff y",
    b"TE: trailers",
)
TRAILERS = (b"", b"", b"X: y\r\n", b"Connection: Upgrade\r\nUpgrade: h2c\r\n")
ODD = (
    *(
        b"Content-Length: 3\r\n",
        b"Content-Length: 0\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: gzip\r\n",
    ),
    *(
        b"Upgrade: h2c\r\n",
        b"Connection: upgrade\r\n",
        b"Upgrade : x\r\n",
        b" Upgrade: x\r\n",
        b"\r\n",
        b"\n",
        b"\r",
        b"\0",
        b" ",
    ),
    *(b"0\r\n\r\n", b"Connection: close\r\n", b"Host: h\r\n", HIDDEN),
)


class Seen(NamedTuple):
    """A request as a reader understands it."""

    method: str
    target: bytes
    fields: list[tuple[bytes, bytes]]
    body: bytes | None
    """None if it was not read."""


class Recorder:
    """An application that keeps every request, and serves some of them without a task, or before their body came."""

    def __init__(self) -> None:
        self.requests: list[Seen] = []
        self.targets = Targets(())
        self._checks = RequestChecks(HttpConfig.model_validate({"port": 0, "allowed_hosts": ["h"]}))

    def needs(self, request: HttpRequest) -> bool:
        try:
            self._checks.check(request)
        except HeadraceError:
            return True
        return b"direct" not in request.head.target

    def do(self, request: HttpRequest) -> bool:
        self._respond(request, b"".join(request.body.chunks))
        return True

    async def load(self, request: HttpRequest) -> None:
        try:
            self._checks.check(request)
            body = b""
            while request.head.path != "/early" and (part := await request.body.receive()):
                body += part
            self._respond(request, None if request.head.path == "/early" else body)
        except ClientGone:
            return
        except HeadraceError as error:
            self._keep(request, None)
            await respond_error(request, error)

    def _respond(self, request: HttpRequest, body: bytes | None) -> None:
        self._keep(request, body)
        request.response.respond(HttpResponse(b""))

    def _keep(self, request: HttpRequest, body: bytes | None) -> None:
        target = request.head.target + (b"?" + request.head.query if request.head.query else b"")
        fields = [(name, value.strip()) for name, value in request.head.fields if name != b"upgrade"]
        self.requests.append(Seen(request.head.method, target, fields, body))


class Wire(asyncio.Transport):
    """A transport that keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_paused = self.is_closed = False

    def write(self, data: Any) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def get_write_buffer_size(self) -> int:
        return 0


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until a condition holds."""
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0)
    raise TimeoutError


def has_more(connection: ClientConnection) -> bool:
    """Return whether a connection waits for a body."""
    return connection.requests.latest is not None and connection.requests.latest.body.has_more


async def read_by_headrace(pieces: list[bytes], chance: random.Random) -> tuple[list[Seen], bytes]:
    """Return the requests that are served when these pieces arrive, and what is sent."""
    application, wire, tasks = Recorder(), Wire(), set()

    def spawn(request: Any, name: str) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(request)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    connection = ClientConnection(Shared({"requests": 1, "reads": 1}, application, "http", spawn))
    connection.connection_made(wire)
    for piece in pieces:
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        await until(lambda: wire.is_closed or not wire.is_paused)
        if wire.is_closed:
            break
        connection.data_received(piece)
    await until(lambda: not connection._waiting and (not tasks or not connection.is_answering or has_more(connection)))
    connection.connection_lost(None)
    await until(lambda: not tasks)
    return application.requests, wire.sent


def read_by_h11(data: bytes) -> tuple[list[Seen], bool]:
    """Return the requests that a second parser finds, and whether it refuses what follows them."""
    found: list[Seen] = []
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1_000_000)
    connection.receive_data(data)
    try:
        while type(event := connection.next_event()) is h11.Request:
            fields = [field for field in event.headers if field[0] != b"upgrade"]
            found.append(Seen(event.method.decode(), event.target.removeprefix(b"http://h"), fields, None))
            body = b""
            while type(event := connection.next_event()) is h11.Data:
                body += event.data
            if event is h11.NEED_DATA:
                return found, False
            found[-1] = found[-1]._replace(body=body)
            connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is h11.MUST_CLOSE:
                return found, False
            connection.start_next_cycle()
        return found, False
    except h11.RemoteProtocolError:
        return found, True


def request_of(chance: random.Random) -> bytes:
    """Return a request that is right, with a body that looks like the next one."""
    fields = [b"Host: h", *chance.sample(OTHERS, chance.randrange(3))]
    if chance.random() < 0.7:
        fields += [b"Connection: " + chance.choice(CONNECTION[: 6 if chance.random() < 0.2 else 5])]
        fields += [chance.choice((b"Upgrade: ", b"UPGRADE:", b"upgrade:\t")) + chance.choice(UPGRADE)]
    body = chance.choice((b"", HIDDEN, HIDDEN * 2, b"\r\n\r\n" + HIDDEN, b"0\r\n\r\n" + HIDDEN, chance.randbytes(9)))
    framing = chance.choice(("none", "length", "length", "chunked"))
    if framing == "length":
        fields.append(b"Content-Length: %d" % len(body))
    elif framing == "chunked":
        fields.append(b"Transfer-Encoding: chunked")
        size = chance.choice((1, 7, 1000))
        parts = [body[start : start + size] for start in range(0, len(body), size)]
        extension = chance.choice((b"", b";a=b"))
        body = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
        body += b"0\r\n%b\r\n" % chance.choice(TRAILERS)
    else:
        body = b""
    chance.shuffle(fields)
    head = b"\r\n".join((b"%b %b HTTP/1.1" % (chance.choice(METHODS), chance.choice(PATHS)), *fields))
    return b"%b\r\n\r\n%b" % (head, body)


def pieces_of(data: bytes, chance: random.Random) -> list[bytes]:
    """Cut at random, at each byte, or around the ends of lines."""
    how = chance.randrange(4)
    places: Any = sorted(chance.choices(range(len(data) + 1), k=how))
    if how == 0 and len(data) < 400:
        places = range(1, len(data))
    elif how == 3:
        ends = [at for at in range(len(data)) if data[at : at + 4] == b"\r\n\r\n"] or [0]
        places = sorted({at + chance.randrange(6) for at in chance.choices(ends, k=3)})
    bounds = [0, *places, len(data)]
    return [data[start:end] for start, end in itertools.pairwise(bounds) if start < end]


def case_of(number: int) -> tuple[list[bytes], bool]:
    """Return the pieces of a case, and whether all of it is right."""
    chance = random.Random(number)
    requests = [request_of(chance) for _ in range(chance.randrange(1, 5))]
    requests += [requests[-1]] * chance.choice((0, 0, 2))  # the head that is kept
    if chance.random() < 0.5:
        return requests if chance.random() < 0.5 else pieces_of(b"".join(requests), chance), True
    data = bytearray(b"".join(requests))
    for _ in range(chance.randrange(1, 3)):
        at = chance.choice([0, *(at + 2 for at in range(len(data)) if data[at : at + 2] == b"\r\n")])
        at = chance.choice((at, chance.randrange(len(data) + 1)))
        data[at : at + chance.choice((0, 0, 1, 20))] = chance.choice(ODD)
    return pieces_of(bytes(data), chance), False


def test_no_bytes_of_a_body_are_read_as_a_head(request: pytest.FixtureRequest) -> None:
    """A second parser finds the same requests, whatever the framing, the pieces and the way to serve."""

    async def main() -> None:
        for number in range(100_000 if request.config.getoption("--all") else 2000):
            pieces, is_right = case_of(number)
            found, sent = await read_by_headrace(pieces, random.Random(number))
            wanted, is_refused = read_by_h11(b"".join(pieces))
            for one, other in zip(found, wanted, strict=False):
                assert one == other._replace(body=other.body if one.body is not None else None), (number, pieces)
            assert len(found) == len(wanted) if is_right else len(found) <= len(wanted) or is_refused, (number, pieces)
            answered = sent.count(b"HTTP/1.1 200 ")
            assert answered == len(found) if is_right else answered <= len(found), (number, pieces)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


async def test_what_waits_for_a_later_turn_is_read_before_an_end_and_not_behind_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A half-closed client gets its response; nothing is served once the connection is closed."""
    monkeypatch.setattr("headrace.http.shared._SLICE_SECONDS", 0.0)
    for end in (ClientConnection.eof_received, ClientConnection.shut_down):
        application, wire = Recorder(), Wire()
        connection = ClientConnection(Shared({"requests": 1, "reads": 1}, application, "http", lambda *_: None))  # type: ignore[arg-type, return-value]
        connection.connection_made(wire)
        connection.data_received(b"GET /direct HTTP/1.1\r\nHost: h\r\n\r\n")
        assert not wire.sent
        end(connection)
        connection.read_waiting()
        assert (len(application.requests), wire.sent[:13]) == (
            (1, b"HTTP/1.1 200 ") if end.__name__[0] == "e" else (0, b"")
        )
