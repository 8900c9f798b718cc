"""Scenarios of functions, each for a moment: workers die, and a call of the client never returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.kafka.transactions import transactional_client
from headrace_devkit.simulation.exactly_once_scenario import ExactlyOnceRun, TransactionFaults
from headrace_devkit.simulation.functions_scenario import FunctionOptions, FunctionRun
from headrace_devkit.simulation.world import World

_SHORT: dict[str, Any] = {
    "seconds": 15.0,
    "rate": 3.0,
    "work": 0.002,
    "faults": 0,
    "poison": 0.0,
    "bad": 0.05,
    "timeout": 2.0,
    "drain": 5.0,
    "max_delay": 0.2,
    "partitions": 1,
    "processes": 1,
    "brokers": 1,
}


@pytest.mark.parametrize("acks", ["disable", "enable", "explicitOnly"])
def test_workers_that_die_lose_nothing(acks: str) -> None:
    world = World(1)
    run = FunctionRun(world, FunctionOptions.drawn(world.random, **_SHORT, acks=acks, workers=1, deaths=0.3))
    with run.installed():
        run.run()
    assert (world.problems, world.counts["child-end"] > 2, run.checker.open_records()) == ([], True, [])


@pytest.mark.parametrize("is_limited", [True, False])
def test_offsets_that_never_return_stop_only_a_call_without_a_limit(
    is_limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(_seconds: float, call: Callable[[], Any]) -> Any:
        return call()

    if not is_limited:
        monkeypatch.setattr(transactional_client, "call_within", wait)
    world = World(3)
    options = FunctionOptions.drawn(world.random, **_SHORT, delivery="exactly_once", deaths=0.0)
    run = ExactlyOnceRun(world, options, TransactionFaults(1.0, 1.0))
    with run.installed():
        run.run()
    assert bool(world.problems) is not is_limited
