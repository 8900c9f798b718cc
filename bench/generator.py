"""A load generator without anything native: raw HTTP/1.1 over asyncio, in a process of its own.

usage: python -m bench.generator URL_PATH PORT CONNECTIONS SECONDS METHOD BODY_FILE [HEADER]...
All connections are opened at once. Prints JSON: requests (answered 200 or 204), refused (answered 503, sent
again after a pause), errors (everything else), seconds, p50_ms, p99_ms, longest_ms, first_ms: from the start
until every connection had its first response, and least: the responses of the connection that had the fewest, as a
share of the mean.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from pathlib import Path

import uvloop

PAUSE_SECONDS = 1.0


class Connection(asyncio.Protocol):
    """Sends a request, waits for the whole response, sends the next."""

    def __init__(self, request: bytes, times: list[float], end: float) -> None:
        self.request, self.times, self.end = request, times, end
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.buffer = b""
        self.errors = self.refused = self.responses = 0
        self.first = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.sent = time.perf_counter()
        self.transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data
        head = self.buffer.find(b"\r\n\r\n")
        if head < 0:
            return
        lower = self.buffer[:head].lower()
        at = lower.find(b"content-length:")
        size = int(lower[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self.buffer) < head + 4 + size:
            return
        status, self.buffer = self.buffer[9:12], b""
        now = time.perf_counter()
        self.first = self.first or now
        if status == b"503":
            self.refused += 1
        else:
            self.errors += status not in (b"200", b"204")
            self.times.append(now - self.sent)
            self.responses += 1
        if now < self.end and status == b"503":
            asyncio.get_running_loop().call_later(PAUSE_SECONDS, self.send)
        elif now < self.end:
            self.send()
        elif not self.done.done():
            self.done.set_result(None)
            self.transport.close()

    def connection_lost(self, cause: Exception | None) -> None:
        if not self.done.done():
            self.errors += 1
            self.done.set_result(None)


async def measure(port: int, connections: int, seconds: float, request: bytes) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    times: list[float] = []
    start = time.perf_counter()

    async def connect() -> Connection:
        return (await loop.create_connection(lambda: Connection(request, times, start + seconds), "127.0.0.1", port))[1]

    made = await asyncio.gather(*(connect() for _ in range(connections)))
    await asyncio.gather(*(one.done for one in made))
    elapsed = time.perf_counter() - start
    times.sort()
    return {
        "requests": len(times),
        "errors": sum(one.errors for one in made),
        "refused": sum(one.refused for one in made),
        "seconds": elapsed,
        "p50_ms": times[len(times) // 2] * 1000 if times else 0,
        "p99_ms": times[int(len(times) * 0.99)] * 1000 if times else 0,
        "longest_ms": times[-1] * 1000 if times else 0,
        "first_ms": max((one.first or math.inf) - start for one in made) * 1000,
        "least": min(one.responses for one in made) * len(made) / max(1, len(times)),
    }


def main() -> None:
    path, port, connections, seconds, method, body_file, *headers = sys.argv[1:]
    body = Path(body_file).read_bytes()
    lines = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", *headers, f"Content-Length: {len(body)}", "", ""]
    request = "\r\n".join(lines).encode() + body
    print(json.dumps(uvloop.run(measure(int(port), int(connections), float(seconds), request))))


if __name__ == "__main__":
    main()
