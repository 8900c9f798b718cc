"""Runs scenarios by seed, each in a process of its own, and adds up what was tried and what was found."""

import gc
import importlib
import itertools
import logging
import multiprocessing
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from headrace_devkit.simulation.mutations import plant
from headrace_devkit.simulation.points import plant_points
from headrace_devkit.simulation.seams import import_all
from headrace_devkit.simulation.weights import Drawn
from headrace_devkit.simulation.world import FirstProblem, Problem, World

SCENARIOS: Mapping[str, str] = {
    "active": "headrace_devkit.simulation.active_scenario:active",
    "control": "headrace_devkit.simulation.control_scenario:control",
    "exactly-once": "headrace_devkit.simulation.exactly_once_scenario:exactly_once",
    "functions": "headrace_devkit.simulation.functions_scenario:functions",
    "keys": "headrace_devkit.simulation.keys_scenario:keys",
    "placement": "headrace_devkit.simulation.placement_scenario:placement",
    "push": "headrace_devkit.simulation.push_scenario:push",
    "redrive": "headrace_devkit.simulation.redrive_scenario:redriving",
    "replay": "headrace_devkit.simulation.replay_scenario:replaying",
    "live-control": "headrace_devkit.simulation.live_control_scenario:live_control",
    "transactions": "headrace_devkit.simulation.transaction_scenario:transactions",
    "same-record-at-two": "headrace_devkit.simulation.peer_scenarios:same_record_at_two",
    "failing-record-bounces": "headrace_devkit.simulation.peer_scenarios:failing_record_bounces",
    "drained-partition-resumes": "headrace_devkit.simulation.peer_scenarios:drained_partition_resumes",
    "failures-cross-a-commit": "headrace_devkit.simulation.peer_scenarios:failures_cross_a_commit",
}
"""By name, the function of a world that runs it; it returns what its seed has decided."""
FAULTS = ("kill", "stop", "pause", "cut", "jump", "broker", "away", "shrink")
_LAST_EVENTS = 40
_LAST_LINES = 30
_SEEDS_OF_A_PROCESS = 25
"""More would need more memory: what a process of a run has begun is never collected."""
_ended: list[World] = []
"""Kept, because their threads wait for ever: were they collected, they would do what they do finally."""


class ScenarioRun(NamedTuple):
    """What one seed did."""

    scenario: str
    seed: int
    digest: str
    options: Any
    """What it has decided of the run; a tuple with names, in most scenarios."""
    problems: list[Problem]
    counts: dict[str, int]
    """How often each event happened, and each failpoint was reached."""
    seconds: float
    """Simulated."""
    core_seconds: float
    last_events: list[tuple[Any, ...]]
    log: list[str]
    """The last lines of the log."""


class _LastLines(logging.Handler):
    """Keeps the last lines of all processes."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self.lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = self._world.current
        name = process.name if process else ""
        self.lines.append(f"{self._world.now:.3f} {name} {record.levelname} {record.getMessage()}")


def run_one(scenario: str, seed: int, mutation: str = "") -> ScenarioRun:
    """Run one seed in this process; what a scenario raises is a problem, too. A planted bug stays in the process."""
    module, _, name = SCENARIOS[scenario].partition(":")
    call = getattr(importlib.import_module(module), name)
    import_all()
    plant_points()
    if mutation:
        plant(mutation)
    world = World(seed)
    if mutation:
        world.end_at_problem()
    lines = _LastLines(world)
    root = logging.getLogger()
    root.handlers = [lines]
    root.setLevel(logging.INFO)
    began, options = time.process_time(), None
    collects = gc.isenabled()
    gc.disable()  # what it would call back, and when, depends on what the process did before
    try:
        options = call(world)
    except FirstProblem:
        lines.lines.append("the run ended at its first problem")
    except Exception as cause:  # noqa: BLE001 boundary: the run ends, and its report names the error
        lines.lines.extend(traceback.format_exc().splitlines()[-12:])
        world.problem("ERROR", f"{type(cause).__name__}: {cause}")
    if collects:
        gc.enable()
    core_seconds = time.process_time() - began
    _ended.append(world)
    events = world.trace[-_LAST_EVENTS:]
    world.end()
    counts = dict(world.counts)
    return ScenarioRun(
        scenario, seed, world.digest, options, world.problems, counts, world.now, core_seconds, events, [*lines.lines]
    )


def _run(task: tuple[str, int, str]) -> ScenarioRun:
    run = run_one(*task)
    gc.collect()
    gc.freeze()
    return run


def run_many(scenario: str, seeds: Iterable[int], jobs: int = 1, mutation: str = "") -> Iterator[ScenarioRun]:
    """Run many seeds, this many side by side, in processes that have imported everything already.

    A process runs some seeds, one after the other, and then a new process is started.
    """
    importlib.import_module(SCENARIOS[scenario].partition(":")[0])
    import_all()
    plant_points()
    gc.collect()
    gc.freeze()
    tasks = ((scenario, seed, mutation) for seed in seeds)
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=_SEEDS_OF_A_PROCESS) as pool:
        # A pool takes all seeds at once; so each next one is taken when a result has been used.
        begun = deque(pool.apply_async(_run, (task,)) for task in itertools.islice(tasks, 2 * jobs))
        while begun:
            yield begun.popleft().get()
            begun.extend(pool.apply_async(_run, (task,)) for task in itertools.islice(tasks, 1))


class Report:
    """What many seeds did together."""

    def __init__(self) -> None:
        self.runs = 0
        self.seconds = 0.0
        self.core_seconds = 0.0
        self.counts: Counter[str] = Counter()
        self.failed: list[ScenarioRun] = []
        self.drawn: list[Drawn] = []
        """Of the runs whose options have names."""

    def add(self, run: ScenarioRun) -> None:
        self.runs += 1
        self.seconds += run.seconds
        self.core_seconds += run.core_seconds
        self.counts.update(run.counts)
        if run.problems:
            self.failed.append(run)
        if hasattr(run.options, "_asdict"):
            drawn = {option: str(value) for option, value in run.options._asdict().items()}
            points = frozenset(name for name in run.counts if name.startswith("reach "))
            self.drawn.append(Drawn(drawn, points, run.core_seconds))

    def text(self, points: Iterable[str]) -> str:
        """Return the sums; `points` are those that exist: failpoints of the core, and those of `points.yaml`."""
        counts = self.counts
        faults = ", ".join(f"{name} {counts[name]:,}" for name in FAULTS if counts[name])
        reached = {name.removeprefix("reach "): count for name, count in counts.items() if name.startswith("reach ")}
        missed = [point for point in points if point not in reached]
        rare = sorted(reached, key=lambda point: reached[point])[:12]
        lines = [
            f"{len(self.failed)} problems in {self.runs:,} seeds",
            f"{self.seconds:,.0f} simulated s in {self.core_seconds:,.1f} core-s",
            f"{counts['rebalance']:,} rebalances, {counts['arrived']:,} deliveries of records, "
            f"{counts['commit']:,} commits of a partition",
            f"faults: {faults or 'none'}",
            f"points reached: {len(reached)}; rarest {', '.join(f'{point} {reached[point]:,}' for point in rare)}",
            f"points not reached: {', '.join(missed) or 'none'}",
        ]
        return "\n".join(lines)
