"""The lag of groups is shown only while it is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.consumers import lag
from headrace.consumers.lag import GroupTopics, LagMonitor, PartitionLag
from headrace.errors import KafkaUnavailable
from headrace.records import TopicPartition
from headrace_devkit.testing import ManualClock

P0 = TopicPartition("t", 0)


async def test_a_lag_is_not_known_in_an_outage_nor_long_after_the_last_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last number is never shown as the present one; an outage of one cluster hides no lag of another."""

    async def lag_of(admin: Any, group: str, topics: Any) -> list[PartitionLag]:
        if admin.is_silent:
            raise KafkaUnavailable("no broker answers")
        return [PartitionLag(P0, 0, admin.lag, admin.lag, admin.lag)]

    monkeypatch.setattr(lag, "lag_of", lag_of)
    clock = ManualClock()
    one, other = (SimpleNamespace(lag=n, reachability=SimpleNamespace(outage=None), is_silent=False) for n in (1, 2))
    groups = {"one": GroupTopics(one, []), "other": GroupTopics(other, [])}  # type: ignore[arg-type]
    monitor = LagMonitor(lambda: groups, clock)
    await monitor.start()
    await clock.advance(1)
    one.reachability.outage = object()
    assert (monitor.of("one"), list(monitor.all())) == ({}, [("other", P0, 2)])
    one.reachability.outage = None
    one.is_silent = True
    await clock.advance(20)
    assert monitor.of("one")[P0].lag == 1
    await clock.advance(20)
    assert monitor.of("one") == {}
    await monitor.stop()
