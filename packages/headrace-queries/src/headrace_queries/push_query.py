"""One push query of a client: its rows wait here until they are sent, and it ends when too many do."""

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final, NamedTuple

from headrace.errors import HeadraceError, QueriesUnavailable
from headrace_queries.engine_protocol import ColumnType, Positions

MOST_WAITING_BYTES: Final = 16 * 1024 * 1024
_SLOW: Final = (
    f"more than {MOST_WAITING_BYTES >> 20} MiB of rows wait for this client: read faster, or select fewer rows or "
    "columns; to begin with the changes only, send no Last-Event-ID and no earliest"
)


class PushedRows(NamedTuple):
    """Rows that were taken together."""

    rows: list[bytes]
    positions: Positions
    """Of each partition: everything before is in the rows until here."""


class PushQuery:
    """Rows of a push query, for use on the loop."""

    def __init__(self, number: int, table: str, columns: Sequence[ColumnType], after: Positions | None) -> None:
        self.number = number
        self.table = table
        self.columns = columns
        self._positions: Positions = dict(after or {})
        self._rows: list[bytes] = []
        self._size = 0
        self._problem: HeadraceError | None = None
        self._is_closed = False
        self._has_begun = False
        self._changed = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether no more rows are taken."""
        return self._is_closed or self._problem is not None

    def offer(self, rows: Sequence[bytes], positions: Positions) -> None:
        """Take rows from the engine; the query ends if its client does not read them."""
        if self.ended:
            return
        self._rows += rows
        self._size += sum(map(len, rows))
        self._positions |= positions
        if self._size > MOST_WAITING_BYTES:
            self._rows = []
            self.end(QueriesUnavailable(_SLOW))
        if rows or not self._has_begun:
            self._changed.set()  # the first positions are sent without rows, so that the client can continue from them
        self._has_begun = True

    def end(self, problem: HeadraceError) -> None:
        """End with an error, behind the rows that wait."""
        self._problem = self._problem or problem
        self._changed.set()

    def close(self) -> None:
        """End because a client has requested it."""
        self._is_closed = True
        self._changed.set()

    async def take(self, wait_seconds: float) -> PushedRows | None:
        """Return the rows that wait, after waiting for some; without rows after the time; None at the end.

        Raises:
            HeadraceError: The query ended with it.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_seconds):
                await self._changed.wait()
        self._changed.clear()
        rows = self._rows
        self._rows = []
        self._size = 0
        if not rows and self._problem:
            raise self._problem
        if self.ended:
            self._changed.set()
            if not rows:
                return None
        return PushedRows(rows, dict(self._positions))
