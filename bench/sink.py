"""A backend that takes records as fast as it can and counts them, in a process of its own.

usage: python -m bench.sink EXPECTED_RECORDS [status|results|single|latency]
Answers 200 without a body; `results`: one result per record; `single`: a request is one record; `latency`: as
`single`, and values are when they were written (nanoseconds of the monotonic clock), as they are or in a CloudEvent.
Prints its port; with the first record a line; after the expected number of records, JSON: records, seconds (first to
last), load (its share of one processor meanwhile), p50_ms, p99_ms, longest_ms, and late_ms: the median delay of the
last quarter less that of the second one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import statistics
import sys
import time

import httptools
import uvloop

MARK = b'"offset":'
DATA = re.compile(rb'"data_base64":"([^"]*)"')


def written(body: bytes) -> int:
    """Return the moment that a body holds."""
    event = DATA.search(body)
    return int(base64.b64decode(event[1]) if event else body)


def answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


class Count:
    """Records so far, when the first arrived, and how long each took."""

    def __init__(self, expected: int) -> None:
        self.expected, self.records, self.first, self.cpu = expected, 0, 0.0, 0.0
        self.delays: list[float] = []
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def add(self, records: int) -> None:
        if not self.first:
            self.first, self.cpu = time.perf_counter(), time.process_time()
            print("first", flush=True)
        self.records += records
        if self.records >= self.expected and not self.done.done():
            self.done.set_result(time.perf_counter() - self.first)

    def found(self, seconds: float) -> dict[str, float]:
        """Return what was measured."""
        quarter = len(self.delays) // 4
        late = 0.0
        if quarter:
            late = statistics.median(self.delays[-quarter:]) - statistics.median(self.delays[quarter : 2 * quarter])
        ordered = sorted(self.delays) or [0.0]
        return {
            "records": self.records,
            "seconds": seconds,
            "load": (time.process_time() - self.cpu) / seconds,
            "p50_ms": ordered[len(ordered) // 2],
            "p99_ms": ordered[int(len(ordered) * 0.99)],
            "longest_ms": ordered[-1],
            "late_ms": late,
        }


class Sink(asyncio.Protocol):
    """Answers 200 to every request."""

    def __init__(self, count: Count, mode: str) -> None:
        self.count, self.mode, self.body = count, mode, b""
        self.parser = httptools.HttpRequestParser(self)
        self.plain, self.missing = answer(b""), b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.body = self.body + body if self.body else body

    def on_message_complete(self) -> None:
        body, self.body = self.body, b""
        if not body:  # a question about the application, not a record
            self.transport.write(self.missing)  # type: ignore[attr-defined]
            return
        records = body.count(MARK) if self.mode in ("status", "results") else 1
        if self.mode == "latency":
            self.count.delays.append((time.monotonic_ns() - written(body)) / 1e6)
        self.count.add(records)
        reply = self.plain
        if self.mode == "results":
            reply = answer(b"[" + b",".join([b'{"processed":true}'] * records) + b"]")
        self.transport.write(reply)  # type: ignore[attr-defined]


async def main(expected: int, mode: str) -> None:
    count = Count(expected)
    server = await asyncio.get_running_loop().create_server(lambda: Sink(count, mode), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    print(json.dumps(count.found(await count.done)), flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "status"))
