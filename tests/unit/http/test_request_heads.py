"""Heads of requests that are refused, and slow clients."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from headrace.http.server import check_deadlines
from tests.raw_server import until
from tests.running_server import RunningServer
from yaml_table import table

BODY = b'{"records":[{"value":1}]}'


def post(*headers: str, host: str = "Host: h", body: bytes = BODY) -> bytes:
    lines = ["POST /producers/t HTTP/1.1", host, "Content-Type: application/json", *headers]
    if not any(name in line for line in headers for name in ("Content-Length", "Transfer-Encoding")):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([line for line in lines if line] + ["", ""]).encode() + body


async def status_of(server: Any, data: bytes) -> tuple[int, bytes]:
    reader, writer = await server.connect()
    writer.write(data)
    text = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    return int(text.split()[1]), text


@pytest.mark.parametrize(("host", "status"), table(__file__, "only_own_names_are_served"))
async def test_only_own_names_are_served(server: RunningServer, host: str, status: int) -> None:
    """A page whose name leads to loopback (DNS rebinding) is refused, in every mode; Host stands once."""
    for _ in range(2):
        assert (await status_of(server, post(host=host)))[0] == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [("http://h", 200), ("https://h", 403), ("http://evil.example", 403), ("null", 403), ("http://h.evil", 403)],
)
async def test_pages_of_other_sites_may_not_call(server: RunningServer, origin: str, status: int) -> None:
    """And no response has CORS headers; a preflight finds nothing."""
    found, head = await status_of(server, post(f"Origin: {origin}"))
    assert found == status
    assert b"access-control" not in head
    preflight = b"OPTIONS /producers/t HTTP/1.1\r\nHost: h\r\nAccess-Control-Request-Method: POST\r\n\r\n"
    found, head = await status_of(server, preflight)
    assert found == 405
    assert b"access-control" not in head


def ambiguous(row: Any) -> bytes:
    """Return the request of a row of the table."""
    if isinstance(row, str):
        return row.encode("latin-1")
    old, new = row.get("replace", ("", ""))
    body = row.get("body", BODY.decode()).encode()
    made = post(*row.get("headers", ()), host=row.get("host", "Host: h"), body=body)
    return made.replace(old.encode(), new.encode()) if old else made


async def test_what_two_readers_may_read_differently_is_refused(server: RunningServer) -> None:
    """Row H2: 400 with the one error body, and the connection ends, so nothing behind it counts as a request."""

    async def refuse(server: Any, case: str, row: Any) -> None:
        reader, writer = await server.connect()
        writer.write(ambiguous(row) + post())
        text = await asyncio.wait_for(reader.read(), 60)
        assert text.startswith(b"HTTP/1.1 400 "), case
        head, _, body = text.partition(b"\r\n\r\n")
        assert text.count(b"HTTP/1.1 ") == 1, case
        assert b"x-correlation-id: " in head
        assert json.loads(body)["code"] == "ERR40039", case

    await asyncio.gather(*(refuse(server, *row) for row in table(__file__, "ambiguous").items()))
    assert server.kafka.producer.records == []


@pytest.mark.parametrize(
    "headers",
    [
        [f"X-{n}: 1" for n in range(101)],
        ["X: 1"] * 101,
        ["X: " + "x" * 40_000],
        ["X: " + "x" * 200_000],
        [f"X-{n}: {'x' * 4000}" for n in range(20)],
        ["Connection: Upgrade", "Upgrade: " + "x" * 40_000],
        ["Connection: Upgrade", *["Upgrade: x"] * 100],
    ],
    ids=["101", "101 of one name", "40 KB", "200 KB", "80 KB in 20", "what is ignored", "101 that are ignored"],
)
async def test_large_heads_are_refused(server: RunningServer, headers: list[str]) -> None:
    """Row H3, whether they come at once or in pieces, and whatever follows; what came before does not count."""
    assert (await status_of(server, post(*headers)))[0] == 431
    assert (await status_of(server, post(*headers) + post()))[0] == 431
    _, writer = pair = await server.connect()
    data = post(*headers)
    for start in range(0, len(data), 10_000):
        writer.write(data[start : start + 10_000])
        await asyncio.sleep(0)
    assert (await asyncio.wait_for(pair[0].readuntil(b"\r\n"), 60)).startswith(b"HTTP/1.1 431")
    assert server.kafka.producer.records == []
    reader, writer = await server.connect()
    writer.write(post(body=b'{"records":[{"value":"%b"}]}' % (b"x" * 40_000)) + post()[:50])
    assert (await server.read(reader)).status == 200
    writer.write(post()[50:])
    assert (await server.read(reader)).status == 200


async def test_a_long_path_is_refused(server: RunningServer) -> None:
    """More than 8 KiB with its query."""
    assert (await server.get("/" + "x" * 8193)).status == 431
    assert (await server.get("/live?" + "x" * 8193)).status == 431
    assert (await server.get("/live?" + "x" * 8000)).status == 200


SLOW = {
    "silent": b"",
    "half a head": b"POST /producers/t HT",
    "half a second head": post() + b"POST /prod",
    "line breaks between requests": post(),
    "no body": post(body=b"")[:-4].replace(b"Length: 0", b"Length: 9") + b"\r\n\r\n",
    "half a body": post("Content-Length: 900"),
    "half a chunk": post("Transfer-Encoding: chunked", body=b"5\r\nab"),
}


@pytest.mark.parametrize("case", SLOW)
async def test_slow_clients_are_let_go(server: RunningServer, case: str) -> None:
    """Row H1: after ten seconds without a head, or with a body slower than 1 KiB/s."""
    reader, writer = await server.connect()
    writer.write(SLOW[case])
    if "second" in case or "between" in case:
        await reader.readuntil(b'OK"}')
    if "between" in case:
        writer.write(b"\r\n")
    connections: Any = server.web.shared.connections
    await until(lambda: any(_has_come(connection, case) for connection in connections))
    check_deadlines(connections, 100.0)
    check_deadlines(connections, 110.0)
    assert not next(iter(connections)).transport.is_closing()
    check_deadlines(connections, 110.1)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 60) == b""


def _has_come(connection: Any, case: str) -> bool:
    if case == "silent":
        return True
    if case == "line breaks between requests":
        return not connection.requests.is_idle
    if "body" in case or "chunk" in case:
        return not connection._parser.in_head
    return connection._parser.heads and connection._parser.in_head


async def test_others_are_not_let_go(server: RunningServer) -> None:
    """Idle between requests, waiting for a response, a body that is fast enough, one that may be slow."""
    idle = await server.connect()
    idle[1].write(post())
    await idle[0].readuntil(b'OK"}')
    server.kafka.producer.hold()
    waiting = await server.connect()
    waiting[1].write(post())
    await server.kafka.producer.taken.wait()
    sending = await server.connect()
    sending[1].write(post("Content-Length: 900000"))
    connections: Any = server.web.shared.connections
    await until(lambda: len(connections) == 3 and not any(connection._parser.in_head for connection in connections))
    slow = next(connection for connection in connections if connection.requests.latest.body.has_more)
    check_deadlines(connections, 100.0)
    slow._parser.received_bytes += 20_000
    check_deadlines(connections, 112.0)
    slow.requests.latest.is_streaming = True
    check_deadlines(connections, 124.0)
    check_deadlines(connections, 136.0)
    assert not any(connection.transport.is_closing() for connection in connections)
    slow.requests.latest.is_streaming = False
    check_deadlines(connections, 137.0)
    check_deadlines(connections, 148.0)
    assert [c for c in connections if c.transport.is_closing()] in ([slow], [])
    server.kafka.producer.release()


async def test_a_request_ends_after_a_minute(server: RunningServer) -> None:
    """One that waits is told that the outcome is unknown, one whose body is still coming is cut off; streams go on."""

    async def rest(reader: asyncio.StreamReader) -> bytes:
        with contextlib.suppress(ConnectionResetError):
            return await asyncio.wait_for(reader.read(), 60)
        return b""

    server.kafka.producer.hold()
    pairs = [await server.connect() for _ in range(3)]
    for pair, data in zip(pairs, (post(), post("Content-Length: 900000"), post()), strict=True):
        pair[1].write(data)
    connections: Any = server.web.shared.connections
    await until(lambda: len(connections) == 3 and not any(connection._parser.in_head for connection in connections))
    address = pairs[2][1].get_extra_info("sockname")
    stream = next(connection for connection in connections if connection.peer.address == address)
    stream.requests.latest.is_streaming = True
    for now in range(0, 61, 6):
        for connection in connections:
            connection._parser.received_bytes += 60_000
        check_deadlines(connections, 100.0 + now)
    assert not any(connection.transport.is_closing() for connection in connections)
    check_deadlines(connections, 160.1)
    server.kafka.producer.release()
    text = await rest(pairs[0][0])
    assert text.startswith(b"HTTP/1.1 504 ")
    assert text.count(b"HTTP/1.1 ") == 1
    assert json.loads(text.partition(b"\r\n\r\n")[2])["code"] == "ERR40013"
    assert await rest(pairs[1][0]) == b""
    assert (await pairs[2][0].readline()).startswith(b"HTTP/1.1 200 ")


async def test_what_has_not_come_whole_has_a_limit_in_all(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or many who send a part each would use up the memory; who goes over it is refused, and the others go on."""
    monkeypatch.setattr("headrace.http.received_requests._MOST_RECEIVING_BYTES", 150_000)
    body = b'{"records":[{"value":"%b"}]}' % (b"x" * 100_000)
    head = b"POST /producers/t HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\n"
    requests = [
        head + b"Content-Length: %d\r\n\r\n%b" % (len(body), body),
        head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
    ]
    shared = server.web.shared
    for first, second in (requests, reversed(requests)):
        pairs = [await server.connect() for _ in range(2)]
        pairs[0][1].write(first[:-1])
        await until(lambda: shared.receiving_bytes >= 100_000)
        pairs[1][1].write(second[:-1])
        response = await server.read(pairs[1][0])
        assert (response.status, response.json["code"]) == (503, "ERR40031")
        assert 100_000 <= shared.receiving_bytes < 150_000
        pairs[0][1].write(first[-1:])
        assert (await server.read(pairs[0][0])).status == 200
        pairs[1][1].close()
        await until(lambda: shared.receiving_bytes == 0)
