"""Who has an instance, as the entries of the control table say."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.commands.instance_owners import InstanceOwners
from headrace.kafka import JSON_OBJECTS
from headrace.records import OutgoingRecord
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster


@pytest.mark.parametrize("before", [None, 5.0], ids=["none", "gone"])
async def test_an_instance_that_was_just_created_is_found(before: float | None) -> None:
    """A client creates it through one process, and reads at once through another one, which is behind."""
    clock, cluster = ManualClock(), MemoryCluster({"control": 1})
    table = cluster.table("control", JSON_OBJECTS, clock)
    cluster.follow(table)

    def write(instance: str, **entry: Any) -> None:
        cluster.write(OutgoingRecord("control", f"instance/g/one/{instance}".encode(), msgspec.json.encode(entry)))

    owner = {"process": "a", "url": "http://a", "principal": ""}
    owners = InstanceOwners(table, "http://c", lambda name: SimpleNamespace(), None, clock)  # type: ignore[return-value]
    owners.watch("instance/", owners._on_entry)
    if before:
        write("a", **owner, gone_at=before)
    cluster.tables.clear()
    write("b", **{**owner, "process": "b"})
    finding = asyncio.ensure_future(owners.find(("g", "one")))
    await clock.settle()
    assert not finding.done()
    cluster.follow(table, 1 if before else 0)
    found = await finding
    assert found
    assert found.process == "b"
