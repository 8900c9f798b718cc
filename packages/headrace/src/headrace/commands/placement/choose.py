"""Chooses the processes that run each consumer: pure, and the same for every process with the same arguments.

Rendezvous hashing ranks the processes for each consumer. A process that is full is passed over (bounded loads), and so
is a zone that already has the consumer, until every zone has it. What was chosen before stays while it can.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Final, NamedTuple

ChosenProcesses = Mapping[str, Sequence[str]]
"""The names of the processes of each consumer."""

_PLANNED: Final = 0.6
"""Part of a process's cores that is planned; the rest is for the loss of others."""
_KEPT: Final = 0.8
"""Up to this part of its cores a process keeps what it has."""
_THREADS: Final = 1.35
"""Most threads of a process, in relation to the mean."""


class PlacedProcess(NamedTuple):
    """A process that can run consumers."""

    name: str
    zone: str = ""
    cores: float = 1.0
    is_away: bool = False
    """Then it keeps what it has, and gets nothing new."""


class PlacedConsumer(NamedTuple):
    """A consumer and what it takes."""

    name: str
    copies: int = 2
    """Processes that run it."""
    cores: float = 0.0
    """What it takes in all its processes together."""
    threads: int = 6
    """What it takes in each."""
    known_by: Collection[str] = ()
    """The processes that can run it; empty for all."""


def choose(
    consumers: Iterable[PlacedConsumer], processes: Iterable[PlacedProcess], before: ChosenProcesses | None = None
) -> dict[str, tuple[str, ...]]:
    """Return the processes of each consumer, the best first; fewer than its copies only if fewer processes are there.

    Large consumers come first. `before` is what was chosen the last time.
    """
    consumers = sorted(consumers, key=lambda one: (-one.cores, -one.threads, one.name))
    loads = _Loads({one.name: one for one in processes}, consumers)
    before = before or {}
    chosen = {one.name: loads.keep(one, before.get(one.name, ())) for one in consumers}
    for one in consumers:
        loads.fill(one, chosen[one.name], before.get(one.name, ()))
    return {one.name: tuple(sorted(chosen[one.name], key=lambda name: _rank(one.name, name))) for one in consumers}


def _rank(consumer: str, process: str) -> bytes:
    return blake2b(f"{consumer}\0{process}".encode(), digest_size=8).digest()


class _Loads:
    """What each process has by now."""

    def __init__(self, processes: Mapping[str, PlacedProcess], consumers: Sequence[PlacedConsumer]) -> None:
        self._processes = processes
        self._zones = {one.zone for one in processes.values()}
        self._able: dict[str, Collection[str]] = {
            one.name: {name: None for name in one.known_by if name in processes} if one.known_by else processes
            for one in consumers
        }
        """By consumer: the processes that can run it."""
        self._cores = dict.fromkeys(processes, 0.0)
        self._threads = dict.fromkeys(processes, 0)
        mean = sum(one.threads * self._copies(one) for one in consumers) / max(1, len(processes))
        largest = max((one.threads for one in consumers), default=0)
        self._most_threads = max(_THREADS * mean, mean + 2 * largest)  # of a few consumers zones matter more

    def keep(self, consumer: PlacedConsumer, names: Sequence[str]) -> list[str]:
        """Return what stays of an earlier choice: not what is gone, too full, or in a zone of another copy."""
        kept: list[str] = []
        able = self._able[consumer.name]
        for name in names:
            may_stay = name in able and name not in kept and len(kept) < self._copies(consumer)
            if may_stay and self._fits(consumer, name, _KEPT):
                zones = self._open_zones(able, kept)
                if self._processes[name].zone in zones or not self._fitting(consumer, kept, able, zones):
                    self._take(consumer, name, kept)
        return kept

    def fill(self, consumer: PlacedConsumer, chosen: list[str], before: Sequence[str]) -> None:
        """Add processes until there are enough: by rank, in another zone if one there has capacity.

        Those that had it come first; else, where all are full, consumers would move each time.
        """
        missing = self._copies(consumer) - len(chosen)
        able = {*(self._able[consumer.name] if missing else ())}.difference(chosen)
        here = [name for name in able if name in before or not self._processes[name].is_away]
        ranked = sorted(here, key=lambda name: (name not in before, _rank(consumer.name, name)))
        for _ in range(min(missing, len(ranked))):
            fitting = self._fitting(consumer, chosen, ranked, self._open_zones(able, chosen))
            fitting = fitting or self._fitting(consumer, chosen, ranked, self._zones)
            others = [name for name in ranked if name not in chosen]
            self._take(consumer, fitting or min(others, key=self._load), chosen)

    def _copies(self, consumer: PlacedConsumer) -> int:
        return min(consumer.copies, len(self._able[consumer.name]))

    def _open_zones(self, able: Collection[str], chosen: Sequence[str]) -> Collection[str]:
        """Return the zones that have the fewest of the chosen processes, and others that can run it."""
        taken = Counter(self._processes[name].zone for name in chosen)
        free = {self._processes[name].zone for name in able if name not in chosen}
        least = min((taken[zone] for zone in free), default=0)
        return {zone for zone in free if taken[zone] == least}

    def _fitting(
        self, consumer: PlacedConsumer, chosen: Sequence[str], names: Iterable[str], zones: Collection[str]
    ) -> str | None:
        """Return the first process in these zones with capacity for it."""
        free = (name for name in names if name not in chosen and self._processes[name].zone in zones)
        return next((name for name in free if self._fits(consumer, name, _PLANNED)), None)

    def _fits(self, consumer: PlacedConsumer, name: str, part: float) -> bool:
        cores = self._cores[name] + consumer.cores / self._copies(consumer)
        threads = self._threads[name] + consumer.threads
        return cores <= part * self._processes[name].cores and threads <= self._most_threads

    def _load(self, name: str) -> tuple[float, int, str]:
        return self._cores[name] / self._processes[name].cores, self._threads[name], name

    def _take(self, consumer: PlacedConsumer, name: str, chosen: list[str]) -> None:
        self._cores[name] += consumer.cores / self._copies(consumer)
        self._threads[name] += consumer.threads
        chosen.append(name)
