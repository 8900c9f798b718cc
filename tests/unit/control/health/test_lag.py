"""How far groups are behind is told only while it is known."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.control.health import lag
from headrace.control.health.lag import GroupTopics, LagMonitor, PartitionLag
from headrace.errors import KafkaUnavailable
from headrace.records import TopicPartition
from headrace.testing import ManualClock

P0 = TopicPartition("t", 0)


async def test_a_lag_is_not_known_in_an_outage_nor_long_after_the_last_response(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last number is never shown as if it were the present one."""
    responses: list[Any] = [[PartitionLag(P0, 1, 5, 4, 5)]]

    async def lag_of(admin: Any, group: str, topics: Any) -> list[PartitionLag]:
        if not responses:
            raise KafkaUnavailable("no broker answers")
        return responses.pop()

    monkeypatch.setattr(lag, "lag_of", lag_of)

    clock, admin = ManualClock(), SimpleNamespace(reachability=SimpleNamespace(outage=None))
    monitor = LagMonitor(lambda: {"g": GroupTopics(admin, ["t"])}, clock)  # type: ignore[arg-type]
    await monitor.start()
    await clock.advance(1)
    assert list(monitor.all()) == [("g", P0, 4)]
    admin.reachability.outage = object()
    assert (monitor.of("g"), list(monitor.all())) == ({}, [])
    admin.reachability.outage = None
    await clock.advance(20)
    assert monitor.of("g")[P0].lag == 4
    await clock.advance(20)
    assert monitor.of("g") == {}
    await monitor.stop()


async def test_a_group_is_asked_for_on_its_own_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions and pipelines may have other brokers; an outage of one cluster hides no lag of another."""

    async def lag_of(admin: Any, group: str, topics: Any) -> list[PartitionLag]:
        return [PartitionLag(P0, 0, admin.lag, admin.lag, admin.lag)]

    monkeypatch.setattr(lag, "lag_of", lag_of)

    clock = ManualClock()
    one, other = (SimpleNamespace(lag=n, reachability=SimpleNamespace(outage=None)) for n in (1, 2))
    groups = {"one": GroupTopics(one, []), "other": GroupTopics(other, [])}  # type: ignore[arg-type]
    monitor = LagMonitor(lambda: groups, clock)
    await monitor.start()
    await clock.advance(1)
    one.reachability.outage = object()
    assert list(monitor.all()) == [("other", P0, 2)]
    await monitor.stop()
