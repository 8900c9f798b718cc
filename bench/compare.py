"""Two states of the source in turns, measured by the same code on the same broker: the ratio of their medians.

usage: python -m bench --compare REV [--rounds 5] [--rows produce,push] [--scale 0.3]
"""

from __future__ import annotations

import compileall
import contextlib
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.active import READ_RECORDS, ActiveTable
from bench.dead_letters import redrive
from bench.environment import ROOT, Bench, sources_of
from bench.function import ECHO, function
from bench.load import NAME
from bench.measured import Measured, median_of, table
from bench.produce import produce
from bench.push import SINGLES, push
from bench.replay import replay

TARGET = 0.95
OUTPUTS = 0.3
"""Share of the records of a run that a function takes which writes each of them."""
BEFORE, NOW = "before", "now"
Runs = dict[tuple[str, str], list[Measured]]


def producing(shape: str) -> Callable[[Bench], Measured]:
    def run(bench: Bench) -> Measured:
        with bench.serving({}) as target:
            return produce(bench, target, shape, bench.topic("http"))

    return run


def pushing(bench: Bench) -> Measured:
    return push(bench, bench.full(bench.records), bench.records, "status")


def pushing_singles(bench: Bench) -> Measured:
    records = int(bench.records * SINGLES)
    return push(bench, bench.full(records), records, "single", ordering="none")


def reading(bench: Bench, mode: str = "json") -> Measured:
    return ActiveTable(bench).read(mode, bench.full(READ_RECORDS, "produce-kb"), READ_RECORDS)


def writing(bench: Bench, **attributes: str) -> Measured:
    records = int(bench.records * OUTPUTS)
    outputs = bench.topic("outputs")
    return function(bench, bench.full(records), records, 2, ECHO, outputTopic=outputs, **attributes)


ROWS: dict[str, Callable[[Bench], Measured]] = {
    "produce": producing("many"),
    "produce-single": producing("one"),
    "produce-raw": producing("raw"),
    "push": pushing,
    "push-single": pushing_singles,
    "function": lambda bench: function(bench, bench.full(bench.records), bench.records),
    "function-2": lambda bench: function(bench, bench.full(bench.records), bench.records, workers=2),
    "output": writing,
    "exactly-once": lambda bench: writing(bench, delivery="exactly_once"),
    "active": reading,
    "active-binary": lambda bench: reading(bench, "binary"),
    "redrive": redrive,
    "replay": lambda bench: replay(bench, bench.full(bench.records), bench.records),
}


def compare(bench: Bench, revision: str, rows: list[str], rounds: int) -> None:
    """Measure both in turns and print the table."""
    runs: Runs = {}
    with checked_out(revision, bench.folder / "before") as before:
        sources = {BEFORE: before, NOW: sources_of(ROOT)}
        for turn in range(rounds):
            for row in rows:
                for name in (BEFORE, NOW) if turn % 2 else (NOW, BEFORE):
                    bench.sources = sources[name]
                    got = ROWS[row](bench)
                    runs.setdefault((row, name), []).append(got)
                    figures = f"{got.rate:,.0f} per s, {got.cpu_us:.1f} us, stolen {got.stolen:.0%}"
                    print(f"round {turn + 1} of {rounds}, {row}, {name}: {figures}", flush=True)
    print("\n".join(lines(revision, rows, runs)))


@contextlib.contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[list[Path]]:
    """Yield the folders with the packages of a commit, in a git worktree that is removed at the end."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(folder), revision], cwd=ROOT, check=True)
    try:
        sources = sources_of(folder)
        declare(folder, sources[0])
        for native in folder.glob("packages/*/native"):
            words = [sys.executable, "-c", "import setuptools; setuptools.setup()", "build_ext", "--inplace"]
            subprocess.run(words, cwd=native.parent, check=True, capture_output=True)
        for source in sources:
            compileall.compile_dir(source, quiet=2)
        yield sources
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=ROOT, check=True)


def declare(folder: Path, source: Path) -> None:
    """Write what the packages of a tree register into its source: what is installed is of the present tree.

    Python takes the first distribution of a name. So one that the tree does not have is there, and registers nothing.
    """
    projects = [tomllib.loads(path.read_text())["project"] for path in projects_of(folder)]
    groups = {project["name"]: project.get("entry-points", {}) for project in projects}
    for path in projects_of(ROOT):
        groups.setdefault(tomllib.loads(path.read_text())["project"]["name"], {})
    for name, found in groups.items():
        about = source / f"{name.replace('-', '_')}-0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
        rows = [
            [f"[{group}]", *(f"{key} = {where}" for key, where in entries.items())] for group, entries in found.items()
        ]
        (about / "entry_points.txt").write_text("\n".join(line for group in rows for line in group))


def projects_of(folder: Path) -> list[Path]:
    return [
        path
        for path in (folder / "pyproject.toml", *folder.glob("packages/*/pyproject.toml"))
        if "[project]" in path.read_text()
    ]


def lines(revision: str, rows: list[str], runs: Runs) -> list[str]:
    """Return the table: medians, and now divided by before."""
    found = []
    for row in rows:
        before, now = runs[row, BEFORE], runs[row, NOW]
        ratio = median_of("rate", now) / median_of("rate", before)
        cpu = median_of("cpu_us", now) / median_of("cpu_us", before)
        each = " | ".join(f"{median_of('rate', one):,.0f} | {median_of('cpu_us', one):.1f}" for one in (before, now))
        stolen, load = (max(getattr(run, field) for run in (*before, *now)) for field in ("stolen", "load"))
        each_round = [one.rate / other.rate for one, other in zip(now, before, strict=True)]
        spread = f"{min(each_round):.2f} to {max(each_round):.2f}"
        verdict = "" if ratio >= TARGET else f" below {TARGET}"
        found.append(f"{row} | {each} | **{ratio:.2f}**{verdict} | {spread} | {cpu:.2f} | {load:.0%} | {stolen:.0%}")
    head = (
        f"row | {revision} per s | processor us each | now per s | processor us each | ratio (>= {TARGET}) | by round"
    )
    count = len(next(iter(runs.values())))
    text = (
        f"Medians of {count} rounds in turns; requests are sent by {NAME}; generator and stolen: the largest of a run."
    )
    return [text, "", *table(f"{head} | ratio of processor time | generator | stolen", found)]
