"""Who has an instance, as the entries of the control table say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.commands.instance_owners import InstanceOwners
from headrace.kafka import JSON_OBJECTS
from headrace.records import Record
from headrace_devkit.testing import ManualClock
from tests.memory_table import memory_table


@pytest.mark.parametrize("before", [None, 5.0], ids=["none", "gone"])
async def test_an_instance_that_was_just_created_is_found(before: float | None) -> None:
    """A client creates it through one process, and reads at once through another one, which is behind."""
    log: list[Record] = []

    def end() -> int:
        table.read(log, len(log))  # nothing is read before somebody asks for the end
        return len(log)

    def write(instance: str, **entry: Any) -> None:
        log.append(Record("control", 0, len(log), 0, f"instance/g/one/{instance}".encode(), msgspec.json.encode(entry)))

    table: Any = memory_table("control", JSON_OBJECTS, None, end)
    owner = {"process": "a", "url": "http://a", "principal": ""}
    owners = InstanceOwners(table, "http://c", lambda name: SimpleNamespace(), None, ManualClock())  # type: ignore[return-value]
    owners.watch("instance/", owners._on_entry)
    if before:
        write("a", **owner, gone_at=before)
        await table.catch_up()
    write("b", **{**owner, "process": "b"})
    found = await owners.find(("g", "one"))
    assert found
    assert found.process == "b"
