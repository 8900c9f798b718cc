"""Whose turn it is to read an instance."""

import asyncio
import contextlib
from collections.abc import Iterator

from headrace.errors import InstanceBusy


class ReadTurn:
    """Lets one read, or the reads of one stream, be served at a time."""

    def __init__(self, instance: str) -> None:
        """Take the name of the instance, for errors."""
        self._instance = instance
        self._is_reading = False
        self._stream: object = None

    @property
    def is_taken(self) -> bool:
        """Whether a read or a stream is not answered yet."""
        return self._is_reading or self._stream is not None

    async def wait_free(self) -> None:
        """Wait a moment for the end of a read or stream: the server may not know yet that its client has left."""
        for _ in range(20):
            if self.is_taken:
                await asyncio.sleep(0.005)

    @contextlib.contextmanager
    def stream(self) -> Iterator[object]:
        """Reserve the instance for one stream, which passes the token to its reads.

        Raises:
            InstanceBusy: A read or another stream is not answered yet.
        """
        self.check(None)
        token = self._stream = object()
        try:
            yield token
        finally:
            self._stream = None

    def check(self, stream: object) -> None:
        """Raise InstanceBusy if it is not the turn of a stream, or with None of a read."""
        if self._is_reading or self._stream is not stream:
            text = f"another read of instance {self._instance} is not answered yet: one at a time"
            raise InstanceBusy(text)

    def begin(self) -> None:
        """Begin a read."""
        self._is_reading = True

    def end(self) -> None:
        """End a read."""
        self._is_reading = False
