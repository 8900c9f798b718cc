"""The service that fetches the end offsets of the partitions that active consumers read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import TopicNotFound
from headrace.records import TopicPartition
from headrace.sidecar.active.monitor import ReadMonitor
from headrace_devkit.testing import ManualClock


@pytest.mark.parametrize(
    ("error", "named"),
    [(TopicNotFound("topic t does not exist", topic="t"), ""), (ValueError("a defect"), "ends failed: ValueError(")],
)
async def test_no_error_ends_it(error: Exception, named: str) -> None:
    """Known or not; and at most 10,000 end offsets are requested."""
    asked: list[int] = []

    async def known_ends(partitions: Any) -> dict[TopicPartition, int]:
        asked.append(len(partitions))
        raise error

    clock, admin = ManualClock(), SimpleNamespace(known_ends=known_ends)
    instance = SimpleNamespace(assigned=[TopicPartition("t", n) for n in range(10_001)])
    monitor = ReadMonitor(lambda: [instance], admin, None, clock)  # type: ignore[arg-type,list-item]
    await monitor.start()
    await clock.settle()
    await clock.advance(10)
    await clock.settle()
    assert (asked, monitor.death, monitor.task_failures[:24]) == ([10_000], None, named)
    await monitor.stop()
