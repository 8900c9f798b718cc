"""Placement by seeds: whole processes that come, go and are cut off."""

from headrace_devkit.simulation.scenario_runs import run_many


def test_fixed_seeds_find_nothing() -> None:
    runs = [*run_many("placement", (1, 3))]
    assert [run.problems for run in runs] == [[], []]
    assert all(run.counts["chooses"] and run.counts["rebalance"] for run in runs)
