"""One process and two behind one port, each kept on a processor of its own, as `docs/processes.md` describes them.

The broker, the generator and the process that starts the others share the first processor. A single process has the
last one for itself; a second one gets what the broker and the generator leave of the first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

from bench.environment import Bench, pid
from bench.load import Target
from bench.machine import PROC, running_processes
from bench.measured import HEAD, Measured, cells, median_of, table
from bench.produce import SHAPES, produce

ROUNDS = 3
LOADED = ("one", "many")


def pin(root: int, processor: int) -> None:
    """Keep every thread of a process on one processor; threads that it starts later stay there, too."""
    for thread in (PROC / str(root) / "task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {processor})


def below(root: int) -> list[int]:
    """Return the processes that a process has started, in the order of their start."""
    return sorted(one.pid for one in running_processes() if one.parent == root)


class ProcessesTable:
    """Measures, and prints the results."""

    title = "Several processes"
    text = f"""\
Medians of {ROUNDS} rounds in turns. Each process is kept on one processor: broker and generator on the first, one of
Headrace on the last, a second one on the first, too."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.topic = bench.topic("shared")
        self.first, *_, self.last = sorted(os.sched_getaffinity(0))
        self.found: dict[tuple[str, int], list[Measured]] = {}

    def measure(self) -> None:
        """Load one process and two, in turns."""
        everywhere = os.sched_getaffinity(0)
        brokers = [one["pid"] for one in self.bench.cluster.endpoints]
        try:
            os.sched_setaffinity(0, {self.first})  # the generator inherits it
            self.keep(brokers, [self.first])
            for _ in range(ROUNDS):
                for number in (1, 2):
                    self.load(number)
        finally:
            os.sched_setaffinity(0, everywhere)

    def load(self, number: int) -> None:
        process = self.bench.headrace({"processes": number})
        served = below(pid(process)) if number > 1 else [pid(process)]
        self.keep(served, [self.last, self.first])
        for shape in LOADED:
            target = Target(int(process.url.rsplit(":", 1)[1]), pid(process))
            self.found.setdefault((shape, number), []).append(produce(self.bench, target, shape, self.topic))
        process.terminate()

    def keep(self, processes: Iterable[int], processors: list[int]) -> None:
        for one, processor in zip(processes, processors, strict=False):
            pin(one, processor)

    def lines(self) -> list[str]:
        """Return the table; medians of the rounds."""
        rows = []
        for shape in LOADED:
            for number in (1, 2):
                runs, alone = self.found[shape, number], self.found[shape, 1]
                ratio = median_of("rate", runs) / median_of("rate", alone)
                tail = f"{median_of('p99_ms', runs):,.0f}"
                rows.append(f"{SHAPES[shape].title}, `processes: {number}` | {cells(runs)} | {tail} | **{ratio:.2f}**")
        return table(f"workload | {HEAD} | p99 ms | of one process", rows)
