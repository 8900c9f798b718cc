"""Clients of active consumers that count what they read, in a process of its own.

usage: python -m bench.reader json|binary|events|delays|event-delays PORT RECORDS CLIENTS PATH [ACCEPT]
`PATH` may hold `{}`, the number of the client. `json` and `binary` read again as soon as a response is there; `events`
read one stream of server-sent events; the others also measure: their values are when they were written (nanoseconds of
the monotonic clock). RECORDS are those of all clients together. Prints a line when every client is connected, one with
the first record, and JSON after the last: records, seconds (first to last), load (its share of one processor
meanwhile), p50_ms, p99_ms, longest_ms, and late_ms: the median delay of the last quarter less that of the second one.
The delays of `json` and `binary` are those of responses with records.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

import httptools
import uvloop

from bench.sink import Count

END = {False: b'"offset":', True: b"\n\n"}
"""What stands once in each record: in an array, and in a stream."""
VALUE = re.compile(rb'"value":(\d+)')


class Reader(asyncio.Protocol):
    """Sends a request, reads the response, and sends the next one."""

    def __init__(self, count: Count, request: bytes, mode: str) -> None:
        self.count, self.request = count, request
        self.is_stream, self.measures = mode.startswith("event"), mode.endswith("delays")
        self.parts: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.send()

    def send(self) -> None:
        self.sent = time.perf_counter()
        self.parser = httptools.HttpResponseParser(self)
        self.transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)
        if self.is_stream and body.endswith(b"\n\n"):
            self.take()

    def on_message_complete(self) -> None:
        if (status := self.parser.get_status_code()) != 200 or self.is_stream:
            raise SystemExit(f"a read ended with {status}: {b''.join(self.parts)[:500]!r}")
        self.take()
        if not self.count.done.done():
            self.send()

    def take(self) -> None:
        """Count the records that are here completely."""
        data = b"".join(self.parts)
        self.parts.clear()
        if self.measures:
            now = time.monotonic_ns()
            self.count.delays += [(now - int(at)) / 1e6 for at in VALUE.findall(data)]
        if records := data.count(END[self.is_stream]) - data.count(b":\n\n"):
            self.count.add(records)
            if not self.measures and not self.is_stream:
                self.count.delays.append(1000 * (time.perf_counter() - self.sent))


async def main(mode: str, port: int, records: int, clients: int, path: str, accept: str = "") -> None:
    count, loop = Count(records), asyncio.get_running_loop()
    accept = accept or ("text/event-stream" if mode.startswith("event") else "application/json")
    for number in range(clients):
        head = f"GET {path.format(number)} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAccept: {accept}\r\n\r\n"
        await loop.create_connection(lambda head=head: Reader(count, head.encode(), mode), "127.0.0.1", port)  # type: ignore[misc]
    print("connected", flush=True)
    print(json.dumps(count.found(await count.done)), flush=True)


if __name__ == "__main__":
    port, records, clients = map(int, sys.argv[2:5])
    uvloop.run(main(sys.argv[1], port, records, clients, *sys.argv[5:]))
