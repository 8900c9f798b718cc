"""The tests that pages name: they are there, and each promise has one that every test run has."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ALWAYS, ONLY_IN_ALL = True, False


def is_long(node: ast.AST) -> bool:
    return "pytest.mark.long" in ast.unparse(node)


@functools.cache
def known() -> dict[str, dict[str, bool]]:
    """Return the tests of each file by its name, and whether `make test` runs them."""
    found: dict[str, dict[str, bool]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        tree = ast.parse(path.read_text())
        marked = any(
            isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n.targets[0]) and is_long(n) for n in tree.body
        )
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                alone = any(is_long(d) for d in node.decorator_list if not isinstance(d, ast.Call))
                found.setdefault(path.name, {})[node.name] = ONLY_IN_ALL if marked or alone else ALWAYS
    return found


def named(text: str) -> Iterator[tuple[str, str]]:
    """Yield file and function of the tests that a text names; a name without a file is of the file before it."""
    file = ""
    for path, function in re.findall(r"`(?:tests/[\w/]*)?(test_\w+\.py)?(?:::(test_\w+))?`", text):
        file = path or file
        if file:
            yield file, function


def is_always_run(file: str, function: str) -> bool:
    tests = known().get(file, {})
    return tests.get(function, ONLY_IN_ALL) if function else any(tests.values())


@pytest.mark.parametrize("name", ["guarantees"])
def test_every_test_a_promise_names_is_there(name: str) -> None:
    """A promise points at what tries to break it; a test that was renamed or removed must not leave it bare."""
    found, tests = list(named((ROOT / "docs" / f"{name}.md").read_text())), known()
    assert [f"{file}::{test}" for file, test in found if file not in tests or (test and test not in tests[file])] == []
    assert len(found) > 20


def test_each_promise_has_a_test_that_every_run_has() -> None:
    """`make test` tries each promise at least once; the rest may wait for `make test-all`."""
    promises = [line for line in (ROOT / "docs" / "guarantees.md").read_text().splitlines() if line.startswith("| ")]
    tried = [(line.split(" | ")[0], list(named(line))) for line in promises]
    assert [promise for promise, tests in tried if tests and not any(is_always_run(*test) for test in tests)] == []
