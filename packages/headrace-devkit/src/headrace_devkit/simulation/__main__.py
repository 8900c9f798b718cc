"""Runs a scenario: `python -m headrace_devkit.simulation SCENARIO SEED`; with `--hours`, seeds until time is up.

A problem is printed with its seed, the commit, the last events, and the command that repeats the run.
"""

import argparse
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import headrace
from headrace_devkit.simulation import weights
from headrace_devkit.simulation.mutations import MUTATIONS, Found, found_bugs, keep_found
from headrace_devkit.simulation.points import POINTS
from headrace_devkit.simulation.scenario_runs import SCENARIOS, Report, ScenarioRun, run_many, run_one

_PACKAGE = "headrace_devkit.simulation"
_POINT = re.compile(r'\breach\("([a-z._-]+)"\)')


def main() -> int:
    """Run what the arguments name; return 1 if there is a problem."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # the order of sets of strings is a part of a run
        os.execve(
            sys.executable, [sys.executable, "-m", _PACKAGE, *sys.argv[1:]], {**os.environ, "PYTHONHASHSEED": "0"}
        )
    parser = argparse.ArgumentParser(prog=f"python -m {_PACKAGE}")
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("seed", type=int, help="a number, or the first of several")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--core-seconds", type=float, help="as many seeds as fit into this time of the processor")
    parser.add_argument("--hours", type=float, help="as many seeds as fit into this time")
    parser.add_argument("--jobs", type=int, default=1, help="how many side by side")
    parser.add_argument("--plant", default="", help="a bug that must be found; `all`, or `missing` for those not found")
    parser.add_argument("--keep", action="store_true", help="write what found each bug, for the page of the reference")
    parser.add_argument("--weigh", action="store_true", help="write weights.yaml from what the seeds reach")
    parser.add_argument("--events", type=int, default=0, help="how many of the last events to print in any case")
    options = parser.parse_args()
    if options.seeds == 1 and not options.core_seconds and not options.hours:
        run = run_one(options.scenario, options.seed, options.plant)
        show(run, options.plant, options.events)
        return 1 if run.problems else 0
    if options.plant in ("all", "missing"):
        return find_all(options)
    report = Report()
    began = time.monotonic()
    for run in run_many(options.scenario, seeds(options, report, began), options.jobs, options.plant):
        report.add(run)
        if run.problems or options.events:
            show(run, options.plant, options.events)
    sys.stdout.write(f"{report.text(sorted([*failpoints(), *POINTS]))}\n")
    if options.weigh:
        weights.write(options.scenario, weights.factors_of(report.drawn))
    return 1 if report.failed else 0


def find_all(options: argparse.Namespace) -> int:
    """Run seeds of its scenario with each planted bug until one finds it; return 1 if a bug was not found."""
    found = found_bugs() if options.plant == "missing" else {}
    sys.stdout.write("| Bug | Scenario | Seed | Problem | Core-s |\n|---|---|---|---|---|\n")
    for name, mutation in MUTATIONS.items():
        if name in found:
            continue
        numbers = range(options.seed, options.seed + options.seeds)
        core_seconds, first = 0.0, "none | none"
        for run in run_many(mutation.scenario, numbers, options.jobs, name):
            core_seconds += run.core_seconds
            if run.problems:
                found[name] = Found(run.seed, run.problems[0].kind, round(core_seconds, 1))
                if options.keep:
                    keep_found(found)
                first = f"{run.seed} | {run.problems[0].kind}"
                break
        sys.stdout.write(f"| {name} | {mutation.scenario} | {first} | {core_seconds:.1f} |\n")
        sys.stdout.flush()
    sys.stdout.write(f"\nfound {len(found)} of {len(MUTATIONS)}\n")
    return 0 if len(found) == len(MUTATIONS) else 1


def seeds(options: argparse.Namespace, report: Report, began: float) -> Iterator[int]:
    """Yield seeds while there is time."""
    for seed in itertools.count(options.seed):
        if options.hours and time.monotonic() - began >= options.hours * 3600:
            return
        if options.core_seconds and report.core_seconds >= options.core_seconds:
            return
        if not options.hours and not options.core_seconds and seed >= options.seed + options.seeds:
            return
        yield seed


def show(run: ScenarioRun, mutation: str, events: int) -> None:
    """Print a run."""
    write = sys.stdout.write
    write(f"{run.scenario} seed {run.seed}: digest {run.digest}, {run.seconds:.1f} simulated s\n{run.options}\n")
    if run.problems or events:
        for event in run.last_events[-events:] if events else run.last_events:
            write(f"  {' '.join(map(str, event))}\n")
    for line in run.log if run.problems else ():
        write(f"  log {line}\n")
    for found in run.problems[:5]:
        write(f"PROBLEM at {found.at:.3f} {found.kind}: {found.text}\n")
    if run.problems:
        planted = f" --plant {mutation}" if mutation else ""
        write(f"commit {commit()}; repeat: python -m {_PACKAGE} {run.scenario} {run.seed}{planted}\n")


def commit() -> str:
    """Return the commit of the source, or the version without one."""
    for folder in Path(headrace.__file__).parents:
        head = folder / ".git/HEAD"
        if head.is_file():
            name = head.read_text().strip().removeprefix("ref: ")
            reference = folder / ".git" / name
            return reference.read_text().strip() if reference.is_file() else name
    return "unknown"


def failpoints() -> list[str]:
    """Return every failpoint of the core."""
    folder = Path(headrace.__file__).parent
    return sorted({point for path in folder.rglob("*.py") for point in _POINT.findall(path.read_text())})


if __name__ == "__main__":
    sys.exit(main())
