"""Services that come and go: one at a time under a name, each on its own, and none of them ends another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from headrace.errors import KafkaError
from headrace.runtime import Deadline, GroupSpec, Readiness, Service, ServiceGroups
from headrace.runtime.gauge_registry import GaugeKey, gauges
from headrace.testing import ManualClock

RUNNING, FAILING = GaugeKey("headrace_running_registrations"), GaugeKey("headrace_failing_registrations")


class House:
    """ServiceGroups on a clock of the test, and what happens to them."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.groups = ServiceGroups("groups", self.clock, 30.0)
        self.deaths: list[Service] = []
        self.groups.on_death = self.deaths.append
        self.notes: list[str] = []
        self.living: dict[str, Guest] = {}
        self.broken: set[str] = set()
        self.stuck = asyncio.Event()

    def spec(self, name: str, version: int = 1) -> GroupSpec:
        called = f"{name}{version}"

        def make() -> list[Service]:
            if called in self.broken:
                raise KafkaError(f"{called} cannot be made")
            self.living[called] = Guest(called, self)
            return [self.living[called]]

        return GroupSpec(version, make, lambda: self.notes.append(f"left {called}"))

    async def settle(self, *wanted: tuple[str, int]) -> None:
        self.groups.apply({name: self.spec(name, version) for name, version in wanted})
        await self.clock.settle()

    def said(self) -> list[str]:
        notes, self.notes = self.notes, []
        return notes


class Guest(Service):
    """Writes down what happens to it; drains when it may."""

    def __init__(self, name: str, house: House) -> None:
        super().__init__(name)
        self.house = house
        self.may_go = asyncio.Event()
        self.may_go.set()

    async def start(self) -> None:
        if f"start {self.name}" in self.house.broken:
            raise RuntimeError("cannot start")
        self.house.notes.append(f"start {self.name}")

    async def drain(self, deadline: Deadline) -> None:
        self.house.notes.append(f"drain {self.name}")
        await self.may_go.wait()

    async def stop(self) -> None:
        self.house.notes.append(f"stop {self.name}")
        await super().stop()

    def readiness(self) -> Readiness:
        return Readiness(self.may_go.is_set(), "" if self.may_go.is_set() else "stands still")


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[House]:
    house = House()
    await house.groups.start()
    try:
        yield house
    finally:
        await house.groups.stop()
    assert gauges().get(RUNNING) is None
    assert house.deaths == []


async def test_they_come_and_go_on_demand() -> None:
    """What is wanted lives; what is wanted no longer drains, stops and is undone; the others do not notice."""
    async with opened() as house:
        await house.settle(("a", 1), ("b", 1))
        assert house.said() == ["start a1", "start b1"]
        assert gauges()[RUNNING] == 2
        await house.settle(("b", 1))
        assert house.said() == ["drain a1", "stop a1", "left a1"]
        assert house.groups.readiness_of("b") == Readiness(True, "")
        assert not house.groups.readiness_of("a").ready


async def test_a_changed_one_begins_when_the_one_before_has_drained() -> None:
    """Two never live under one name; of several changes in the meantime only the last one comes."""
    async with opened() as house:
        await house.settle(("a", 1))
        house.living["a1"].may_go.clear()
        await house.settle(("a", 2))
        await house.settle(("a", 3))
        assert house.said() == ["start a1", "drain a1"]
        house.living["a1"].may_go.set()
        await house.clock.settle()
        assert house.said() == ["stop a1", "left a1", "start a3"]
        await house.settle()
        await house.settle(("a", 3))
        assert house.said() == ["drain a3", "stop a3", "left a3", "start a3"]


@pytest.mark.parametrize("how", ["dies", "cannot be made", "cannot start"])
async def test_one_that_dies_starts_again_after_growing_pauses(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """It says why until then, and nobody else is touched."""
    async with opened() as house:
        if how != "dies":
            house.broken.add("a1" if how == "cannot be made" else "start a1")
        await house.settle(("a", 1), ("b", 1))
        for pause in (1, 2, 4, 8, 16, 32, 60, 60):
            if how == "dies":
                house.living["a1"].die(ValueError("broke"))
                await house.clock.settle()
            why = house.groups.readiness_of("a")
            assert not why.ready
            assert {"dies": "broke", "cannot be made": "cannot be made", "cannot start": "cannot start"}[
                how
            ] in why.reason
            assert gauges()[FAILING] == 1
            house.said()
            await house.clock.advance(pause - 0.5)
            assert house.said() == []
            await house.clock.advance(0.5)
            assert (house.said() or ["left a1"])[0] in ("start a1", "left a1", "stop a1")
            assert house.groups.readiness_of("b").ready
        assert "it starts again in 60 s" in caplog.text
        house.broken.clear()
        await house.settle(("a", 2), ("b", 1))
        assert house.groups.readiness_of("a").ready
        assert gauges()[FAILING] == 0
        assert "drain b1" not in house.said()


async def test_pauses_are_short_again_after_a_long_life() -> None:
    """A death a day does not add up."""
    async with opened() as house:
        await house.settle(("a", 1))
        for _ in range(5):
            await house.clock.advance(3600)
            house.living["a1"].die(ValueError("broke"))
            await house.clock.settle()
            house.said()
            await house.clock.advance(1)
            assert house.said() == ["start a1"]


async def test_one_that_rests_can_be_changed_or_taken_away_at_once() -> None:
    """Nobody waits for the end of its pause."""
    async with opened() as house:
        house.broken = {"a1", "b1"}
        await house.settle(("a", 1), ("b", 1))
        house.said()
        await house.settle(("a", 2))
        assert house.said() == ["start a2"]
        assert house.groups.readiness_of("b").reason == "not started yet"
        assert gauges()[FAILING] == 0


async def test_all_drain_side_by_side_with_the_process() -> None:
    """One that does not end is stopped when the process stops."""
    async with opened() as house:
        await house.settle(("a", 1), ("b", 1))
        house.living["a1"].may_go.clear()
        draining = asyncio.ensure_future(house.groups.drain(Deadline(house.clock, 10)))
        await house.clock.settle()
        assert house.said() == ["start a1", "start b1", "drain a1", "drain b1", "stop b1", "left b1"]
        assert not draining.done()
        await house.groups.stop()
        await draining
        assert house.said() == ["stop a1", "left a1"]
        await house.groups.start()
