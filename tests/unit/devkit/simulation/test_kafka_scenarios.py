"""Scenarios of transactions, tables, leases and redrives, each for a moment; and a planted bug is found."""

from __future__ import annotations

import pytest

from headrace.kafka.transactions.transactional_client import TransactionGuard
from headrace_devkit.simulation.control_scenario import ControlOptions, ControlRun
from headrace_devkit.simulation.job_run import JobChoices
from headrace_devkit.simulation.redrive_scenario import RedriveRun
from headrace_devkit.simulation.transaction_scenario import TransactionOptions, TransactionRun
from headrace_devkit.simulation.world import World


@pytest.mark.parametrize("is_guarded", [True, False])
def test_late_requests_harm_only_without_the_guard(is_guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_guarded:
        monkeypatch.setattr(TransactionGuard, "problem", lambda self: "")
    world = World(1)
    TransactionRun(world, TransactionOptions(1, 0.3, 0, 0, 0.0), work_seconds=8.0).go()
    assert world.counts["transaction"] > 50
    assert bool(world.problems) is not is_guarded


def test_tables_are_alike_and_one_process_holds_the_lease() -> None:
    world = World(1)
    ControlRun(world, ControlOptions(2, 1, 1, 0, 0, 0.5, 2.0), work_seconds=20.0).go()
    assert (world.problems, world.counts["put"] > 50, world.counts["holds"] > 5) == ([], True, True)


def test_a_killed_redrive_brings_each_dead_letter_back_once() -> None:
    world = World(1)
    RedriveRun(world, JobChoices(1, 1, 40, 2, 0, 0, 5.0), is_exactly_once=True).go()
    assert (world.problems, world.counts["start"] > 1) == ([], True)
