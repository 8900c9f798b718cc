"""Health, metrics, and the life of the server."""

from __future__ import annotations

import asyncio

import pytest

from headrace.runtime import Deadline, Readiness, SystemClock
from tests.running_server import RunningServer


def post(body: bytes, path: str = "/producers/t") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def test_readiness_says_which_service_is_not_ready_and_why(server: RunningServer) -> None:
    """503 with the reason; liveness does not depend on it."""
    services = {"kafka": {"ready": True, "reason": ""}}
    assert (await server.get("/health/readiness")).json == {"ready": True, "services": services}
    server.services["kafka"] = Readiness(False, "no broker answers")
    for path in ("/health/readiness", "/ready"):
        response = await server.get(path)
        assert response.status == 503
        assert response.json["services"]["kafka"]["reason"] == "no broker answers"
    for path in ("/health/liveness", "/live"):
        assert (await server.get(path)).status == 200


async def test_liveness_fails_for_a_consumer_that_hangs(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The body names it; so does the log, because an orchestrator restarts the process."""
    monkeypatch.setattr("headrace.admin.health.routes.hanging_consumers", lambda: ["function f.k consumer"])
    for path in ("/health/liveness", "/live"):
        response = await server.get(path)
        assert (response.status, response.json) == (503, {"status": "hangs", "consumers": ["function f.k consumer"]})


async def test_health_of_the_original_is_plain_text(server: RunningServer) -> None:
    """200 OK or 400 ERROR, for the own service id; another one, as a misspelt probe has, is not found."""
    response = await server.get("/health/t")
    assert (response.status, response.body) == (200, b"OK")
    server.services["kafka"] = Readiness(False)
    response = await server.get("/health/t")
    assert (response.status, response.body) == (400, b"ERROR")
    response = await server.get("/health/livness")
    assert (response.status, response.json["code"]) == (404, "ERR10007")
    assert "/health/t (audit.service_id)" in response.json["description"]


async def test_metrics_count_requests_by_route_and_records(server: RunningServer) -> None:
    """Names in paths do not become labels."""
    await server.ask(post(b'{"records":[{"value":1},{"value":1}]}'))
    await server.ask(post(b"{", "/producers/in-no-label"))
    await server.get("/nowhere/at/all")
    response = await server.get("/metrics")
    text = response.body.decode()
    assert response.headers["content-type"].startswith("text/plain")
    assert 'headrace_produce_records_total{result="acknowledged"} 2.0' in text
    for route, status in (("/producers/{topic}", 200), ("/producers/{topic}", 400), ("none", 404)):
        assert f'headrace_http_request_seconds_count{{route="{route}",status="{status}"}} 1.0' in text
    assert "in-no-label" not in text
    assert 'headrace_client_requests_total{principal="anonymous",status_class="4xx"} 2.0' in text


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


async def test_draining_ends_at_its_deadline(server: RunningServer) -> None:
    """A request that never ends does not hold the process."""
    server.kafka.producer.hold()
    waiting = asyncio.ensure_future(server.ask(post(b'{"records":[{"value":1}]}')))
    await server.kafka.producer.taken.wait()
    with pytest.raises(TimeoutError):
        await server.web.drain(Deadline(SystemClock(), 0.05))
    server.kafka.producer.release()
    await waiting


async def test_after_stop_nobody_listens(server: RunningServer) -> None:
    """Idle connections are closed, and the port is free."""
    reader, writer = await server.connect()
    writer.write(b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
    await reader.readuntil(b"alive")
    await server.web.stop()
    assert (await asyncio.wait_for(reader.read(), 60)).endswith(b"}")
    with pytest.raises(OSError, match=r"refused|Connect call failed"):
        await server.connect()
