"""Placement by seeds: whole processes that come, go and are cut off."""

import subprocess
import sys

import pytest

from headrace_devkit.simulation.scenario_runs import run_many


def test_fixed_seeds_find_nothing() -> None:
    runs = [*run_many("placement", (11, 14))]
    assert [run.problems for run in runs] == [[], []]
    assert all(run.counts["chooses"] and run.counts["rebalance"] for run in runs)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_planted_bug_is_found() -> None:
    command = [sys.executable, "-m", "headrace_devkit.simulation", "placement", "1", "--seeds", "100", "--plant", "all"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
