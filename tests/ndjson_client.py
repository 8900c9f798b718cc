"""A client of a stream of records: lines go out in chunks while receipts come in."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import urlsplit

LIMIT_SECONDS = 150.0


class NdjsonClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._text = b""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, url: str, topic: str) -> AsyncIterator[NdjsonClient]:
        """Connect, and begin a stream that is accepted."""
        place = urlsplit(url)
        client = cls(*await asyncio.open_connection(place.hostname, place.port))
        client.begin(f"/producers/{topic}", host="localhost")
        try:
            assert (await client.head()).startswith("HTTP/1.1 200 ")
            yield client
        finally:
            client.writer.close()
            with contextlib.suppress(OSError):
                await client.writer.wait_closed()

    def buffered(self) -> bytes:
        """Return what has arrived and is not read."""
        return bytes(vars(self.reader)["_buffer"])

    def begin(self, path: str = "/producers/t", *headers: str, host: str = "h") -> None:
        lines = [f"POST {path} HTTP/1.1", f"Host: {host}", "Content-Type: application/x-ndjson"]
        self.writer.write("\r\n".join([*lines, "Transfer-Encoding: chunked", *headers, "", ""]).encode())

    def send(self, *lines: Any) -> None:
        """Write lines as one chunk: bytes as they are, anything else as JSON."""
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.chunk(b"".join(text + b"\n" for text in texts))

    async def send_all(self, records: Iterable[Any], per_chunk: int = 100) -> None:
        """Write records as fast as they are taken, and end the request."""
        lines = list(records)
        for start in range(0, len(lines), per_chunk):
            self.send(*lines[start : start + per_chunk])
            await self.writer.drain()
        self.finish()

    def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def finish(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    async def head(self) -> str:
        return (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), LIMIT_SECONDS)).decode()

    async def receipt(self) -> Any:
        """Return the next receipt; None at the end of the response."""
        while b"\n" not in self._text:
            size = int(await asyncio.wait_for(self.reader.readline(), LIMIT_SECONDS), 16)
            data = await asyncio.wait_for(self.reader.readexactly(size + 2), LIMIT_SECONDS)
            if not size:
                assert not self._text
                return None
            self._text += data[:-2]
        line, _, self._text = self._text.partition(b"\n")
        return json.loads(line)

    async def receipts(self) -> list[Any]:
        """Return every receipt to the end, and check that the connection ends with them."""
        found = []
        while (receipt := await self.receipt()) is not None:
            found.append(receipt)
        assert await asyncio.wait_for(self.reader.read(), LIMIT_SECONDS) == b""
        return found
