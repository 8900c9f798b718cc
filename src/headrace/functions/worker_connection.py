"""The parent's end of the connection to one worker."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any

from headrace.functions import protocol


class WorkerConnection(asyncio.Protocol):
    """Sends messages to a worker, and takes those that it sends."""

    def __init__(
        self, take: Callable[[protocol.ToParent], None], on_broken: Callable[[str], None], on_closed: Callable[[], None]
    ) -> None:
        """Prepare; `on_broken` gets the reason why the worker's bytes are not messages."""
        self.closed = asyncio.Event()
        """Set while there is no connection."""
        self.closed.set()
        self._take = take
        self._on_broken = on_broken
        self._on_closed = on_closed
        self._reader = protocol.FrameReader(protocol.decode_to_parent)
        self._known_schemas: set[int] = set()
        self._transport: Any = None

    async def open(self, end: socket.socket, setup: protocol.Setup) -> None:
        """Connect, and send the setup."""
        transport, _ = await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)
        transport.write(protocol.encode_frame(setup))
        self._transport = transport

    @property
    def has_begun(self) -> bool:
        """Whether the setup has been sent."""
        return self._transport is not None

    @property
    def is_closing(self) -> bool:
        """Whether the worker gets nothing more."""
        return self._transport is not None and bool(self._transport.is_closing())

    def send(self, message: protocol.ToWorker) -> None:
        self._transport.write(protocol.encode_frame(message))

    def send_schemas(self, schemas: Mapping[int, protocol.Schema]) -> None:
        """Send those of the schemas that the worker does not know."""
        for schema_id in schemas.keys() - self._known_schemas:
            self.send(schemas[schema_id])
            self._known_schemas.add(schema_id)

    def send_work(self, frame: bytearray) -> None:
        """Send a frame of work, after its schemas."""
        self._transport.write(frame)

    def end(self) -> None:
        """Let the worker read the end of the messages."""
        if self.has_begun and not self.is_closing:
            self._transport.write_eof()

    def close(self) -> None:
        if self._transport:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.closed.clear()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._reader.feed(data):
                self._take(message)
        except protocol.ProtocolBroken as cause:
            self._on_broken(f"the worker does not follow the protocol: {cause}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self._on_closed()
