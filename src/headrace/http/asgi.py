"""The bare ASGI interface: its types, keys of a request's state, and waiting for the client.

Source: ASGI specification 3.0, HTTP connection scope.
"""

from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Final

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]

MAX_HEAD_BYTES: Final = 32_768
LONG_HEAD: Final = "headrace.long_head"
"""Set in a request's state if its head exceeds that size although it arrived in one piece."""
STREAMING: Final = "headrace.streaming"
"""Set in a request's state by a handler whose clients may send slowly."""
WRITTEN: Final = "headrace.written"
"""Key in a request's state: a weak reference to the method that waits until its response is written."""
WAKE: Final = "headrace.wake"
"""Key in a request's state: a function that makes `receive` return, perhaps without bytes."""
LAST_BYTES: Final = "headrace.last_bytes"
"""Key in a request's state: a function that returns the last bytes of a stream which a `HeadraceError` ends."""
UNREAD_SECONDS: Final = 300.0
"""Longest time that the client of a stream may read nothing."""
ALWAYS_OPEN: Final = ("/health/", "/live", "/ready", "/metrics")
"""Paths that are served while draining, and on connections above the limit."""


class ClientGone(Exception):
    """The client closed its connection before its request was complete."""


def headers_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the request's headers by lower-case name. The last one of a repeated header counts."""
    return dict(scope["headers"])


async def throw_away(receive: Receive) -> None:
    """Read until the end of the request, or of the connection."""
    while True:
        message = await receive()
        if message["type"] != "http.request" or not message["more_body"]:
            return


async def client_closed(receive: Receive) -> None:
    """Wait until the client has closed its connection, or the response is complete.

    Raises:
        HeadraceError: The caller's credentials have ended.
    """
    while (await receive())["type"] != "http.disconnect":
        pass
