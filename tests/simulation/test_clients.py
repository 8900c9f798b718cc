"""Clients of HTTP by seeds: active consumers, live control, replays and produce. Planted bugs are found."""

from pathlib import Path

import pytest

from tests.simulation.test_push import simulate

_CORE_SECONDS = 3
_SCENARIOS = ["active", "live-control", "replay", "keys"]
_FOUND = [
    ("active", "unread-counts-as-received"),
    ("active", "idle-instance-kept"),
    ("live-control", "pause-ignored"),
    ("live-control", "seek-goes-too-far"),
    ("replay", "replay-goes-too-far"),
    ("replay", "replay-ends-early"),
    ("keys", "key-forgotten"),
]


@pytest.mark.parametrize("scenario", _SCENARIOS)
def test_fixed_seeds_find_nothing(scenario: str) -> None:
    done = simulate("1", "--core-seconds", str(_CORE_SECONDS), scenario=scenario)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert done.stdout.startswith("0 problems in ")


@pytest.mark.parametrize("scenario", _SCENARIOS)
def test_a_seed_repeats_its_run_in_another_process(scenario: str, tmp_path: Path) -> None:
    first, second = simulate("11", scenario=scenario), simulate("11", scenario=scenario, folder=tmp_path)
    assert first.stdout.startswith(f"{scenario} seed 11: digest ")
    assert first.stdout == second.stdout, first.stderr


@pytest.mark.long
@pytest.mark.parametrize(("scenario", "bug"), _FOUND)
def test_a_planted_bug_is_found(scenario: str, bug: str) -> None:
    found = simulate("1", "--seeds", "12", "--plant", bug, scenario=scenario)
    assert found.returncode == 1, found.stderr
    assert "\nPROBLEM at " in found.stdout
