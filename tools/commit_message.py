"""Whether a commit message has a subject of at most 72 characters and a body: `python3 tools/commit_message.py FILE`.

A hook of `.pre-commit-config.yaml`; it needs nothing but Python. Messages that git writes itself are accepted.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

MOST_CHARACTERS: Final = 72
_SCISSORS: Final = "# ------------------------ >8 ------------------------"
_OF_GIT: Final = ("Merge ", 'Revert "', "fixup! ", "squash! ", "amend! ")


def problems(message: str) -> list[str]:
    """Return what is wrong with a message, as sentences with a remedy; comments of git's editor do not count."""
    written = message.partition(_SCISSORS)[0].splitlines()
    lines = "\n".join(line.rstrip() for line in written if not line.startswith("#")).strip("\n").split("\n")
    subject, body = lines[0], lines[1:]
    if subject.startswith(_OF_GIT):
        return []
    if not subject:
        return ["the message is empty: write `area: what`, an empty line, and why"]
    found = []
    if len(subject) > MOST_CHARACTERS:
        found.append(
            f"the subject has {len(subject)} characters: use at most {MOST_CHARACTERS}, and tell the rest below"
        )
    if body and body[0]:
        found.append("line 2 is not empty: put an empty line between subject and body")
    if not any(body):
        found.append("there is no body: say why, what you measured, or what a user sees")
    return found


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]).read_text())
    sys.stderr.writelines(f"commit message: {problem}\n" for problem in found)
    sys.exit(bool(found))
