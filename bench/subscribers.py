"""Receives pushed rows, in a process of its own, and measures how old each is.

usage: python -m bench.subscribers PORT CLIENTS ROWS STATEMENT
Each client runs the push query over the API at PORT until it has that number of rows; `{}` in the statement becomes
the number of the client. With PORT 0 it is a backend instead, which prints its port, and STATEMENT is not used.
The column `made` of a row is when its record was written (nanoseconds of the monotonic clock).
Prints a line when every client listens, then JSON: records, p50_ms, p99_ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from urllib.parse import quote

import uvloop

_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Delays:
    """How old the rows were when they arrived."""

    def __init__(self) -> None:
        self.milliseconds: list[float] = []

    def add(self, row: dict[str, int]) -> None:
        self.milliseconds.append((time.monotonic_ns() - row["made"]) / 1e6)

    def show(self) -> None:
        """Print what was measured."""
        found = sorted(self.milliseconds)
        p50, p99 = (found[int(len(found) * part)] for part in (0.5, 0.99))
        print(json.dumps({"records": len(found), "p50_ms": p50, "p99_ms": p99}), flush=True)


async def subscribe(port: int, clients: int, rows: int, statement: str) -> None:
    delays = Delays()
    listening = [asyncio.Event() for _ in range(clients)]

    async def client(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        path = f"/query?sql={quote(statement.format(number))}"
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        if (status := await reader.readline()) != b"HTTP/1.1 200 OK\r\n":
            raise RuntimeError(f"{status!r}: {(await reader.read(2_000)).decode()}")
        left = rows
        while left and (line := await reader.readline()):
            if line.startswith(b"id: "):  # the first event has only an id
                listening[number].set()
            elif line.startswith(b"data: "):
                delays.add(json.loads(line[6:]))
                left -= 1
        writer.close()
        assert not left, f"client {number} misses {left} rows"

    async def ready() -> None:
        for each in listening:
            await each.wait()
        print("ready", flush=True)

    await asyncio.gather(ready(), *(client(number) for number in range(clients)))
    delays.show()


async def receive(rows: int) -> None:
    delays = Delays()
    done = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.CancelledError, asyncio.IncompleteReadError):  # the end of a connection
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length:")[2].split(b"\r", 1)[0]
                for row in json.loads(await reader.readexactly(int(length or 0)) or b"[]"):
                    delays.add(row)
                writer.write(_OK)
                if len(delays.milliseconds) >= rows:
                    done.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await done.wait()
    delays.show()


if __name__ == "__main__":
    port, clients, rows, statement = sys.argv[1:]
    uvloop.run(subscribe(int(port), int(clients), int(rows), statement) if int(port) else receive(int(rows)))
