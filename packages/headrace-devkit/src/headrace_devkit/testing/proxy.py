"""A network that can be broken: connections of clients to brokers are reset, silent, slow, or held at some requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
from collections.abc import Coroutine, Mapping
from typing import Any

from headrace.runtime import LoopThread

PRODUCE, OFFSET_COMMIT, JOIN_GROUP, HEARTBEAT, END_TRANSACTION, OFFSETS_IN_TRANSACTION = 0, 8, 11, 12, 26, 28
"""Numbers of requests in Kafka's protocol, for `hold` and `delay`."""
_LIMIT_SECONDS = 30.0
_READ_BYTES = 65536
_LAST_TURNS = 3
"""In these a connection appears that was accepted before the end, and closed ones end."""


class FaultProxy:
    """Forwards connections, request by request, on its own thread.

    Held data is forwarded later on the same connection, even if the client has left: as packets of a network that was
    down.
    """

    def __init__(self, routes: Mapping[int, int]) -> None:
        """Prepare it; `routes` maps the port for clients to the port of the broker."""
        self.delay_seconds = 0.0
        """Delay of every part of a response."""
        self.held: list[tuple[int, int]] = []
        """The held requests, in order: their kind, and which broker they are for, from 1."""
        self._routes = dict(routes)
        self._delaying: int | None = None
        self._delayed: list[tuple[int, bytes]] = []
        """Ports of brokers, and requests that they will get late."""
        self._holding: set[int] = set()
        self._released, self._requests_pass, self._responses_pass = (asyncio.Event() for _ in range(3))
        self._writers: set[asyncio.StreamWriter] = set()
        self._servers: list[asyncio.Server] = []
        self._thread: LoopThread

    @property
    def bootstrap_servers(self) -> str:
        """`host:port` of every broker, through the proxy."""
        return ",".join(f"127.0.0.1:{port}" for port in self._routes)

    def start(self) -> None:
        """Listen, and forward everything."""
        self._thread = LoopThread("fault-proxy")
        self._call(self._listen())

    def stop(self) -> None:
        """End every connection and stop listening."""
        self._call(self._close())
        self._thread.stop()

    def cut(self) -> int:
        """Reset every connection; data in transit is lost. Returns the number of disconnected clients."""
        return self._call(self._cut()) // 2

    def silence(self, *, requests: bool = True, responses: bool = True) -> None:
        """Forward nothing in one direction or both; connections stay open."""
        self._call(self._set(requests=not requests, responses=not responses))

    def hold(self, *kinds: int) -> None:
        """Hold requests of some kinds, and everything after them on their connection."""
        self._call(self._set(kinds=kinds))

    def delay(self, kind: int) -> None:
        """Close the connection of the next request of a kind. The client sends it again; `deliver` sends the first."""
        self._delaying = kind

    def deliver(self) -> None:
        """Send delayed requests to their brokers, and wait for the responses, which no client gets."""
        self._call(self._deliver())

    def heal(self) -> None:
        """Forward everything, held data first."""
        self._call(self._set())

    def _call(self, work: Coroutine[Any, Any, int]) -> int:
        return self._thread.call(work, _LIMIT_SECONDS)

    async def _listen(self) -> int:
        for number, (here, there) in enumerate(self._routes.items(), 1):
            pass_on = functools.partial(self._pass_on, number, there)
            self._servers.append(await asyncio.start_server(pass_on, "127.0.0.1", here))
        return await self._set()

    async def _set(self, *, requests: bool = True, responses: bool = True, kinds: tuple[int, ...] = ()) -> int:
        self._holding = set(kinds)
        passing = ((self._released, not kinds), (self._requests_pass, requests), (self._responses_pass, responses))
        for gate, is_open in passing:
            (gate.set if is_open else gate.clear)()
        return 0

    async def _deliver(self) -> int:
        while self._delayed:
            port, request = self._delayed.pop(0)
            responses, broker = await asyncio.open_connection("127.0.0.1", port)
            broker.write(request)
            await responses.readexactly(int.from_bytes(await responses.readexactly(4)))
            broker.close()
        return 0

    async def _cut(self) -> int:
        for writer in self._writers:
            _reset(writer)
        return len(self._writers)

    async def _close(self) -> int:
        for server in self._servers:
            server.close()
        await self._set()
        quiet_turns = 0
        while quiet_turns < _LAST_TURNS:
            quiet_turns = 0 if self._writers else quiet_turns + 1
            await self._cut()
            await asyncio.sleep(0.01)
        return 0

    async def _pass_on(
        self, number: int, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        writers = [writer]
        self._writers.add(writer)
        try:
            with contextlib.suppress(OSError):
                responses, broker = await asyncio.open_connection("127.0.0.1", port)
                writers.append(broker)
                self._writers.add(broker)
                await asyncio.gather(
                    self._pass_requests(number, port, reader, broker), self._pass_answers(responses, writer)
                )
        finally:
            for one in writers:
                self._writers.discard(one)
                one.close()

    async def _pass_requests(
        self, number: int, port: int, reader: asyncio.StreamReader, broker: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                size = await reader.readexactly(4)
                request = await reader.readexactly(int.from_bytes(size))
                kind = int.from_bytes(request[:2])
                if kind == self._delaying:
                    self._delaying = None
                    self._delayed.append((port, size + request))
                    break  # closing the broker's side closes the client's, too
                if kind in self._holding:
                    self.held.append((kind, number))
                    await self._released.wait()
                await self._requests_pass.wait()
                broker.write(size + request)
                await broker.drain()
        broker.close()

    async def _pass_answers(self, responses: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await responses.read(_READ_BYTES):
                await asyncio.sleep(self.delay_seconds)
                await self._responses_pass.wait()
                writer.write(data)
                await writer.drain()
        writer.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):  # closed already
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
