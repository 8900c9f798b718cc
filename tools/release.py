"""Makes what a release consists of, into build/release: `make release`. It uploads nothing.

Wheels and sdists are of the present commit. Components and licences are those of the environment the tests run in
(`.venv`, by requirements.lock), without what only developers install.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "build" / "release"
TOOLS = ROOT / ".venv-release" / "bin"
PACKAGES = sorted(ROOT.glob("packages/*"))
OF_DEVELOPERS = {"testing", "demo"}
"""Extras whose packages do not run where Headrace runs."""


def main() -> None:
    """Check the tree, then build and check every file of the release."""
    projects = [tomllib.loads((folder / "pyproject.toml").read_text())["project"] for folder in PACKAGES]
    version = projects[0]["version"]
    if problem := problem_of_tree(version):
        raise SystemExit(f"no release of {version}: {problem}")
    shutil.rmtree(TARGET, ignore_errors=True)
    time = _output("git", "log", "-1", "--format=%ct").strip()
    for folder in PACKAGES:
        _run(TOOLS / "python", "-m", "build", "--outdir", TARGET, folder, SOURCE_DATE_EPOCH=time)
    _run(TOOLS / "twine", "check", "--strict", *TARGET.iterdir())
    needed = components(projects)
    _write_components(needed)
    listed = (
        "--python",
        sys.executable,
        "--with-system",
        "--with-urls",
        "--format=markdown",
        "--packages",
        *sorted(needed),
    )
    _run(TOOLS / "pip-licenses", *listed, "--output-file", TARGET / "licences.md")
    sys.stdout.write("".join(f"{path.stat().st_size:>10,}  {path.relative_to(ROOT)}\n" for path in _made()))


def problem_of_tree(version: str) -> str:
    """Return why the present tree cannot be released; empty if it can."""
    if changed := _output("git", "status", "--porcelain"):
        return f"commit or remove what has changed:\n{changed}"
    if notes := [path.name for path in (ROOT / "changes").glob("*.md") if path.name != "README.md"]:
        return f"run `make notes`, because changes/ has {', '.join(notes)}"
    newest = re.search(r"^## (\S+) \(", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not newest or newest[1] != version:
        return f"the newest notes of CHANGELOG.md are those of {newest[1] if newest else 'no version'}"
    return ""


def components(projects: Sequence[dict[str, Any]]) -> set[str]:
    """Return the packages that run where Headrace runs, with all its extras, as far as they are installed here."""
    own = {project["name"] for project in projects}
    extras = [item for project in projects for item in project.get("optional-dependencies", {}).items()]
    lists = [project["dependencies"] for project in projects]
    lists += [needs for extra, needs in extras if extra not in OF_DEVELOPERS]
    waiting = [Requirement(need) for needs in lists for need in needs]
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        for extra in ("", *need.extras):
            if (name, extra) in seen or name in own:
                continue
            seen.add((name, extra))
            try:
                below = map(Requirement, distribution(name).requires or ())
            except PackageNotFoundError:
                sys.stderr.write(f"not in the lists, because it is not installed here: {name}\n")
                continue
            found.add(name)
            waiting += [each for each in below if not each.marker or each.marker.evaluate({"extra": extra})]
    return found


def _write_components(needed: set[str]) -> None:
    """Write the list of components: CycloneDX lists the whole environment, of which the rest is removed."""
    path = TARGET / "components.cdx.json"
    of_project = ("--pyproject", PACKAGES[0] / "pyproject.toml", "--output-reproducible", "--output-file", path)
    _run(TOOLS / "cyclonedx-py", "environment", *of_project, sys.executable)
    document = json.loads(path.read_text())
    document["components"] = [each for each in document["components"] if canonicalize_name(each["name"]) in needed]
    kept = {each["bom-ref"] for each in [*document["components"], document["metadata"]["component"]]}
    document["dependencies"] = [
        {**each, "dependsOn": [ref for ref in each["dependsOn"] if ref in kept]} if "dependsOn" in each else each
        for each in document["dependencies"]
        if each["ref"] in kept
    ]
    path.write_text(json.dumps(document, indent=2) + "\n")


def _made() -> list[Path]:
    return sorted(TARGET.iterdir())


def _output(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _run(*command: str | Path, **variables: str) -> None:
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | variables)


if __name__ == "__main__":
    main()
