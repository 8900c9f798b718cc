"""Functions and exactly once by seeds: nothing may be found in the product, a run repeats, planted bugs are found."""

from pathlib import Path

import pytest

from tests.simulation.test_push import simulate

_CORE_SECONDS = 3
_FOUND = [
    ("functions", "dead-worker-has-succeeded", "COMMIT-PASSES", 4),
    ("functions", "explicit-only-completes", "COMMIT-PASSES", 12),
    ("exactly-once", "offsets-without-their-outputs", "ONCE", 6),
    ("exactly-once", "offsets-are-not-sent", "LAG", 2),
]


@pytest.mark.parametrize("scenario", ["functions", "exactly-once"])
def test_fixed_seeds_find_nothing(scenario: str) -> None:
    done = simulate("1", "--core-seconds", str(_CORE_SECONDS), scenario=scenario)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.startswith("0 problems in ")


@pytest.mark.parametrize("scenario", ["functions", "exactly-once"])
def test_a_seed_repeats_its_run_in_another_process(scenario: str, tmp_path: Path) -> None:
    first, second = simulate("11", scenario=scenario), simulate("11", scenario=scenario, folder=tmp_path)
    assert first.stdout.startswith(f"{scenario} seed 11: digest ")
    assert first.stdout == second.stdout, first.stderr


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "bug", "kind", "seeds"), _FOUND)
def test_a_planted_bug_is_found(scenario: str, bug: str, kind: str, seeds: int) -> None:
    found = simulate("1", "--seeds", str(seeds), "--plant", bug, scenario=scenario)
    assert found.returncode == 1, found.stderr
    assert f" {kind}: " in found.stdout
