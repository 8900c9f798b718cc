"""Reads of an instance take turns."""

import asyncio
import contextlib
from collections.abc import Iterator

from headrace.errors import InstanceBusy


class ReadTurn:
    """Serves one read, or the reads of one stream, at a time."""

    def __init__(self, instance: str) -> None:
        """Take the name of the instance for errors."""
        self._instance = instance
        self._is_reading = False
        self._stream: object = None

    @property
    def is_taken(self) -> bool:
        """Whether a read or a stream is in progress."""
        return self._is_reading or self._stream is not None

    async def wait_free(self) -> None:
        """Wait a moment for a read or stream to end: the server may not have noticed that its client left."""
        for _ in range(20):
            if self.is_taken:
                await asyncio.sleep(0.005)

    @contextlib.contextmanager
    def stream(self) -> Iterator[object]:
        """Reserve the instance for one stream, which passes the token to its reads.

        Raises:
            InstanceBusy: A read or another stream is in progress.
        """
        self.check(None)
        token = self._stream = object()
        try:
            yield token
        finally:
            self._stream = None

    def check(self, stream: object) -> None:
        """Raise InstanceBusy if another read or stream is in progress; `stream` is None for a plain read."""
        if self._is_reading or self._stream is not stream:
            raise InstanceBusy(
                f"another read of instance {self._instance} is in progress; only one at a time is served"
            )

    def begin(self) -> None:
        """Begin a read."""
        self._is_reading = True

    def end(self) -> None:
        """End a read."""
        self._is_reading = False
