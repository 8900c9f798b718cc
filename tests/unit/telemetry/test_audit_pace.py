"""How much of a busy process notes may take."""

from __future__ import annotations

import pytest

from headrace.telemetry import audit_pace
from headrace.telemetry.audit_pace import Pace


class Machine:
    """Clocks that tell what a test says: wall, all threads, this thread."""

    def __init__(self) -> None:
        self.wall = self.all_threads = self.own = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.wall

    def process_time(self) -> float:
        return self.all_threads

    def thread_time(self) -> float:
        return self.own

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.wall += seconds
        self.all_threads += seconds  # others are busy meanwhile


@pytest.mark.parametrize(
    ("share", "others", "slept"),
    [(0.1, 0.02, 0.08), (0.05, 0.02, 0.18), (0.1, 0.002, 0.0), (1.0, 0.02, 0.0)],
)
def test_notes_take_their_share_of_a_busy_process(
    share: float, others: float, slept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten milliseconds of work in twenty; a process with time to spare, or a share of one, is not held back."""
    machine = Machine()
    monkeypatch.setattr(audit_pace, "time", machine)
    pace = Pace(share)
    for _ in range(3):
        machine.wall += 0.02
        machine.own += 0.01
        machine.all_threads += 0.01 + others
        pace.keep()
    assert machine.slept == pytest.approx([slept] * 3 if slept else [])


def test_short_times_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep of less than a millisecond is not worth its while."""
    machine = Machine()
    monkeypatch.setattr(audit_pace, "time", machine)
    pace = Pace(0.1)
    for _ in range(20):
        machine.wall += 0.00001
        machine.own += 0.00001
        machine.all_threads += 0.00002
        pace.keep()
    assert machine.slept == pytest.approx([0.00108])
