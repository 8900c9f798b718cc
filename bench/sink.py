"""A backend that takes records as fast as it can and counts them, in a process of its own.

usage: python -m bench.sink EXPECTED_RECORDS
Prints its port; after the expected number of records, JSON: records, seconds (first to last).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httptools
import uvloop

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Count:
    """Records so far, and when the first and last came."""

    def __init__(self, expected: int) -> None:
        self.expected, self.records, self.first = expected, 0, 0.0
        self.done: asyncio.Future[float] = asyncio.get_running_loop().create_future()

    def add(self, records: int) -> None:
        self.first = self.first or time.perf_counter()
        self.records += records
        if self.records >= self.expected and not self.done.done():
            self.done.set_result(time.perf_counter() - self.first)


class Sink(asyncio.Protocol):
    """Answers 200 to every request."""

    def __init__(self, count: Count) -> None:
        self.count, self.records = count, 0
        self.parser = httptools.HttpRequestParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.records += body.count(b'"offset":')

    def on_message_complete(self) -> None:
        self.count.add(self.records)
        self.records = 0
        self.transport.write(ANSWER)  # type: ignore[attr-defined]


async def main(expected: int) -> None:
    count = Count(expected)
    server = await asyncio.get_running_loop().create_server(lambda: Sink(count), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    seconds = await count.done
    print(json.dumps({"records": count.records, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
