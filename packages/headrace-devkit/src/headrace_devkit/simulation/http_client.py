"""Clients of HTTP on machines of a run: connections that send requests in turn, and one request as `curl` sends it.

A response is reported when its last byte is read, so a checker learns of it also if its client has just lost patience.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import Any, Self

from headrace.client.exchange import HttpReply
from headrace_devkit.simulation.network import Transport

_ATTEMPT_SECONDS = 20.0


class HttpConnection(asyncio.Protocol):
    """A connection; it sends one request at a time."""

    def __init__(self) -> None:
        self.transport: Transport
        self.is_open = False
        # Of one request
        self._received = b""
        self._status = 0
        self._head: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._on_part: Callable[[bytes], object] = self._parts.append
        self._on_reply: Callable[[HttpReply], object] = lambda _: None
        self._reply: asyncio.Future[HttpReply] | None = None

    @classmethod
    async def open(cls, host: str, port: int) -> Self:
        """Connect; OSError if nothing listens there."""
        _, protocol = await asyncio.get_running_loop().create_connection(cls, host, port)
        return protocol

    async def send(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        *,
        on_part: Callable[[bytes], object] | None = None,
        on_reply: Callable[[HttpReply], object] = lambda _: None,
    ) -> HttpReply:
        """Send a request and return its response; OSError if the connection ends before.

        Args:
            method: The method.
            path: Path and query.
            body: The body.
            headers: More headers.
            on_part: Gets each part of the response's body, instead of the response.
            on_reply: Gets the response when it is complete.
        """
        self._parts = []
        self._on_part = on_part or self._parts.append
        self._on_reply = on_reply
        reply: asyncio.Future[HttpReply] = asyncio.get_running_loop().create_future()
        self._reply = reply
        own = {"Host": "localhost", "Content-Length": str(len(body)), **(headers or {})}
        if body:
            own["Content-Type"] = "application/json"
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in own.items()), "", ""]
        if not self.is_open:
            raise ConnectionResetError("the connection has ended")
        self.transport.write("\r\n".join(lines).encode() + body)
        return await reply

    def abort(self) -> None:
        self.is_open = False
        self.transport.abort()

    # What the loop calls

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._head:
            head, end, rest = self._received.partition(b"\r\n\r\n")
            if not end:
                return
            status, *lines = head.decode().split("\r\n")
            self._status = int(status.split(" ", 2)[1])
            self._head = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            self._received = rest
        if self._is_complete():
            self._complete()

    def _is_complete(self) -> bool:
        """Pass on the parts of the body that have arrived; return whether the last one has."""
        if self._head.get("transfer-encoding") != "chunked":
            is_whole = len(self._received) >= int(self._head.get("content-length", 0))
            if is_whole:
                self._on_part(self._received)
            return is_whole
        while (found := self._received.partition(b"\r\n"))[1]:
            size = int(found[0], 16)
            if len(found[2]) < size + 2:
                return False
            self._received = found[2][size + 2 :]
            if not size:
                return True
            self._on_part(found[2][:size])
        return False

    def _complete(self) -> None:
        reply = HttpReply(self._status, b"".join(self._parts), self._head)
        self._received, self._head = b"", {}
        if reply.headers.get("connection") == "close":
            self.is_open = False
        self._on_reply(reply)
        if self._reply and not self._reply.done():
            self._reply.set_result(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._reply and not self._reply.done():
            self._reply.set_exception(error or ConnectionResetError("the connection has ended"))


async def send_json(
    host: str, port: int, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """Send a request on a connection of its own; return status and body, or status 0 and why there is no response."""
    text = b"" if body is None else json.dumps(body).encode()
    connection = None
    try:
        async with asyncio.timeout(_ATTEMPT_SECONDS):
            connection = await HttpConnection.open(host, port)
            reply = await connection.send(method, path, text, {"Connection": "close", **(headers or {})})
        return reply.status, json.loads(reply.body) if reply.body else None
    except (OSError, TimeoutError, ValueError) as cause:
        return 0, type(cause).__name__
    finally:
        if connection:
            connection.transport.close()
