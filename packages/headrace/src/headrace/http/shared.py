"""What the connections of a server share: limits, the date, and how much each turn of the event loop reads.

The event loop reads all clients that have sent something in one turn, even a thousand. `Slices` spreads their requests
over several short turns. Otherwise health requests and new connections would wait for all of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from email.utils import formatdate
from typing import Any, Final, Protocol

from headrace.errors import ServerBusy
from headrace.http.request import ALWAYS_OPEN, HttpRequest, Kind, RequestConnection
from headrace.http.targets import Targets
from headrace.runtime import clock

Spawn = Callable[[Coroutine[Any, Any, None], str], "asyncio.Task[None]"]

RESERVED_CONNECTIONS: Final = 512
"""Connections above `http.max_connections`, for health requests and for clients that get 503."""
_TIME_TO_SEND_SECONDS: Final = 0.2
"""A new connection is not closed earlier: its request may be in transit, and the 503 could be lost."""
_SLICE_SECONDS: Final = 0.005
_TASK_SECONDS: Final = 0.0002
_BYTE_SECONDS: Final = 1e-7
"""Usual processor time of a request that a task serves, and of a byte of its body."""


OPEN_PATHS: Final = tuple(path.encode() for path in ALWAYS_OPEN)
_PROBES: Final = tuple(b"GET " + path for path in OPEN_PATHS)
_PROBE_BYTES: Final = 4096


def is_one_probe(data: bytes) -> bool:
    """Return whether the bytes are exactly one health request; such bytes are always read at once."""
    return data.startswith(_PROBES) and len(data) < _PROBE_BYTES and data.find(b"\r\n\r\n") == len(data) - 4


class ServedConnection(RequestConnection, Protocol):
    """The same for its server."""

    @property
    def is_answering(self) -> bool:
        """Whether a response is due."""

    def dismiss(self) -> None:
        """Close a connection without a request in favour of a new one."""

    def shut_down(self) -> None:
        """Close the connection after the response that is due."""

    def check_deadlines(self, now: float) -> None:
        """Close the connection if its client is too slow, or if its request takes too long."""


class ConnectionLimit:
    """Admits connections to send requests. Of the others, it closes the oldest in favour of new ones.

    Each kind has a separate limit, so that neither uses up the connections of the other.
    """

    def __init__(self, limits: Mapping[Kind, int]) -> None:
        self.limits = limits
        self.admitted: dict[Kind, int] = dict.fromkeys(limits, 0)
        """Number of open connections that may send requests."""
        self._others: dict[ServedConnection, float] = {}
        """Not admitted: they sent nothing, an incomplete head, or only health requests. Least recently active first."""

    def has_capacity(self) -> bool:
        """Return whether one more may be opened. At the limit, close the oldest that had time to send a request."""
        most = sum(self.limits.values()) + RESERVED_CONNECTIONS
        if sum(self.admitted.values()) + len(self._others) < most:
            return True
        before = clock.monotonic() - _TIME_TO_SEND_SECONDS
        oldest = next((one for one, at in self._others.items() if at > before or not one.is_answering), None)
        if oldest is None or self._others[oldest] > before:
            return False
        del self._others[oldest]
        oldest.dismiss()
        return True

    def busy(self, kind: Kind) -> ServerBusy:
        """Return the error for a connection that is not admitted."""
        setting = "http.max_connections" if kind == "requests" else "half of http.max_connections, for reads"
        text = f"limit of {self.limits[kind]} connections reached ({setting}): close some, or send again after a pause"
        return ServerBusy(text)

    def opened(self, connection: ServedConnection) -> None:
        """Count a new connection."""
        self._others[connection] = clock.monotonic()

    def admit(self, connection: ServedConnection, kind: Kind) -> bool:
        """Return whether a connection may send requests of a kind; if so, it counts for that kind alone."""
        if self.admitted[kind] >= self.limits[kind]:
            return False
        self.closed(connection)
        connection.kind = kind
        self.admitted[kind] += 1
        return True

    def active(self, connection: ServedConnection) -> None:
        """Mark a connection that is not admitted as active."""
        if self._others.pop(connection, None) is not None:
            self.opened(connection)

    def closed(self, connection: ServedConnection) -> None:
        """Stop counting a connection."""
        self._others.pop(connection, None)
        if connection.kind:
            self.admitted[connection.kind] -= 1
            connection.kind = None


class Slices:
    """Decides whether to read arrived bytes in this turn of the event loop or in a later one."""

    def __init__(self) -> None:
        self._ends_at = 0.0
        self._waiting: deque[Callable[[], None]] = deque()

    def has_time(self) -> bool:
        """Return whether a connection may read now; if not, it must `wait`."""
        if not self._ends_at:
            self._begin()
        return not self._waiting and clock.perf_counter() < self._ends_at

    def wait(self, read: Callable[[], None]) -> None:
        """Call a function in a later turn, after those already waiting."""
        self._waiting.append(read)

    def count(self, body_bytes: int) -> None:
        """Count the expected time of a request that a task will serve, and of its body bytes, in this turn."""
        if not self._ends_at:
            self._begin()
        self._ends_at -= _TASK_SECONDS + body_bytes * _BYTE_SECONDS

    def _begin(self) -> None:
        self._ends_at = clock.perf_counter() + _SLICE_SECONDS
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._ends_at = 0.0
        if not self._waiting:
            return
        self._begin()
        self._waiting.popleft()()
        while self._waiting and clock.perf_counter() < self._ends_at:
            self._waiting.popleft()()


class ServedApplication(Protocol):
    """Serves requests."""

    @property
    def targets(self) -> Targets:
        """What the targets of its requests tell."""

    def needs(self, request: HttpRequest) -> bool:
        """Return whether a request with a complete head needs a task, because it needs more than its body."""

    def do(self, request: HttpRequest) -> bool:
        """Serve a request that needs only its body, which is complete; return False if it needs a task after all."""

    async def load(self, request: HttpRequest) -> bool:
        """Serve a request with a complete head in a task, which waits for what it needs.

        Return whether the response follows later, without this task.
        """


class Shared:
    """What all connections of a server share."""

    def __init__(self, limits: Mapping[Kind, int], application: ServedApplication, scheme: str, spawn: Spawn) -> None:
        self.limit = ConnectionLimit(limits)
        self.slices = Slices()
        self.application = application
        self.targets = application.targets
        self.scheme = scheme
        """`http` or `https`."""
        self.is_tls = scheme == "https"
        self.spawn = spawn
        """Starts the task of a request."""
        self.connections: set[ServedConnection] = set()
        self.receiving_bytes = 0
        """Bytes of requests that are not complete."""
        self.date = b""
        """Header line of every response."""
        self._none = asyncio.Event()
        self.tick()

    def tick(self) -> None:
        """Renew the date of responses; call once a second."""
        self.date = f"date: {formatdate(usegmt=True)}\r\n".encode()

    def lost(self, connection: ServedConnection) -> None:
        """Forget a closed connection."""
        self.connections.discard(connection)
        self.limit.closed(connection)
        if not self.connections:
            self._none.set()

    async def no_connections(self) -> None:
        """Wait until no connection is open."""
        while self.connections:
            self._none.clear()
            await self._none.wait()
