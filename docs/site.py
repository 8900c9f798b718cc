"""Builds the pages as a site: `make site`, or `python -m docs.site`. It writes build/site and needs no network.

The pages stay Markdown that GitHub shows. A copy of them is changed: pages from outside `docs/` get a name
of their own, and blocks between `<!-- tabs -->` and `<!-- /tabs -->` become tabs. The navigation is that of the tables
in README.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "build" / "site"
COPY = ROOT / "build" / "site-source"
MKDOCS = ROOT / ".venv-release" / "bin" / "mkdocs"
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/README.md"))
OUTSIDE = {
    "README.md": "index.md",
    "docs/README.md": "pages.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "report.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/RESULTS.md": "measured.md",
    "tests/LONG.md": "all-tests.md",
    "changes/README.md": "notes.md",
    "LICENSE": "LICENSE.txt",
    **{f"packages/{name}/README.md": f"packages/{name}.md" for name in PACKAGES},
}
"""Files that have another name on the site, by their name in the repository."""
PROJECT = {
    "Changes": "changes.md",
    "Security": "report.md",
    "Contributing": "contributing.md",
    "Notes for the next version": "notes.md",
    "All tests": "all-tests.md",
    "Measured": "measured.md",
}
LANGUAGES = {"sh": "curl", "python": "Python", "js": "JavaScript", "java": "Java", "go": "Go"}
"""Language of a block, and the title of its tab."""
_SLUG = "!!python/name:docs.site.slug"
_VARIABLES = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
_TABS = re.compile(r"^<!-- tabs -->\n(.*?)^<!-- /tabs -->$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Write the copy, then build it; a link that leads nowhere, or a page without a place in the navigation, fails."""
    shutil.rmtree(COPY, ignore_errors=True)
    sources = [path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".json", ".svg", ".png")]
    for path in [*sources, *(ROOT / name for name in OUTSIDE if not name.startswith("docs/"))]:
        target = COPY / "docs" / address(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            target.write_text(page(path))
        else:
            shutil.copy(path, target)
    settings = COPY / "mkdocs.yml"
    settings.write_text(yaml.safe_dump(configuration(), sort_keys=False).replace("SLUG", _SLUG))
    # Without --quiet, as that hides the warnings from --strict.
    command = [str(MKDOCS), "build", "--strict", "--clean", "--config-file", str(settings), "--site-dir", str(TARGET)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | _VARIABLES)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    sys.stdout.write(
        f"{TARGET.relative_to(ROOT)}; to search it: python3 -m http.server -d {TARGET.relative_to(ROOT)}\n"
    )


def address(path: Path) -> str:
    """Return where a file of the repository is on the site."""
    name = str(path.relative_to(ROOT))
    return OUTSIDE.get(name, name.removeprefix("docs/"))


def page(path: Path) -> str:
    """Return a page as mkdocs reads it: links to the names of the site, and tabs."""
    here = Path(address(path)).parent

    def link(found: re.Match[str]) -> str:
        target = (path.parent / found[1]).resolve()
        if "://" in found[1] or not target.is_relative_to(ROOT):
            return found[0]
        if target.is_dir() or not (target.is_relative_to(ROOT / "docs") or str(target.relative_to(ROOT)) in OUTSIDE):
            raise SystemExit(f"{path}: {found[1]} is not on the site: name it in OUTSIDE")
        return f"]({os.path.relpath(address(target), here)}{found[2] or ''})"

    text, parts, end = path.read_text(), [], 0
    for block in _FENCE.finditer(text):  # what looks like a link in code is none
        parts += [_LINK.sub(link, text[end : block.start()]), block[0]]
        end = block.end()
    return _TABS.sub(lambda found: tabs(found[1]), "".join([*parts, _LINK.sub(link, text[end:])]))


def slug(text: str, separator: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", text.lower()).replace(" ", separator)


def tabs(text: str) -> str:
    """Return blocks in several languages as tabs; what follows a block belongs to its tab, up to the next language."""
    made: list[str] = []
    for block in _FENCE.findall(text):
        language = block[3:].split("\n")[0]
        title = f'=== "{LANGUAGES.get(language)}"\n\n'
        if language in LANGUAGES and title not in made and not (language == "sh" and made):
            made.append(title)
        made.append("".join(f"    {line}".rstrip() + "\n" for line in block.split("\n")) + "\n")
    return "".join(made)


def navigation() -> list[dict[str, Any]]:
    """Return the sections of docs/README.md with the pages of their tables, in its order."""
    index = (ROOT / "docs" / "README.md").read_text()
    sections: list[dict[str, Any]] = [{"Headrace": [{"What it is": "index.md"}, {"All pages": "pages.md"}]}]
    for title, text in re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", index, re.MULTILINE | re.DOTALL):
        table = text.partition("| Page | Answers |\n")[2]
        cells = [row.split("|")[1] for row in re.findall(r"^\| \[.*", table, re.MULTILINE)]
        links = [link for cell in cells for link in re.findall(r"\[([^]]+)\]\(([^)#]+)\)", cell)]
        if links:
            sections.append({title: [{name[0].upper() + name[1:]: target} for name, target in links]})
    packages = {"Packages": [{name: f"packages/{name}.md"} for name in PACKAGES]}
    return [*sections, packages, {"Project": [{title: name} for title, name in PROJECT.items()]}]


def configuration() -> dict[str, Any]:
    """Return the file of mkdocs: nothing is fetched from another site, neither by the build nor by a reader."""
    toggle = {"scheme": "slate", "toggle": {"icon": "material/weather-sunny", "name": "Light"}}
    light = {"scheme": "default", "toggle": {"icon": "material/weather-night", "name": "Dark"}}
    schemes = [("(prefers-color-scheme: light)", light), ("(prefers-color-scheme: dark)", toggle)]
    return {
        "site_name": "Headrace",
        "docs_dir": "docs",
        "use_directory_urls": False,
        "theme": {
            "name": "material",
            "font": False,
            "palette": [{"media": media, "primary": "indigo", **scheme} for media, scheme in schemes],
            "features": ["content.code.copy", "content.tabs.link", "navigation.footer", "navigation.top", "toc.follow"],
        },
        "plugins": ["search"],
        "markdown_extensions": [
            "attr_list",
            "pymdownx.superfences",
            "pymdownx.highlight",
            {"pymdownx.tabbed": {"alternate_style": True}},
            {"toc": {"permalink": True, "slugify": "SLUG"}},
        ],
        "validation": dict.fromkeys(("omitted_files", "absolute_links", "unrecognized_links", "anchors"), "warn"),
        "extra": {"generator": False},
        "nav": navigation(),
    }


if __name__ == "__main__":
    main()
