"""Who has an instance, as the entries of the control table say."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.control.instance_owners import InstanceOwners
from headrace.testing import ManualClock


class LateTable:
    """A table whose newest entries are read only when its end is asked for."""

    def __init__(self) -> None:
        self.changes: Callable[[str, Any], None] = lambda key, entry: None
        self.unread: dict[str, Mapping[str, Any]] = {}
        self.keys: list[str] = []

    def watch(self, prefix: str, on_change: Callable[[str, Any], None]) -> None:
        self.changes = on_change

    def offset_of(self, key: str) -> int:
        return self.keys.index(key)

    async def catch_up(self) -> None:
        for key, entry in self.unread.items():
            self.keys.append(key)
            self.changes(key, entry)
        self.unread.clear()


@pytest.mark.parametrize("before", [None, 5.0], ids=["none", "gone"])
async def test_an_instance_that_was_just_created_is_found(before: float | None) -> None:
    """A client creates it through one process, and reads at once through another one, which is behind."""
    table, owner = LateTable(), {"process": "a", "url": "http://a", "principal": ""}
    owners = InstanceOwners(table, "http://c", lambda name: SimpleNamespace(), None, ManualClock())  # type: ignore[arg-type, return-value]
    owners.watch("instance/", owners._on_entry)
    if before:
        table.unread["instance/g/one/a"] = {**owner, "gone_at": before}
        await table.catch_up()
    table.unread["instance/g/one/b"] = {**owner, "process": "b"}
    found = await owners.find("g", "one")
    assert found
    assert found.process == "b"
