"""What must be known stays within the bounds of `docs/developers/ideas.md`, and raising one costs a deletion.

`pytest -s` shows the table, and so does `python -m tools.counts`.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))
from headrace.app.documents import every_endpoint  # noqa: E402
from headrace.errors import catalogue  # noqa: E402
from headrace.runtime.telemetry.metrics import CATALOGUE  # noqa: E402
from tools import counts  # noqa: E402 a plain folder, found from the repository's root
from tools.counts import COUNTS, NAMED, PAGE  # noqa: E402

pytestmark = pytest.mark.xdist_group("house")


class Raise(NamedTuple):
    """A row of the table of raises."""

    count: str
    before: int
    after: int
    deleted: str


def number(text: str) -> int:
    return int(text.replace(",", ""))


def raises_of(page: str) -> list[Raise]:
    """Return the rows of the table of raises."""
    rows = page.partition("\n## Raising a bound\n")[2]
    found = re.findall(r"^\| ([^|]+) \| ([\d,]+) \| ([\d,]+) \| [^|]+ \| ([^|]*) \|$", rows, re.MULTILINE)
    return [Raise(count, number(before), number(after), deleted) for count, before, after, deleted in found]


def versions() -> list[str]:
    """Return the page as each commit had it, then as it is now; without a repository, as it is now."""
    name = str(PAGE.relative_to(ROOT))

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=False, capture_output=True, text=True).stdout

    commits = git("log", "--reverse", "--format=%H", "--", name).split()
    return [*(git("show", f"{commit}:{name}") for commit in commits), PAGE.read_text()]


def unexplained(pages: Sequence[str]) -> Iterator[str]:
    """Yield the bounds that a later page has raised without a row in the last page."""
    explained = {(one.count, one.before, one.after) for one in raises_of(pages[-1])}
    for before, after in zip(map(counts.bounds, pages), map(counts.bounds, pages[1:]), strict=False):
        for title in before.keys() & after.keys():
            change = (before[title].most, after[title].most)
            if change[1] > change[0] and (title, *change) not in explained:
                yield f"{title}: from {change[0]} to {change[1]}"


def existing() -> set[str]:
    """Return every name that a deletion may not have: definitions, files, settings, commands and so on."""
    modules = {name for path in counts.files() for name in (path.name, path.stem, str(path.relative_to(ROOT)))}
    codes = {text for error in catalogue() for text in (error.code, error.message)}
    metrics = {name for name, *_ in CATALOGUE}
    routes = {f"{one.method} {one.path}" for one in every_endpoint()}
    return {*counts.definitions(), *modules, *counts.settings(), *codes, *metrics, *routes, *counts.commands()}


def not_deleted(deleted: str, names: set[str]) -> list[str]:
    """Return what a cell claims to be deleted and is not; a cell without a name claims nothing, which is not enough."""
    claimed = re.findall(r"`([^`]+)`", deleted)
    return [name for name in claimed if name in names] if claimed else ["nothing is named"]


@pytest.mark.parametrize("title", COUNTS)
def test_a_count_is_within_its_bound(title: str) -> None:
    """The page has a bound and a goal for each count."""
    bound, now = counts.bounds(PAGE.read_text())[title], COUNTS[title]()
    sys.stdout.write(f"\n{title}: now {now:,}, bound {bound.most:,}, goal {bound.goal} ")
    assert bound.goal
    assert now <= bound.most


def test_each_bound_has_a_count() -> None:
    """A bound for something that is not counted holds nothing."""
    assert counts.bounds(PAGE.read_text()).keys() == COUNTS.keys()


def test_lists_name_definitions_that_exist() -> None:
    """A list cannot keep a name that is gone; where the file matters, the name is of one file."""
    found = counts.definitions()
    gone = [name for entries in NAMED.values() for entry in entries for name in counts.names_of(entry)]
    assert [name for name in gone if name not in found] == []
    assert [path for path in counts.SOURCES if not path.exists()] == []


def test_restart_loops_are_listed() -> None:
    """Whoever counts failed starts and waits is a restart loop."""
    listed = {name for entry in NAMED["Restart loops"] for name in counts.names_of(entry)}
    assert counts.users_of("steady") <= listed


def test_a_bound_is_raised_only_for_a_deletion() -> None:
    """Each raise since the page exists has a row, and what the row calls deleted is gone."""
    assert list(unexplained(versions())) == []
    names = existing()
    wrong = {one.count: not_deleted(one.deleted, names) for one in raises_of(PAGE.read_text())}
    assert {count: found for count, found in wrong.items() if found} == {}


def test_no_class_name_stands_twice() -> None:
    """Whoever searches for a class finds one."""
    assert [name for name, count in Counter(node.name for node, _ in counts.classes()).items() if count > 1] == []
