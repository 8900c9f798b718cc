"""The other processes of one run, for what only they know.

A client that asks any of them about all processes gets the response of all. The same request goes to the others,
signed, so each of those answers for itself alone. One that does not respond in time is left out.
"""

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from headrace.http.endpoint import Call
from headrace.http.forwarding import Forwarder
from headrace.http.request import HttpRequest

T = TypeVar("T")
_LIMIT_SECONDS: Final = 3.0
_OK: Final = 200


class OtherProcesses:
    """Asks the others."""

    def __init__(self, number: int, urls: Mapping[int, str]) -> None:
        """Prepare, for the process with this number; `urls` are the addresses of the others by their numbers."""
        self.number = number
        self.forwarder: Forwarder | None = None
        """What signs and sends the requests; set before the first one."""
        self._urls = urls

    @property
    def numbers(self) -> list[int]:
        """Numbers of the others."""
        return list(self._urls)

    def concern(self, request: HttpRequest) -> bool:
        """Return whether a request is about all processes: a client has sent it, not one of the others."""
        return not request.caller.forwarded

    async def responses(self, request: HttpRequest, body: bytes = b"") -> dict[int, bytes]:
        """Send a request to the others as well; return the bodies of the successful responses, by number."""
        found = await asyncio.gather(*(self._response(url, request, body) for url in self._urls.values()))
        return {number: text for number, text in zip(self._urls, found, strict=True) if text is not None}

    async def ask(self, call: Call[Any, Any], kind: type[T]) -> list[T]:
        """Return what the others respond to a request without a body; nothing if one of them has sent it."""
        if not self.concern(call.request):
            return []
        return [msgspec.json.decode(text, type=kind) for text in (await self.responses(call.request)).values()]

    async def _response(self, url: str, request: HttpRequest, body: bytes) -> bytes | None:
        assert self.forwarder
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(_LIMIT_SECONDS):
                status, text = await self.forwarder.ask(url, request, body)
                return text if status == _OK else None
        return None
