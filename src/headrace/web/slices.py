"""Cuts the requests that came in one turn of the event loop into slices, so that no turn is long.

A thousand clients that send at the same moment are read in one turn. Without slices a health request waits for all of
them, and accepting does too.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from headrace.web.connection import Connection

_SLICE_SECONDS: Final = 0.005
_TASK_SECONDS: Final = 0.0002
_BYTE_SECONDS: Final = 1e-7
"""Usual processor time of a request that is served by a task, and of a byte of its body."""


class Slices:
    """Says whether this turn has time for what came, and later reads what has waited, in its order."""

    def __init__(self) -> None:
        self._ends_at = 0.0
        self._waiting: deque[Connection] = deque()

    def has_time(self) -> bool:
        """Return whether a connection may read now; if not, it must `wait`."""
        if not self._ends_at:
            self._begin()
        return not self._waiting and time.perf_counter() < self._ends_at

    def wait(self, connection: Connection) -> None:
        """Let a connection read in a later turn."""
        self._waiting.append(connection)

    def count(self, body_bytes: int) -> None:
        """Count the time of a request that a task will serve, of which so much has come in this turn."""
        if not self._ends_at:
            self._begin()
        self._ends_at -= _TASK_SECONDS + body_bytes * _BYTE_SECONDS

    def _begin(self) -> None:
        self._ends_at = time.perf_counter() + _SLICE_SECONDS
        asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._ends_at = 0.0
        if not self._waiting:
            return
        self._begin()
        self._waiting.popleft().read_waiting()
        while self._waiting and time.perf_counter() < self._ends_at:
            self._waiting.popleft().read_waiting()
