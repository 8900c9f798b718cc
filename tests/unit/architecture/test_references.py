"""References lead somewhere: pages, sections and files that code and pages name are in the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src" / "headrace"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_documents_that_the_code_names_are_in_the_repository() -> None:
    """A source outside it is named by its public number or address: KIP, RFC, Kafka's, light-4j's or Nuclio's page."""
    dead = []
    for path in sorted(SOURCE.rglob("*.py")):
        for name, section in re.findall(r"([\w./-]+\.md)\b[`,:]?(?: (\d[\d.]*))?", path.read_text()):
            found = [page for page in PAGES if page.as_posix().endswith("/" + name)]
            if not found or (section and not re.search(rf"^#+ {section}\b", found[0].read_text(), re.M)):
                dead.append(f"{path.relative_to(ROOT)}: {name} {section}")
    assert dead == []


def test_the_file_map_fits_on_two_screens() -> None:
    """A newcomer reads it as a whole; `make docs` writes it, and fails for a file or package that is missing."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.partition("## File map")[2]
    assert 60 < section.count("\n") <= 115
    named = re.findall(r"`((?:[a-z_]+/)+[a-z_*]+\.\w+)`", page)
    assert [name for name in named if not list(SOURCE.glob(name)) and not (ROOT / name).exists()] == []
