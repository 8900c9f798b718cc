"""A service that works towards the desired state in the control table."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from headrace.kafka import CompactedTable
from headrace.runtime import Clock, Service
from headrace.runtime.supervisor import first_of

Entry = Mapping[str, Any]


class Reconciler(Service):
    """Runs `reconcile` after each change of a watched entry, and again after the pause that it returns."""

    def __init__(self, name: str, table: CompactedTable[Any], clock: Clock) -> None:
        super().__init__(name)
        self.table = table
        self._clock = clock
        self._changed = asyncio.Event()

    def watch(self, prefix: str, on_entry: Callable[[str, Entry | None], None]) -> None:
        """Call a function with each entry whose key starts with a prefix, before `reconcile` runs."""

        def on_change(key: str, entry: Entry | None) -> None:
            on_entry(key, entry)
            self.wake()

        self.table.watch(prefix, on_change)

    def wake(self) -> None:
        """Run `reconcile` soon."""
        self._changed.set()

    def reconcile(self) -> float | None:
        """Apply the current entries; longer work runs in tasks.

        Return the seconds until it must run again without a change; None to wait for a change.
        """
        raise NotImplementedError

    async def run(self) -> None:
        while True:
            self._changed.clear()
            pause = self.reconcile()
            if pause is None:
                await self._changed.wait()
            else:
                await first_of(self._changed.wait(), self._clock.sleep(pause))
