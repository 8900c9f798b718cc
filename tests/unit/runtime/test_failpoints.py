"""Failpoints: armed by their text, once, at their count; without the variable they do nothing."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.runtime import failpoints

PACKAGES = Path(__file__).parents[3] / "packages"
POINT = re.compile(r"\breach\(\"([a-z.-]+)\"\)")


def test_every_point_is_there_once_and_there_are_enough() -> None:
    """Two places of one name could not be told apart, and the way of a record has at least 15 places."""
    found = [name for file in PACKAGES.glob("*/src/**/*.py") for name in POINT.findall(file.read_text())]
    assert len(found) == len(set(found)) >= 15


def test_a_crash_is_at_its_count_and_has_its_name() -> None:
    """The third time, not before; other points are passed."""
    program = "from headrace.runtime.failpoints import reach\n"
    program += "for n in range(5): reach('c'); reach('a.b'); print(n, flush=True)"
    env = {"HEADRACE_FAILPOINTS": "a.b=crash@3"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGKILL, "0\n1\n", "failpoint a.b: crash\n")


def test_a_point_raises_once() -> None:
    """Code that continues after the defect does not get it again."""
    reach = failpoints.arm("a=raise@2")
    reach("a")
    with pytest.raises(RuntimeError, match="failpoint a"):
        reach("a")
    reach("a")


@pytest.mark.parametrize("text", ["a", "a=explode", "a=delay", "a=crash@x", "=crash", "a=crash,,b=crash"])
def test_an_invalid_list_of_points_is_refused(text: str) -> None:
    """A fault that is not armed would prove nothing, so the process does not start."""
    with pytest.raises(ValueError, match="HEADRACE_FAILPOINTS"):
        failpoints.arm(text)
