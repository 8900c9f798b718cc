"""No files import each other in a loop, not even for type checking."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def imported(tree: ast.Module, names: Mapping[str, object]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                yield from [name for name in (module, node.module) if name in names][:1]


def loops(package: Path) -> set[str]:
    """Return the groups of modules that reach each other."""
    trees = {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for path in package.rglob("*.py")
    }
    direct = {name: {*imported(tree, trees)} - {name} for name, tree in trees.items()}

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [*direct[start]]
        while waiting:
            if (name := waiting.pop()) not in found:
                found.add(name)
                waiting += direct[name]
        return found

    reach = {name: reached(name) for name in direct}
    return {
        " ".join(sorted(other.removeprefix("headrace.") for other in reach[name] if name in reach[other]))
        for name in direct
        if name in reach[name]
    }


@pytest.mark.parametrize("package", ["packages/headrace/src/headrace", "bench"])
def test_no_files_import_each_other_in_a_loop(package: str) -> None:
    """A file can be read alone; what two files need of each other is a third one or a parameter."""
    assert loops(ROOT / package) == set()
