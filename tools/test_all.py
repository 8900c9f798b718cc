"""Every test, in parts: `python -m tools.test_all [PART ...]`. Each part writes its result into tests/LONG.md."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).parents[1]
_PAGE: Final = _ROOT / "tests" / "LONG.md"
_APART: Final = ("pipelines", "console")
"""Folders of `tests/integration` that are parts of their own."""
PARTS: Final = {
    "unit": ["--all", "tests/unit"],
    "docs": ["--all", "tests/docs"],
    "integration": ["--all", "tests/integration", *(f"--ignore=tests/integration/{name}" for name in _APART)],
    "pipelines": ["--all", "tests/integration/pipelines"],
    "console": ["--all", "tests/integration/console"],
    "conformance": ["--all", "tests/conformance", "--ignore=tests/conformance/simulation"],
    "calibration": ["--all", "tests/conformance/simulation"],
    "faults": ["--all", "tests/faults"],
    "simulation": ["--all", "tests/simulation"],
    "secured": ["--secured", "tests/integration", "tests/conformance"],
}
"""Options of pytest by part. Each part fits into about 40 minutes on two processors."""
_WORKERS: Final = {"unit": "2"}
"""Unit tests compute. All others wait for servers and processes most of the time, so they have more workers."""
_MOST_WORKERS: Final = "6"
_SUMMARY: Final = re.compile(r"^=*\s*((?:\d+ [a-z]+(?:, )?)+) in [\d.]+s")
_SECOND_TRIES: Final = re.compile(r"^\d+ second tries")


def main(names: list[str]) -> int:
    """Run the parts of these names, by default all; return 1 if one failed."""
    if unknown := {*names} - {*PARTS}:
        sys.stderr.write(f"unknown part {', '.join(sorted(unknown))}: known are {', '.join(PARTS)}\n")
        return 2
    return max([_run(name) for name in names or PARTS])


def _run(name: str) -> int:
    workers = _WORKERS.get(name, _MOST_WORKERS)
    command = [sys.executable, "-u", "-m", "pytest", *PARTS[name], "-n", workers, "--dist", "loadgroup"]
    begun, said = time.monotonic(), list[str]()
    commit = _git("rev-parse", "--short", "HEAD") + (
        "+" if _git("status", "--porcelain", "--", ":!tests/LONG.md") else ""
    )
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, text=True) as tests:
        assert tests.stdout
        for line in tests.stdout:
            sys.stdout.write(line)
            sys.stdout.flush()
            if found := _SUMMARY.match(line) or _SECOND_TRIES.match(line):
                said.append(found[found.lastindex or 0])
    result = ", ".join(reversed(said[-2:])) or f"ended with {tests.returncode}"
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    _write(name, f"| {name} | {datetime.date.today()} | {commit} | {result} | {minutes}:{seconds:02} |")
    return int(bool(tests.returncode))


def _write(name: str, row: str) -> None:
    page = _PAGE.read_text()
    _PAGE.write_text(re.sub(rf"^\| {name} \|.*$", row, page, flags=re.MULTILINE))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
