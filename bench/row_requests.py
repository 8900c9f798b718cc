"""Requests rows of random keys, in a process of its own, and measures how long each takes.

usage: python -m bench.row_requests HOW PORT TABLE ROWS CONNECTIONS SECONDS
`row` gets `/tables/TABLE/rows/KEY`, `query` posts a SELECT with a parameter to `/query`.
Prints JSON as `bench.generator`.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time

import uvloop

from bench.bare_table import key
from bench.generator import Connection


def request(how: str, port: str, table: str, number: int) -> bytes:
    """Return the bytes of a request."""
    name = key(number).decode()
    host = f"Host: 127.0.0.1:{port}\r\n"
    if how == "row":
        return f"GET /tables/{table}/rows/{name} HTTP/1.1\r\n{host}\r\n".encode()
    body = json.dumps({"sql": f"SELECT * FROM {table} WHERE key = ?", "params": [name]})
    head = f"POST /query HTTP/1.1\r\n{host}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return f"{head}{body}".encode()


class RowConnection(Connection):
    """Requests another row each time."""

    def __init__(self, words: tuple[str, str, str], rows: int, times: list[float], end: float) -> None:
        super().__init__(b"", times, end)
        self.words = words
        self.rows = rows

    def send(self) -> None:
        self.request = request(*self.words, random.randrange(self.rows))
        super().send()


async def measure(words: tuple[str, str, str], rows: int, connections: int, seconds: float) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    times: list[float] = []
    start = time.perf_counter()

    async def connect() -> RowConnection:
        made = RowConnection(words, rows, times, start + seconds)
        return (await loop.create_connection(lambda: made, "127.0.0.1", int(words[1])))[1]

    made = await asyncio.gather(*(connect() for _ in range(connections)))
    await asyncio.gather(*(one.done for one in made))
    times.sort()
    return {
        "records": len(times),
        "requests": len(times),
        "errors": sum(one.errors + one.refused for one in made),
        "seconds": time.perf_counter() - start,
        "p50_ms": times[len(times) // 2] * 1000,
        "p99_ms": times[int(len(times) * 0.99)] * 1000,
        "longest_ms": times[-1] * 1000,
    }


if __name__ == "__main__":
    how, port, table, rows, connections, seconds = sys.argv[1:]
    print(json.dumps(uvloop.run(measure((how, port, table), int(rows), int(connections), float(seconds)))))
