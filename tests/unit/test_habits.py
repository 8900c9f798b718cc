"""What a contributor's tools do: the rule for commit messages, hooks, CI and the forms of the repository."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from tools.commit_message import MOST_CHARACTERS, problems  # noqa: E402 a plain folder, found from the repository's root

GITHUB = ROOT / ".github"
GOOD = "kafka: a commit waits for the drain\n\nThe offsets were read too early.\n"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (GOOD, ""),
        ("a" * MOST_CHARACTERS + "\n\nbody\n", ""),
        ("a" * (MOST_CHARACTERS + 1) + "\n\nbody\n", "73 characters"),
        ("subject\n", "no body"),
        ("subject\n\n# Please enter the message\n", "no body"),
        ("subject\nnext line\n", "line 2 is not empty"),
        ("# only comments\n", "is empty"),
        ("subject\n\n# ------------------------ >8 ------------------------\ndiff\n", "no body"),
        ("Merge branch 'main'\n", ""),
        (f'Revert "{"a" * 80}"\n', ""),
        ("fixup! subject\n", ""),
    ],
)
def test_a_message_has_a_short_subject_and_a_body(message: str, problem: str) -> None:
    """Comments and the diff that git's editor shows are not part of it."""
    found = "\n".join(problems(message))
    assert problem in found and bool(problem) == bool(found)


def test_ci_runs_the_same_commands_as_people() -> None:
    """`make check` and `make test`, with read rights only and no secret."""
    text = (GITHUB / "workflows" / "ci.yml").read_text()
    workflow = yaml.safe_load(text)
    [job] = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == re.findall(r"^make (?:check|test)\b", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert workflow["permissions"] == {"contents": "read"} and "secrets." not in text


def test_decisions_are_ten_pages_of_the_same_form() -> None:
    """Context, decision and consequences, on one page; the number in the name is that of the title."""
    pages = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    assert len(pages) <= 10
    for page in pages:
        text = page.read_text()
        assert text.startswith(f"# {int(page.name[:4])}. ")
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
        assert text.count("\n") <= 50
