"""Failpoints: armed by their text, once, at the count that was asked for; off they are nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.runtime import failpoints

SRC = Path(failpoints.__file__).parents[1]
POINT = re.compile(r"\breach\(\"([a-z.-]+)\"\)")


def ended(armed: str, program: str) -> tuple[int, str]:
    """Return how a process with armed points ends, and what it says."""
    done = subprocess.run(
        [sys.executable, "-c", f"from headrace.runtime.failpoints import reach\n{program}"],
        env={"HEADRACE_FAILPOINTS": armed},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stderr


def test_every_point_is_there_once_and_there_are_enough() -> None:
    """Two places of one name could not be told apart, and the way of a record has at least 15 places."""
    found = [name for file in SRC.rglob("*.py") for name in POINT.findall(file.read_text())]
    assert len(found) == len(set(found)) >= 15


def test_without_the_variable_a_point_does_nothing() -> None:
    """Nobody sets it in production, and there it is one call of an empty function."""
    assert failpoints.reach("poll.after") is None


def test_a_crash_comes_at_its_count_and_says_its_name() -> None:
    """The third time, not before; other points are passed."""
    code, said = ended("a.b=crash@3", "for n in range(5): reach('c'); reach('a.b'); print(n, flush=True)")
    assert (code, said) == (-signal.SIGKILL, "failpoint a.b: crash\n")


def test_a_point_raises_once() -> None:
    """Who goes on after the defect is not hit again."""
    reach = failpoints.arm("a=raise@2")
    reach("a")
    with pytest.raises(RuntimeError, match="failpoint a"):
        reach("a")
    reach("a")


def test_a_point_waits_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds stand behind the colon."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    failpoints.arm("a=delay:0.25, b=raise")("a")
    assert waited == [0.25]


@pytest.mark.parametrize("text", ["a", "a=explode", "a=delay", "a=crash@x", "=crash", "a=crash,,b=crash"])
def test_what_is_no_list_of_points_is_refused(text: str) -> None:
    """A fault that is not armed would prove nothing, so the process does not start."""
    with pytest.raises(ValueError, match="HEADRACE_FAILPOINTS"):
        failpoints.arm(text)
