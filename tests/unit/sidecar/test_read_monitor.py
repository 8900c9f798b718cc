"""The service that asks Kafka where the partitions of active consumers end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from headrace.errors import TopicNotFound
from headrace.sidecar.active.monitor import ReadMonitor
from headrace.testing import ManualClock


async def test_a_topic_that_is_gone_does_not_end_it() -> None:
    """The ends are unknown then, and the statuses are there."""
    asked: list[Any] = []

    async def end_offsets(partitions: Any) -> Any:
        asked.append(partitions)
        raise TopicNotFound("topic t does not exist", topic="t")

    admin: Any = SimpleNamespace(end_offsets=end_offsets)
    assert await ReadMonitor(list, admin, None, ManualClock()).statuses() == []
    assert asked == [set()]
