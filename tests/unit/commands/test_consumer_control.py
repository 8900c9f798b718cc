"""Live control: every process holds what the table says, with the settings of the file and what was changed."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.commands.consumer_control import NOT_READ
from headrace.commands.entries import iso_time, key_of, live_settings
from headrace.config.consumers import ReactiveConsumerConfig
from headrace.config.registrations import RegistrationConfig, RegistrationsConfig
from headrace.delivery.status import SettingsInForce
from tests.control_harness import CONFIG, P0, P1, ControlHarness, FakePump, ask, live, running
from tests.raw_server import until
from tests.staged import staged
from yaml_table import table


@staged(live)
async def test_nothing_moves_before_it_is_known_what_is_paused(harness: ControlHarness, /) -> None:
    """A pause outlives restarts; without one, and where there can be no table, it goes on."""
    for held in (False, True):
        pump = FakePump(P0)
        process = await harness.start(pump, loaded=False)
        assert pump.whole == NOT_READ
        await harness.load(process)
        await until(lambda pump=pump: pump.whole != NOT_READ)
        assert pump.whole.startswith("paused by ann") is held
        if not held:
            await process.table.put(key_of("hold/", "orders/a b"), {"by": "ann", "since": 0.0, "reason": "so"})
            assert pump.whole == "paused by ann since 1970-01-01T00:00:00Z: so"
            pump.whole = ""
            process.add(process.consumers["orders/a b"])  # as one that is registered while the process runs
            assert pump.whole.startswith("paused by ann")
    without = FakePump(P0)
    process = await harness.start(without, loaded=False)
    process.table.known.set()
    await until(lambda: not without.whole)


@staged(live)
async def test_a_consumer_made_again_keeps_its_pauses_while_the_table_is_read(harness: ControlHarness, /) -> None:
    """The entries are not known then."""
    process = await harness.start(FakePump(P0))
    first, second = (running(CONFIG, name="made") for _ in range(2))
    process.add(first)
    first.pump.pause([P1], "why")
    process.table.is_loaded.clear()
    process.add(second)
    second.pump.on_assigned({P0: 1, P1: 1}, {})
    assert {partition: lane.condition.reason for partition, lane in second.pump.lanes.items()} == {P0: "", P1: "why"}


@pytest.mark.parametrize(("key", "value"), table(__file__, "entries_that_say_nothing_are_passed_over"))
@staged(live)
async def test_entries_that_say_nothing_are_passed_over(
    harness: ControlHarness, /, key: str, value: dict[str, Any]
) -> None:
    """Somebody wrote into the table by hand; what was right before goes on to hold."""
    pump = FakePump(P0)
    process = await harness.start(pump)
    harness.put(key, value)
    _, [result] = await ask(process, "seek", {P1: 1}, wait_seconds=0)
    assert result.outcome == "pending"
    assert (pump.sought, pump.skipped, pump.whole, pump.holds) == ([], [], "", {})
    if key.startswith("settings/"):
        assert pump.settings == live_settings(CONFIG, {})


def test_times_that_are_not_valid_are_left_out() -> None:
    """Whatever the table has, the status can be shown."""
    assert iso_time(0.0) == "1970-01-01T00:00:00Z"
    assert {iso_time(wrong) for wrong in (None, "x", {}, 1e30, float("nan"))} == {""}


def test_settings_are_those_of_the_file_with_what_was_changed() -> None:
    """By the rules of the file."""
    assert live_settings(CONFIG, {}) == SettingsInForce(None, 100, 102_400, 0.0, 64)
    changed = {"by": "ann", "rate_records": 5, "max_records": 7, "max_in_flight": 2, "max_bytes": None}
    assert live_settings(CONFIG, changed) == SettingsInForce(5, 7, 102_400, 0.0, 2)
    allowed = {"registrations": RegistrationsConfig(backends=["http://b"])}
    backend = {"url": "http://b/push", "health": {"path": "/health"}}
    registered = {"topics": ["t"], "group": "g", "enabled": True, "backend": backend}
    of_team = RegistrationConfig.model_validate(registered, context=allowed)
    assert live_settings(of_team, changed).max_records == 7
    single = CONFIG.model_validate(
        {**CONFIG.model_dump(exclude_unset=True), "backend": {"url": "http://b", "mode": "single"}}
    )
    refused: list[tuple[ReactiveConsumerConfig, dict[str, Any]]] = [
        (CONFIG, {"rate_records": "x"}),
        (single, {"max_records": 2}),
    ]
    for delivery, wrong in refused:
        with pytest.raises(ValueError):
            live_settings(delivery, wrong)
