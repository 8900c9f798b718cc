"""How many records per second may be asked for."""

from __future__ import annotations

import click
import pytest

from headrace.cli.selection_options import Rate


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "0", "-1", "many"])
def test_what_is_no_rate_is_wrong_usage(text: str) -> None:
    """Python takes nan and inf for numbers."""
    with pytest.raises(click.BadParameter):
        Rate()(text)


def test_a_rate_may_be_a_fraction() -> None:
    """One record in two seconds, for one that is to be looked at."""
    assert Rate()("0.5") == 0.5
