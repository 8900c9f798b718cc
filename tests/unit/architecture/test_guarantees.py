"""The tests that pages name."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FILES: dict[str, str] = defaultdict(str)
for path in (ROOT / "tests").rglob("test_*.py"):
    FILES[path.name] += path.read_text()


@pytest.mark.parametrize("name", ["guarantees", "functions"])
def test_every_test_a_promise_names_is_there(name: str) -> None:
    """A promise points at what tries to break it; a test that was renamed or removed must not leave it bare."""
    page = (ROOT / "docs" / f"{name}.md").read_text()
    missing, file, named = [], "", 0
    for path, function in re.findall(r"`(?:tests/[\w/]*)?(test_\w+\.py)?(?:::(test_\w+))?`", page):
        file, named = path or file, named + bool(path or function)
        if file and (file not in FILES or (function and f"def {function}(" not in FILES[file])):
            missing.append(f"{file}::{function}")
    assert not missing
    assert named > 20
