"""The tests that docs/guarantees.md names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
FILES = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}


def test_every_test_a_guarantee_names_is_there() -> None:
    """A promise points at what tries to break it; a test that was renamed or removed must not leave it bare."""
    page = (ROOT / "docs" / "guarantees.md").read_text()
    missing, file, named = [], "", 0
    for path, function in re.findall(r"`(?:tests/[\w/]*)?(test_\w+\.py)?(?:::(test_\w+))?`", page):
        file, named = path or file, named + bool(path or function)
        if file and (file not in FILES or (function and f"def {function}(" not in FILES[file].read_text())):
            missing.append(f"{file}::{function}")
    assert not missing
    assert named > 20
