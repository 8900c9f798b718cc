"""What the measurements compute: counts, shares, ratios, and the page of results."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from bench import compare, machine, measured  # noqa: E402 a plain folder, found from the repository's root

METRICS = """\
headrace_received_records_total{consumer="noop.t",kind="function"} 1000.0
headrace_completed_records_total{consumer="noop.t",kind="function",outcome="delivered"} 600.0
headrace_completed_records_total{kind="reactive",outcome="delivered",consumer="push"} 50.0
headrace_completed_records_total{consumer="noop.t",kind="function",outcome="dead_letter"} 7.0
headrace_audit_pending_events 12.0
"""


def test_each_delivered_record_and_each_pending_event_counts_once() -> None:
    """Records received, failed or delivered again do not add to those that were delivered."""
    assert measured.delivered_records(METRICS) == 650
    assert measured.pending_events(METRICS) == 12


def test_processor_time_is_that_of_a_process_and_all_below_it() -> None:
    """Workers count with the process that started them, whatever their command is called."""
    stats = [
        "10 (headrace) S 1 10 10 0 -1 4194304 1 0 0 0 100 20 0 0 20 0 1 0",
        "11 (a (b) c) S 10 10 10 0 -1 4194304 1 0 0 0 7 1 0 0 20 0 1 0",
        "12 (worker) S 11 10 10 0 -1 4194304 1 0 0 0 3 0 2 0 20 0 1 0",
        "13 (kafka) S 1 10 10 0 -1 4194304 1 0 0 0 5000 0 0 0 20 0 1 0",
    ]
    assert machine.tree_ticks(10, map(machine.process_times, stats)) == 120 + 8 + 5


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
