"""The largest and the worst request that the limits of each route allow: nobody can stop the others."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import re
import socket
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from headrace.app.documents import every_endpoint
from tests.running_server import OpenServer

LIMIT_BYTES = 1_048_576
SLICE_SECONDS = 0.05
TOLERANCE = 5
"""For other work on the machine, which makes processor time dearer."""
AT_ONCE = 3
TRIES = 3
MEMORY_FACTOR = 30
MEMORY_BYTES = 50_000_000
"""What a process may grow by whatever comes: caches, and parts of the heap that are not full."""
MOST = {"topics": 1000}
"""Of the lists of active consumers that have another bound than 2,000."""
PRODUCE = "/producers/{topic}"
NDJSON = "application/x-ndjson"
RECORD = b'{"key":"k","value":1}'
SMALL = b'{"records":[%b]}' % RECORD


def fill(begin: bytes, part: bytes, end: bytes, limit: int = LIMIT_BYTES) -> bytes:
    """Return as many parts as fit, with commas between them."""
    count = (limit - len(begin) - len(end)) // (len(part) + 1)
    return begin + b",".join([part] * count) + end


def fields(begin: bytes, end: bytes, form: str = '"f%d":0') -> bytes:
    """Return as many different fields as fit."""
    count = LIMIT_BYTES // (len(form) + 6)
    return begin + ",".join([form % number for number in range(count)]).encode() + end


GENERAL = {
    "deep lists": b"[" * LIMIT_BYTES,
    "deep objects": b'{"a":' * (LIMIT_BYTES // 5),
    "closed deep lists": b"[" * (LIMIT_BYTES // 2) + b"]" * (LIMIT_BYTES // 2),
    "small objects": fill(b"[", b"{}", b"]"),
    "numbers": fill(b"[", b"1", b"]"),
    "unknown fields": fields(b"{", b"}"),
    "one field many times": fill(b"{", b'"topic":"t"', b"}"),
    "a long number": b"1" * LIMIT_BYTES,
    "escapes": b'"' + rb"\u0041" * (LIMIT_BYTES // 6 - 1) + b'"',
    "blanks": b" " * LIMIT_BYTES,
}
RECORDS = {
    "many empty records": fill(b'{"records":[', b"{}", b"]}"),
    "most records": b'{"records":[' + b",".join([RECORD] * 9_999) + b"]}",
    "many headers": fill(b'{"records":[{"value":1,"headers":{', b'"a":"b"', b"}}]}"),
    "different headers": fields(b'{"records":[{"value":1,"headers":{', b"}}]}", '"h%d":""'),
    "deep value": b'{"records":[{"value":' + b"[" * 500_000 + b"]" * 500_000 + b"}]}",
    "wide value": fill(b'{"records":[{"value":[', b"1", b"]}]}"),
    "unknown fields of a record": fields(b'{"records":[{"value":1,', b"}]}"),
    "records of unknown fields": fill(b'{"records":[', b'{"a":1}', b"]}"),
    "a long key": b'{"records":[{"value":1,"key":"' + b"k" * (LIMIT_BYTES - 50) + b'"}]}',
    "wrong partitions": fill(b'{"records":[', b'{"value":1,"partition":9}', b"]}", 240_000),
    "wrong values": fill(b'{"valueFormat":"binary","records":[', b'{"value":"?"}', b"]}", 139_000),
}
LINES_BYTES = 20_000
"""Of a stream; it has no end."""
LINES = {
    "bad lines": b"x\n" * (LINES_BYTES // 2),
    "empty lines": b"\n" * LINES_BYTES,
    "empty records": b"{}\n" * (LINES_BYTES // 3),
    "good lines": (RECORD + b"\n") * (LINES_BYTES // 22),
    "unknown fields": b'{"a":1}\n' * (LINES_BYTES // 8),
    "deep lines": (b"[" * 1000 + b"\n") * (LINES_BYTES // 1001),
}


def flooded(example: object) -> Iterator[bytes]:
    """Return an operation's example with each of its lists, and each text, as long as the limit allows."""
    if isinstance(example, list) and example:
        yield fill(b"[", json.dumps(example[0]).encode(), b"]")
        example = example[0]
    if not isinstance(example, dict):
        return
    for name, value in example.items():
        if isinstance(value, str):
            yield json.dumps({**example, name: "x" * (LIMIT_BYTES - 1000)}).encode()
        elif isinstance(value, list):
            begin, end = json.dumps({**example, name: "?"}).encode().split(b'"?"')
            part = json.dumps(value[0]).encode()
            yield fill(begin + b"[", part, b"]" + end)
            most = [part.replace(b": 0}", b": %d}" % number) for number in range(MOST.get(name, 2000))]
            yield begin + b"[" + b",".join(most) + b"]" + end
            yield fill(begin + b"[", b'"' + b"%d" + b'"', b"]" + end)


def requests() -> Iterator[tuple[str, bytes]]:
    """Return every request, with a name."""
    for operation in every_endpoint():
        method, path = operation.method, operation.path
        place = f"{method} {path}"
        path = re.sub(r"{\w+}", "t", path)
        yield f"{place}: query", head(method, path + "?" + "a=1&" * 2000, b"")
        yield f"{place}: headers", head(method, path, b"", "".join(f"X-{n}: {'x' * 300}\r\n" for n in range(95)))
        bodies = dict(GENERAL) if method != "GET" else {"numbers": GENERAL["numbers"]}
        bodies |= {f"example {number}": body for number, body in enumerate(flooded(operation.example))}
        if path == "/producers/t":
            bodies |= RECORDS
        for name, body in bodies.items():
            yield f"{place}: {name}", head(method, path, body)
    for name, body in LINES.items():
        yield f"{PRODUCE}: lines, {name}", head("POST", "/producers/t", body, kind=NDJSON)
    for name, body in RECORDS.items():
        wrapped = b'{"topics":[{"topic":"t",' + body[1:] + b"]}"
        yield f"/transactions: {name}", head("POST", "/transactions", wrapped[:-2][:LIMIT_BYTES] + b"]}")
        keyed = "Idempotency-Key: k\r\n"
        yield f"{PRODUCE}: with a key, {name}", head("POST", "/producers/t", body, keyed)
    for name, one in (("health", head("GET", "/live", b"")), ("records", head("POST", "/producers/t", SMALL))):
        yield f"pipelined: {name}", one.replace(b"Connection: close\r\n", b"") * (262_144 // len(one))


def head(method: str, path: str, body: bytes, more: str = "", kind: str = "application/json") -> bytes:
    """Return a request; its body is cut at the limit."""
    body = body[:LIMIT_BYTES]
    text = f"{method} {path} HTTP/1.1\r\nHost: h\r\nContent-Type: {kind}\r\nConnection: close\r\n{more}"
    return f"{text}Content-Length: {len(body)}\r\n\r\n".encode() + body


class Watcher:
    """Measures the longest slice of the loop's thread in processor time, and how large the process was."""

    def __init__(self) -> None:
        self._at = time.thread_time()
        self.reset()
        self._look()

    def reset(self) -> None:
        self.longest_seconds, self.most_bytes = 0.0, rss()

    def _look(self) -> None:
        now = time.thread_time()
        if now - self._at > 0.005:
            self.most_bytes = max(self.most_bytes, rss())
        self.longest_seconds = max(self.longest_seconds, now - self._at)
        self._at = time.thread_time()
        self._timer = asyncio.get_running_loop().call_later(0.001, self._look)

    def stop(self) -> None:
        self._timer.cancel()


def rss() -> int:
    """Return how much memory this process has now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def send(port: int, request: bytes) -> bytes:
    """Send a request from a thread, and return the first line of the response; empty if there was none."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        response = b""
        with contextlib.suppress(OSError):  # refused before all was sent
            client.sendall(request)
        with contextlib.suppress(OSError):
            while chunk := client.recv(65_536):
                response = response or chunk
    return response.partition(b"\r\n")[0]


async def measure(server: Any, watcher: Watcher, request: bytes) -> tuple[float, float, list[bytes]]:
    """Send a request several times at once; return the longest slice, the memory per byte sent, and the responses."""
    port = int(server.web.url.rpartition(":")[2])
    server.kafka.producer.records.clear()
    before = rss()
    watcher.reset()
    responses = await asyncio.gather(*(asyncio.to_thread(send, port, request) for _ in range(AT_ONCE)))
    grown = watcher.most_bytes - before - MEMORY_BYTES
    return watcher.longest_seconds, grown / len(request) / AT_ONCE, responses


@pytest.mark.long
def test_no_request_holds_the_loop_or_takes_much_memory(opened: OpenServer) -> None:
    """Each route with its worst bodies, several at once: slices of processor time, memory, and a response."""
    wrong: list[tuple[str, float, float, list[bytes]]] = []

    async def main() -> None:
        async with opened() as server:
            watcher = Watcher()
            for name, request in requests():
                for attempt in range(TRIES):
                    seconds, memory, responses = await measure(server, watcher, request)
                    answered = all(re.match(rb"HTTP/1\.1 [2345](?!00 I)", response) for response in responses)
                    if answered and seconds < TOLERANCE * SLICE_SECONDS and memory < MEMORY_FACTOR:
                        break
                    if attempt == TRIES - 1:
                        wrong.append((name, seconds, memory, responses))
            watcher.stop()

    gc.freeze()  # what other tests left is not looked through in a slice
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
    finally:
        gc.unfreeze()
    assert wrong == []


def test_memory_of_refused_requests_is_free_at_once(opened: OpenServer) -> None:
    """Without a collection of cycles, of which there may be none for minutes."""
    grown: list[int] = []

    async def main() -> None:
        async with opened() as server:
            port = int(server.web.url.rpartition(":")[2])
            request = head("POST", "/producers/t", RECORDS["many empty records"])
            for count in (1, 20):
                await asyncio.gather(*(asyncio.to_thread(send, port, request) for _ in range(count)))
                grown.append(tracemalloc.get_traced_memory()[0])

    gc.disable()
    tracemalloc.start()
    try:
        asyncio.run(main())
    finally:
        tracemalloc.stop()
        gc.enable()
    assert grown[1] - grown[0] < 3 * LIMIT_BYTES
