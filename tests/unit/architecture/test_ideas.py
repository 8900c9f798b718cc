"""The number of ideas a user meets. `docs/ideas.md` has each bound, and what it takes to raise one."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"


def bound_of(idea: str) -> int:
    found = re.search(rf"^\| {re.escape(idea)} \| (\d+) \|", (DOCS / "ideas.md").read_text(), re.MULTILINE)
    assert found, f"docs/ideas.md has no bound for: {idea}"
    return int(found[1])


def test_settings_of_the_file() -> None:
    """Each leaf of `headrace.yaml` counts once; the reference, which is made from the models, lists them."""
    page = (DOCS / "reference" / "configuration.md").read_text().partition("\n## A pipeline file\n")[0]
    settings = set(re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE))
    assert 100 < len(settings) <= bound_of("Settings of `headrace.yaml`")
