"""Each planted bug, and each counted branch, still changes the code that it names."""

import pytest

from headrace_devkit.simulation.mutations import MUTATIONS, changed_code, code_with
from headrace_devkit.simulation.points import POINTS, changes
from headrace_devkit.simulation.scenario_runs import SCENARIOS
from headrace_devkit.simulation.weights import Drawn, factors_of


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_changes_a_function(name: str) -> None:
    mutation = MUTATIONS[name]
    assert mutation.scenario in SCENARIOS
    for change in mutation.changes:
        assert changed_code(change)


@pytest.mark.parametrize("file", sorted({point.file for point in POINTS.values()}))
def test_a_counted_branch_is_in_a_function(file: str) -> None:
    assert code_with(file, changes()[file])


def test_a_value_that_reaches_what_few_runs_reach_is_drawn_more_often() -> None:
    common, rare = frozenset({"common"}), frozenset({"common", "rare"})
    runs = [Drawn({"faults": "0"}, common, 1.0)] * 9 + [Drawn({"faults": "8"}, rare, 1.0)]
    assert factors_of(runs) == {"faults": {"0": 0.8, "8": 2.0}}
