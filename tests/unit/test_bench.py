"""What the measurements compute: counts, shares, ratios, and the page of results."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from bench import compare, measured, sizing  # noqa: E402 a plain folder, found from the repository's root


def test_a_comparison_is_the_ratio_of_medians() -> None:
    """One run that went wrong on either side does not decide, and a row below the target says so."""

    def runs(*rates: float, cpu_us: float) -> list[measured.Measured]:
        return [measured.Measured(rate, 1.0, rate * cpu_us / 1e6) for rate in rates]

    found = {
        ("push", "before"): runs(1000, 1010, 10, cpu_us=10),
        ("push", "now"): runs(990, 980, 5000, cpu_us=9),
        ("produce", "before"): runs(100, 100, 100, cpu_us=5),
        ("produce", "now"): runs(90, 90, 100, cpu_us=6),
    }
    *_, push, produce = compare.lines("main~1", ["push", "produce"], found)
    assert "| **0.99** | 0.97 to 500.00 | 0.90 |" in push
    assert "| **0.90** below 0.95 | 0.90 to 1.00 | 1.20 |" in produce


def test_a_process_that_has_ended_has_no_tree_below_it() -> None:
    """Linux has no number this high, so it stands for one that ended while /proc was read."""
    assert [*sizing.tree(2**22 + 1)] == [2**22 + 1]
