"""Each planted bug still changes the code that it names."""

import pytest

from headrace_devkit.simulation.mutations import MUTATIONS, changed_code


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_changes_a_function(name: str) -> None:
    assert changed_code(name)
