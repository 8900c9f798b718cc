"""Services on demand: one at a time under a name, and none of them ends another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace.errors import KafkaError
from headrace.runtime import GroupSpec, Readiness, Service, ServiceGroups
from headrace.runtime.gauge_registry import GaugeKey, gauges
from headrace_devkit.testing import ManualClock
from tests.unit.runtime.recorded_service import RecordedService

RUNNING, FAILING = (GaugeKey("headrace_registrations", (("state", state),)) for state in ("running", "failing"))


class Harness:
    """ServiceGroups on a clock of the test, and what happens to them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.groups = ServiceGroups("groups", self.clock, 30.0, "headrace_registrations")
        self.deaths: list[Service] = []
        self.groups.on_death = self.deaths.append
        self.events: list[str] = []
        self.living: dict[str, RecordedService] = {}
        self.broken: set[str] = set()
        self.stuck = asyncio.Event()

    def spec(self, name: str, version: int = 1) -> GroupSpec:
        called = f"{name}{version}"

        def make() -> list[Service]:
            if called in self.broken:
                raise KafkaError(f"{called} cannot be made")
            broken = ["start"] if f"start {called}" in self.broken else []
            self.living[called] = RecordedService(called, self.events, *broken)
            return [self.living[called]]

        return GroupSpec(version, make, lambda: self.events.append(f"left {called}"))

    async def settle(self, *wanted: tuple[str, int]) -> None:
        self.groups.apply({name: self.spec(name, version) for name, version in wanted})
        await self.clock.settle()

    def recorded(self) -> list[str]:
        events = [*self.events]
        self.events.clear()
        return events


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Harness]:
    harness = Harness()
    await harness.groups.start()
    try:
        yield harness
    finally:
        await harness.groups.stop()
    assert gauges().get(RUNNING) is None
    assert harness.deaths == []


async def test_services_start_and_stop_on_demand() -> None:
    """A service that is no longer wanted drains, stops and is undone; the others continue."""
    async with opened() as harness:
        await harness.settle(("a", 1), ("b", 1))
        assert harness.recorded() == ["start a1", "start b1"]
        assert gauges()[RUNNING] == 2
        await harness.settle(("b", 1))
        assert harness.recorded() == ["drain a1", "stop a1", "left a1"]
        assert harness.groups.readiness_of("b") == Readiness(True, "")
        assert not harness.groups.readiness_of("a").ready


async def test_a_changed_service_starts_when_the_one_before_has_drained() -> None:
    """Two never run under one name; of several changes in the meantime only the last one counts."""
    async with opened() as harness:
        await harness.settle(("a", 1))
        harness.living["a1"].may_drain.clear()
        await harness.settle(("a", 2))
        await harness.settle(("a", 3))
        assert harness.recorded() == ["start a1", "drain a1"]
        harness.living["a1"].may_drain.set()
        await harness.clock.settle()
        assert harness.recorded() == ["stop a1", "left a1", "start a3"]
        await harness.settle()
        await harness.settle(("a", 3))
        assert harness.recorded() == ["drain a3", "stop a3", "left a3", "start a3"]


@pytest.mark.parametrize("how", ["dies", "cannot be made", "cannot start"])
async def test_a_service_that_dies_starts_again_after_growing_pauses(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Readiness has the reason until then, and the others continue."""
    async with opened() as harness:
        if how != "dies":
            harness.broken.add("a1" if how == "cannot be made" else "start a1")
        await harness.settle(("a", 1), ("b", 1))
        for pause in (1, 2, 4, 8, 16, 32, 60, 60):
            if how == "dies":
                harness.living["a1"].die(ValueError("broke"))
                await harness.clock.settle()
            why = harness.groups.readiness_of("a")
            assert not why.ready
            assert {"dies": "broke", "cannot be made": "cannot be made", "cannot start": "cannot start"}[
                how
            ] in why.reason
            assert gauges()[FAILING] == 1
            harness.recorded()
            await harness.clock.advance(pause - 0.5)
            assert harness.recorded() == []
            await harness.clock.advance(0.5)
            assert (harness.recorded() or ["left a1"])[0] in ("start a1", "left a1", "stop a1")
            assert harness.groups.readiness_of("b").ready
        assert "will restart in 60 s" in caplog.text
        harness.broken.clear()
        await harness.settle(("a", 2), ("b", 1))
        assert harness.groups.readiness_of("a").ready
        assert gauges()[FAILING] == 0
        assert "drain b1" not in harness.recorded()


async def test_pauses_are_short_again_after_a_long_life() -> None:
    """A death a day does not add up."""
    async with opened() as harness:
        await harness.settle(("a", 1))
        for _ in range(5):
            await harness.clock.advance(3600)
            harness.living["a1"].die(ValueError("broke"))
            await harness.clock.settle()
            harness.recorded()
            await harness.clock.advance(1)
            assert harness.recorded() == ["start a1"]
