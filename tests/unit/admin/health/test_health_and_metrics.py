"""Health, metrics, and the life of the server."""

import asyncio

import pytest

from headrace.runtime import Deadline, SystemClock
from tests.running_server import RunningServer


def post(body: bytes, path: str = "/producers/t") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_liveness_fails_for_a_consumer_that_hangs(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body names it; so does the log, because an orchestrator restarts the process."""
    monkeypatch.setattr("headrace.admin.health.routes.hanging_consumers", lambda: ["function f.k consumer"])
    for path in ("/health/liveness", "/live"):
        response = await server.get(path)
        assert (response.status, response.json) == (503, {"status": "hangs", "consumers": ["function f.k consumer"]})


async def test_draining_finishes_what_was_taken_and_refuses_what_comes(server: RunningServer) -> None:
    """Who waits gets a response; who comes is sent elsewhere; health goes on."""
    server.kafka.producer.hold()
    waiting = asyncio.ensure_future(server.ask(post(b'{"records":[{"value":1}]}')))
    await server.kafka.producer.taken.wait()
    drain = asyncio.ensure_future(server.web.drain(Deadline(SystemClock(), 60)))
    await asyncio.sleep(0)
    refused = await server.ask(post(b'{"records":[]}'))
    assert (refused.status, refused.json["code"]) == (503, "ERR40029")
    assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "1")
    assert (await server.get("/health/liveness")).status == 200
    assert not drain.done()
    server.kafka.producer.release()
    assert (await waiting).status == 200
    await asyncio.wait_for(drain, 60)


async def test_after_stop_no_socket_listens(server: RunningServer) -> None:
    """Idle connections are closed, and the port is free."""
    reader, writer = await server.connect()
    writer.write(b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
    await reader.readuntil(b"alive")
    await server.web.stop()
    assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"}")
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await server.connect()
