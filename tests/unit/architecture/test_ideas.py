"""The number of ideas a user or a reader meets. `docs/ideas.md` has each bound, and what it takes to raise one."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from headrace.app.documents import every_endpoint
from headrace.cli.main import root
from headrace.config.explain import moved
from headrace.delivery.pump_context import PumpHooks
from headrace.errors import catalogue
from headrace.runtime.telemetry.metrics import CATALOGUE

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
SOURCE = ROOT / "src" / "headrace"
FILES = sorted(SOURCE.rglob("*.py"))
MOVED = SOURCE / "config" / "moved_keys.csv"
MOST_ATTRIBUTES = 12


def settings() -> set[str]:
    """Return each leaf of `headrace.yaml` as the reference, which is made from the models, lists it."""
    page = (DOCS / "reference" / "configuration.md").read_text().partition("\n## A pipeline file\n")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))


def commands(command: click.Command, context: click.Context) -> int:
    if not isinstance(command, click.Group):
        return 1
    below = {name: command.get_command(context, name) for name in command.list_commands(context)}
    return sum(commands(one, click.Context(one, info_name=name, parent=context)) for name, one in below.items() if one)


def classes() -> Iterator[ast.ClassDef]:
    for path in FILES:
        yield from (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef))


def attributes(node: ast.ClassDef) -> set[str]:
    """Return what the constructor of a class sets of it."""
    made = [part for part in node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"]
    return {
        part.attr
        for part in (part for function in made for part in ast.walk(function))
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and ast.unparse(part.value) == "self"
    }


def repeated_modules() -> int:
    usual = {"__init__", "__main__", "feature", "routes", "spec", "load", "status"}
    return sum(count > 1 for count in Counter(path.stem for path in FILES if path.stem not in usual).values())


COUNTS = {
    "Settings of `headrace.yaml`": lambda: len(settings()),
    "HTTP operations": lambda: sum(endpoint.described for endpoint in every_endpoint()),
    "Commands": lambda: commands(root, click.Context(root, info_name="headrace")),
    "Error codes": lambda: len([*catalogue()]),
    "Metrics": lambda: len(CATALOGUE),
    "Optional hooks of a pump": lambda: len(PumpHooks._fields),
    f"Classes with more than {MOST_ATTRIBUTES} attributes": lambda: sum(
        len(attributes(node)) > MOST_ATTRIBUTES for node in classes()
    ),
    "Module names that stand more than once": repeated_modules,
    "Words of Headrace": lambda: len(re.findall(r"^\| \*\*", (DOCS / "glossary.md").read_text(), re.MULTILINE)),
    "Lines of tests": lambda: sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")),
}


@pytest.mark.parametrize("idea", COUNTS)
def test_ideas_stay_within_their_bounds(idea: str) -> None:
    """A bound is raised by a line in the page; it is lowered with the count."""
    found = re.search(rf"^\| {re.escape(idea)} \| ([\d,]+) \|", (DOCS / "ideas.md").read_text(), re.MULTILINE)
    assert found, "docs/ideas.md has no bound for it"
    assert 0 < COUNTS[idea]() <= int(found[1].replace(",", ""))


def test_what_left_the_file_is_not_in_it() -> None:
    """So the sentence that says where a setting is now is the one that its user reads."""
    keys = [line.partition(",")[0] for line in MOVED.read_text().splitlines()[1:]]
    assert [key for key in keys for setting in settings() if f".{setting}".endswith(f".{key}")] == []
    assert [key for key in keys if not moved(tuple(key.split(".")))] == []


def test_no_class_name_stands_twice() -> None:
    """Whoever searches for a class finds one."""
    assert [name for name, count in Counter(node.name for node in classes()).items() if count > 1] == []
