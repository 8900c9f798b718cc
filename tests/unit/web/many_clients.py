"""Opens many connections at once from a process of its own and prints what was answered, as JSON.

Arguments: port, connections, seconds. Each connection sends one record after the other. Without connections it asks for
liveness on a new connection every 20 ms.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter

import uvloop

BODY = b'{"records":[{"key":"k","value":{"n":1}}]}'
PRODUCE = b"POST /producers/t HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
REQUEST = PRODUCE % (len(BODY), BODY)
PROBE = b"GET /health/liveness HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
ANSWER_SECONDS = 60.0


class Client(asyncio.Protocol):
    """Sends one request after the other, and counts the answers by status."""

    ends_at = 0.0

    def __init__(self, statuses: Counter[str]) -> None:
        self.statuses = statuses
        self.began_at = time.monotonic()
        self.first_seconds: float | None = None
        self.ended = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        if self.first_seconds is None:
            self.first_seconds = time.monotonic() - self.began_at
        self.statuses[data[9:12].decode()] += 1
        if time.monotonic() < self.ends_at and b"connection: close" not in data:
            self.transport.write(REQUEST)
        else:
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.ended.set_result(self.first_seconds is not None)


async def probe(port: int, found: list[float], statuses: Counter[str]) -> None:
    """Ask for liveness on a new connection."""
    began_at = time.monotonic()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(PROBE)
        statuses[(await asyncio.wait_for(reader.read(), ANSWER_SECONDS))[9:12].decode()] += 1
        writer.close()
    except OSError:
        statuses["lost"] += 1
    found.append(time.monotonic() - began_at)


async def main(port: int, count: int, seconds: float) -> None:
    """Run, and print the outcome."""
    loop, statuses, answered = asyncio.get_running_loop(), Counter[str](), 0
    Client.ends_at = time.monotonic() + seconds
    if count:
        clients = [Client(statuses) for _ in range(count)]
        opening = [loop.create_connection(lambda one=one: one, "127.0.0.1", port) for one in clients]  # type: ignore[misc]
        await asyncio.gather(*opening)
        answered = sum(await asyncio.wait_for(asyncio.gather(*(client.ended for client in clients)), ANSWER_SECONDS))
        waits = [client.first_seconds or ANSWER_SECONDS for client in clients]
    else:
        waits = []
        while time.monotonic() < Client.ends_at:
            await probe(port, waits, statuses)
            await asyncio.sleep(0.02)
    waits.sort()
    report = {"statuses": statuses, "answered": answered, "p50": waits[len(waits) // 2], "max": waits[-1]}
    print(json.dumps(report | {"p99": waits[int(len(waits) * 0.99)]}))


uvloop.run(main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
