"""A connection to another Headrace process: sends a request, and reads its response in parts.

A part is read only after the one before was consumed, so a slow client slows down the other process.
"""

import asyncio
import ssl
from typing import Final, Self
from urllib.parse import urlsplit

import httptools

_CONNECT_SECONDS: Final = 3.0
_SILENT_SECONDS: Final = 45.0
"""Longest time without a byte: a read waits for at most 30 seconds, and streams send heartbeats."""
_MOST_AT_ONCE: Final = 65_536


class PeerResponseLost(OSError):
    """The other process may have served the request, and its response is lost."""


class PeerConnection:
    """A persistent connection, for one request at a time. OSError means that the other process does not respond."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.status = 0
        """Status of the response; 0 before its head has arrived."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the response, with names in lower case."""
        self._reader = reader
        self._writer = writer
        self._parser: httptools.HttpResponseParser
        self._has_body = True
        self._parts: list[bytes] = []
        self._is_complete = False

    @classmethod
    async def open(cls, url: str, tls: ssl.SSLContext | None) -> Self:
        """Connect to a process."""
        parts = urlsplit(url)
        context = tls if parts.scheme == "https" else None
        async with asyncio.timeout(_CONNECT_SECONDS):
            opening = asyncio.open_connection(parts.hostname, parts.port or (443 if context else 80), ssl=context)
            return cls(*await opening)

    async def send(self, request: bytes) -> None:
        """Send a request, and return when the head of its response has arrived."""
        self.status = 0
        self.headers = []
        self._parts = []
        self._is_complete = False
        self._has_body = not request.startswith(b"HEAD ")
        self._parser = httptools.HttpResponseParser(self)  # a new one: after HEAD, the old one would wait for a body
        self._write(request)
        while not self.status:
            await self._read()

    @property
    def has_ended(self) -> bool:
        """Whether the part returned last is known to be the end."""
        return self._is_complete and not self._parts

    async def next_part(self) -> bytes:
        """Return the next bytes of the response's body; empty at its end."""
        while not (self._parts or self._is_complete):
            await self._read()
        part = b"".join(self._parts)
        self._parts.clear()
        return part

    def send_chunk(self, data: bytes) -> None:
        """Send a part of a chunked request body; an empty part ends the body."""
        self._write(b"%x\r\n%s\r\n" % (len(data), data))

    def close(self) -> None:
        """Close at once. The other process cancels the request."""
        self._writer.transport.abort()

    def _write(self, data: bytes) -> None:
        try:
            self._writer.write(data)
        except RuntimeError as cause:  # uvloop's error for a closed transport
            raise ConnectionResetError("it closed the connection") from cause

    async def _read(self) -> None:
        async with asyncio.timeout(_SILENT_SECONDS):
            data = await self._reader.read(_MOST_AT_ONCE)
        if not data:
            raise ConnectionResetError("it closed the connection")
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as cause:
            raise OSError(f"its response is not valid HTTP: {cause}") from cause

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._is_complete = not self._has_body

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._is_complete = True
