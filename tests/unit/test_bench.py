"""What the measurements compute: counts, shares, ratios, and the page of results."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from bench import compare, load, machine, measured, page, probe  # noqa: E402 a plain folder, found from the repository's root

BEFORE = """\
headrace_delivery_records_total{outcome="taken",path="function noop/t"} 1000.0
headrace_delivery_records_total{outcome="delivered",path="function noop/t"} 600.0
headrace_delivery_records_total{path="reactive push",outcome="delivered"} 50.0
headrace_delivery_records_total{outcome="redeliveries",path="function noop/t"} 7.0
headrace_delivery_records_created{outcome="delivered",path="function noop/t"} 1.7e+09
"""
NOW = """\
headrace_received_records_total{consumer="noop.t",kind="function"} 1000.0
headrace_completed_records_total{consumer="noop.t",kind="function",outcome="delivered"} 600.0
headrace_completed_records_total{kind="reactive",outcome="delivered",consumer="push"} 50.0
headrace_completed_records_total{consumer="noop.t",kind="function",outcome="dead_letter"} 7.0
"""


@pytest.mark.parametrize("metrics", [BEFORE, NOW])
def test_each_delivered_record_counts_once(metrics: str) -> None:
    """Records received, failed or delivered again do not add to those that were delivered."""
    assert measured.delivered_records(metrics) == 650


@pytest.mark.parametrize("name", ['headrace_depth{name="audit_events"}', "headrace_audit_pending_events"])
def test_notes_wait_until_they_are_written(name: str) -> None:
    """The queue of the audit is read under its name of before and of now."""
    assert measured.pending_events(f'headrace_depth{{name="other"}} 3.0\n{name} 12.0\n') == 12


def test_processor_time_is_that_of_a_process_and_all_below_it() -> None:
    """Workers count with the process that started them, whatever their command is called."""
    stats = [
        "10 (headrace) S 1 10 10 0 -1 4194304 1 0 0 0 100 20 0 0 20 0 1 0",
        "11 (a (b) c) S 10 10 10 0 -1 4194304 1 0 0 0 7 1 0 0 20 0 1 0",
        "12 (worker) S 11 10 10 0 -1 4194304 1 0 0 0 3 0 2 0 20 0 1 0",
        "13 (kafka) S 1 10 10 0 -1 4194304 1 0 0 0 5000 0 0 0 20 0 1 0",
    ]
    assert machine.tree_ticks(10, map(machine.process_times, stats)) == 120 + 8 + 5


def test_stolen_time_is_a_share_of_all_time() -> None:
    """Guest time is part of user time, so it is not added again."""
    found = machine.machine_times("cpu  10 20 30 40 5 6 7 8 10 0\ncpu0 1 2 3 4 5 6 7 8 9 0\n")
    assert found == machine.MachineTimes(126, 8)


def test_a_long_wait_counts_for_those_who_would_have_asked_meanwhile() -> None:
    """Else a server that stands still for seconds would have one bad response among many good ones."""
    assert probe.waits(35.0) == [35, 25, 15, 5]
    assert probe.waits(2.0) == [2]


def test_generators_add_up() -> None:
    """Counts of several generators are added, and the worst of their times holds."""
    one = {"requests": 10.0, "errors": 0.0, "refused": 1.0, "seconds": 2.0, "p99_ms": 5.0}
    two = {"requests": 12.0, "errors": 2.0, "refused": 0.0, "seconds": 2.5, "p99_ms": 4.0}
    assert load.merged([one, two]) == {"requests": 22, "errors": 2, "refused": 1, "seconds": 2.5, "p99_ms": 5}


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


def test_a_section_measured_anew_leaves_the_others() -> None:
    """Only the section of the table is replaced, and the page is the same when it is read again."""

    class Push:
        title, text = "Push", "In turns."

        def measure(self) -> None: ...

        def lines(self) -> list[str]:
            return measured.table("row | rate", ["one | 7"])

    old = page.Page("# Measured\n\nhead\n\n## Produce\n\nkept\n\n## Push\n\nold\n\n## Audit\n\nkept too\n")
    old.put(Push(), 1.0)
    text = old.text()
    assert [part.split("\n")[0] for part in text.split("\n## ")[1:]] == ["Produce", "Push", "Audit"]
    assert "| one | 7 |" in text and "old" not in text.split("## Push")[1]
    assert page.Page(text).text() == text


def test_files_of_the_measurements_import_each_other_in_one_direction() -> None:
    """A loop of imports makes it matter which of them is started."""
    imports = {
        path.stem: {
            node.module.split(".")[1]
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bench.")
        }
        for path in (ROOT / "bench").glob("*.py")
    }
    assert set(TopologicalSorter(imports).static_order()) == set(imports)
