"""Push by seeds: nothing may be found in the product, a run repeats, and planted bugs are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_devkit.simulation.mutations import MUTATIONS, found_bugs

_CORE_SECONDS = 60
_FOUND = {"commit-one-too-far": "COMMIT-PASSES", "revoke-forgotten": "COMMIT-BACK", "partition-begins-beside": "ORDER"}


def simulate(*arguments: str, scenario: str = "push", folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the simulator as a user does."""
    command = [sys.executable, "-m", "headrace_devkit.simulation", scenario, *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_fixed_seeds_find_nothing() -> None:
    done = simulate("1", "--core-seconds", str(_CORE_SECONDS))
    sys.stdout.write(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.startswith("0 problems in ")


def test_a_seed_repeats_its_run_in_another_process(tmp_path: Path) -> None:
    first, second = simulate("11"), simulate("11", folder=tmp_path)
    assert first.stdout.startswith("push seed 11: digest ")
    assert first.stdout == second.stdout, first.stderr


def test_a_seed_is_the_same_run_in_a_process_that_has_run_others() -> None:
    alone, after_others = simulate("9"), simulate("2", "--seeds", "8", "--events", "1")
    digest = alone.stdout.splitlines()[0]
    assert digest.startswith("push seed 9: digest ")
    assert digest in after_others.stdout.splitlines(), after_others.stderr


@pytest.mark.parametrize("bug", _FOUND)
def test_a_planted_bug_is_found_and_its_command_repeats_it(bug: str) -> None:
    found = simulate("1", "--seeds", "12", "--plant", bug)
    assert found.returncode == 1, found.stderr
    assert f" {_FOUND[bug]}: " in found.stdout
    command = found.stdout.split("repeat: python -m headrace_devkit.simulation push ")[1].split("\n")[0]
    again = simulate(*command.split())
    problem = next(line for line in again.stdout.splitlines() if line.startswith("PROBLEM "))
    assert problem in found.stdout


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_planted_bugs_are_found_as_the_page_says() -> None:
    done = simulate("1", "--seeds", "60", "--jobs", "2", "--plant", "all")
    sys.stdout.write(done.stdout)
    missed = {line.split(" | ")[0].removeprefix("| ") for line in done.stdout.splitlines() if " | none | none " in line}
    assert missed == MUTATIONS.keys() - found_bugs().keys(), done.stdout + done.stderr
