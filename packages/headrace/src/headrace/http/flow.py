"""Pauses of a connection in its two directions."""

import asyncio


class Flow:
    """Which directions of a connection are paused."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = False
        self.write_paused = False
        self._writable: asyncio.Event | None = None

    async def drain(self) -> None:
        """Wait until writing is not paused."""
        while self.write_paused:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def pause_reading(self) -> None:
        """Read nothing until `resume_reading`."""
        if not self.read_paused:
            self.read_paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def pause_writing(self) -> None:
        """Let `drain` wait."""
        self.write_paused = True
        if self._writable:
            self._writable.clear()

    def resume_writing(self) -> None:
        """End the wait of `drain`."""
        self.write_paused = False
        if self._writable:
            self._writable.set()
