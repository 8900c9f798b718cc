"""Backends that break HTTP: no record is lost, and none becomes a dead letter without cause."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from raw_server import Server, served

from headrace.runtime import LoopThread

HEAD = b"HTTP/1.1 200 OK\r\n"
OK = HEAD + b"Content-Length: 0\r\n\r\n"
SILENCE = b""
HOSTILE = [
    SILENCE,
    HEAD + b"Content-Length: 9\r\n\r\nab",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nab",
    HEAD + b"Content-Length: 1073741824\r\n\r\n" + b"x" * 2_000_000,
    HEAD + b"X: y\r\n" * 40_000,
    b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
    b"HTTP/1.1 307 Temporary Redirect\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\n",
    b"SSH-2.0-OpenSSH\r\n",
]


class Raw:
    """A server of bytes: each request gets the next of `script`, or `OK` when that is empty."""

    def __init__(self) -> None:
        self.port = 0
        self.script: deque[bytes] = deque()
        self.fatal = b"nothing"
        """At a request whose body has this, the connection is closed."""
        self.accepted: list[tuple[str, bytes]] = []
        """Head and body of the requests that got `OK`."""

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Server()
        while True:
            await connection.request(reader)
            request = connection.requests[-1]
            if self.fatal in request[1]:
                return
            response = self.script.popleft() if self.script else OK
            if response == SILENCE:
                await reader.read()  # until the client ends it
                return
            if response == OK:
                self.accepted.append(request)
            writer.write(response)
            await writer.drain()


@pytest.fixture
def raw() -> Iterator[Raw]:
    """A server of bytes on a thread."""
    thread, stack, raw = LoopThread("raw server"), contextlib.AsyncExitStack(), Raw()
    raw.port = thread.call(stack.enter_async_context(served(raw.talk)), 30).port
    yield raw
    thread.call(stack.aclose(), 30)
    thread.stop()


def consumer(topic: str, backend: dict[str, Any]) -> dict[str, Any]:
    retry = {"attempts": 2, "first_delay_seconds": 0.02, "max_delay_seconds": 0.1}
    backend = {"mode": "status", **backend}
    return {"reactive_consumers": {"push": {"topics": [topic], "group": topic, "retry": retry, "backend": backend}}}


def offsets(accepted: list[tuple[str, bytes]]) -> list[int]:
    """Return what was accepted in the order of its first time; a response may be late on a busy machine."""
    return list(dict.fromkeys(entry["offset"] for _, body in accepted for entry in json.loads(body)))


def test_what_is_no_response_costs_no_record_and_no_attempt(site: Any, topic: Any, headrace: Any, raw: Any) -> None:
    """After one response of each kind, everything is delivered in order, without a dead letter."""
    name = topic()
    raw.script.extend(HOSTILE)
    site.write_json(name, *range(5))
    url = f"http://127.0.0.1:{raw.port}/in"
    process = headrace({**site.config, **consumer(name, {"url": url, "timeout_seconds": 1})})
    site.wait_committed(name, name, 5)
    assert not raw.script
    assert offsets(raw.accepted) == list(range(5))
    assert site.records(f"{name}.dlq") == []
    site.wait_until(lambda: site.reasons(process.url) == {}, "readiness")


def test_a_record_at_which_the_backend_closes_the_connection_ends_alone(
    site: Any, topic: Any, headrace: Any, raw: Any
) -> None:
    """It is the first, so nothing else is accepted meanwhile: before it is sent alone, the backend gets OPTIONS."""
    name = topic()
    raw.fatal = b'"offset":0'
    site.write_json(name, *range(5))
    process = headrace({**site.config, **consumer(name, {"url": f"http://127.0.0.1:{raw.port}/in"})})
    site.wait_committed(name, name, 5)
    posts = [request for request in raw.accepted if request[0].startswith("POST")]
    assert offsets(posts) == [1, 2, 3, 4]
    assert {head.split(" ")[1] for head, _ in raw.accepted if head.startswith("OPTIONS")} == {"/in"}
    (dead,) = site.records(f"{name}.dlq")
    history = dict(dead.headers)
    assert (history["headrace.dlq.error"], history["headrace.dlq.attempts"]) == (b"ConnectionClosed", b"2")
    assert b"it closed the connection without a response" in history["headrace.dlq.reason"]
    site.wait_until(lambda: site.reasons(process.url) == {}, "readiness")
