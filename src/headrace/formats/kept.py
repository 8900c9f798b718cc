"""What is kept of what was asked or made: so many entries and so many bytes, and the one used last goes last."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Kept(Generic[V]):
    """A dictionary with bounds; its newest entry always stays."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: dict[Hashable, tuple[V, int]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def peek(self, key: Hashable) -> V | None:
        """Return an entry, which does not count as use."""
        entry = self._entries.get(key)
        return entry[0] if entry else None

    def put(self, key: Hashable, value: V, size_bytes: int) -> None:
        """Keep a value in place of what was kept under its key."""
        self.drop(key)
        self._entries[key] = value, size_bytes
        self._bytes += size_bytes
        while len(self._entries) > self._max_entries or (self._bytes > self._max_bytes and len(self._entries) > 1):
            self.drop(next(iter(self._entries)))

    def use(self, key: Hashable) -> V | None:
        """Return an entry, which now goes last."""
        entry = self._entries.pop(key, None)
        if entry is None:
            return None
        self._entries[key] = entry
        return entry[0]

    def drop(self, key: Hashable) -> None:
        """Forget an entry; one that is not there is fine."""
        self._bytes -= self._entries.pop(key, (None, 0))[1]
