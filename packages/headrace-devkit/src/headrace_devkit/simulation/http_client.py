"""A client of HTTP on a machine of a run: one request per connection, as `curl` makes it."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

_ATTEMPT_SECONDS = 20.0


async def send_json(
    host: str, port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Send a request; return status and body of its response, status 0 with the reason if there was none."""
    try:
        async with asyncio.timeout(_ATTEMPT_SECONDS):
            return await _send(host, port, method, path, body, headers or {})
    except (OSError, EOFError, TimeoutError, ValueError) as cause:
        return 0, type(cause).__name__


async def _send(host: str, port: int, method: str, path: str, body: Any, headers: Mapping[str, str]) -> tuple[int, Any]:
    text = b"" if body is None else json.dumps(body).encode()
    own = {
        "Host": "localhost",
        "Content-Type": "application/json",
        "Content-Length": str(len(text)),
        "Connection": "close",
        **headers,
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items()), "", ""]
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write("\r\n".join(lines).encode() + text)
        received = await reader.read()
    finally:
        writer.close()
    head, _, content = received.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 "):
        return 0, "no response"
    return int(head.split(b" ", 2)[1]), json.loads(content) if content else None
