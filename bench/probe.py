"""Asks for the liveness of a server every 10 ms, each time over a new connection as an orchestrator does.

usage: python -m bench.probe PORT
Runs until its standard input ends, at raised priority where that is allowed. Prints JSON: requests, errors, p50_ms,
p99_ms, longest_ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time

PAUSE_MS, LIMIT_SECONDS = 10.0, 60.0


def waits(took_ms: float) -> list[float]:
    """Return the time of a response, and the times of the requests that were due meanwhile."""
    return [took_ms - PAUSE_MS * late for late in range(1 + int(took_ms / PAUSE_MS))]


def ask(port: int) -> bool:
    """Return whether the response is 200."""
    request = f"GET /health/liveness HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
    try:
        with socket.create_connection(("127.0.0.1", port), LIMIT_SECONDS) as connection:
            connection.sendall(request.encode())
            response = connection.recv(4096)
            while part := connection.recv(4096):
                response += part
    except OSError:
        return False
    return response.startswith(b"HTTP/1.1 200")


def main() -> None:
    with contextlib.suppress(PermissionError):
        os.nice(-10)
    ended = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    times: list[float] = []
    requests = errors = 0
    while not ended.is_set() or not times:
        start = time.perf_counter()
        errors += not ask(int(sys.argv[1]))
        requests += 1
        times += waits((time.perf_counter() - start) * 1000)
        time.sleep(PAUSE_MS / 1000)
    times.sort()
    found = {"p50_ms": times[len(times) // 2], "p99_ms": times[int(len(times) * 0.99)], "longest_ms": times[-1]}
    print(json.dumps({"requests": requests, "errors": errors, **found}))


if __name__ == "__main__":
    main()
