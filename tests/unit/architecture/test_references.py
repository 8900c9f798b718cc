"""References lead somewhere: pages, sections and files that code and pages name are in the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SOURCES = sorted(ROOT.glob("packages/*/src"))
ROOTS = [ROOT, *SOURCES, ROOT / "packages/headrace/src/headrace"]
"""Where names of files on the pages begin: the repository, the packages, and the core."""
READMES = sorted(ROOT.glob("packages/*/README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")), *READMES]


def test_documents_that_the_code_names_are_in_the_repository() -> None:
    """A source outside it is named by its public number or address: KIP, RFC, Kafka's, light-4j's or Nuclio's page."""
    dead = []
    for path in sorted(path for source in SOURCES for path in source.rglob("*.py")):
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
    assert missing(page, ROOTS) == []


def missing(page: str, roots: list[Path]) -> list[str]:
    """Return the files that a page names and no root has."""
    named = re.findall(r"(?<![\w/])((?:[a-z0-9_-]+/)+[a-z0-9_*]+\.(?:py|csv|toml|yaml))\b", page)
    assert named
    return [name for name in named if not any([*root.glob(name)] for root in roots)]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_a_readme_of_a_package_names_files_that_exist(readme: Path) -> None:
    """Its own files by their place in the package, those of others by their package; an index shows no other page."""
    package = readme.parent / "src" / readme.parent.name.replace("-", "_")
    text = readme.read_text()
    assert missing(text, [package, *ROOTS]) == []
    assert [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link] == []
    assert len(text.split()) <= (700 if package.name == "headrace" else 400)
