"""How often each value of an option is drawn: more often, the more rare points of the core it reaches in a time.

`weights.yaml` is written by `--weigh` from the runs of many seeds, so what a seed draws changes with the file only.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import yaml

_FILE: Final = Path(__file__).with_suffix(".yaml")
_LEAST, _MOST = 0.8, 2.0
_RARE: Final = 0.25
"""What fewer of the runs reach is rare."""
_HEAD: Final = "# Factors of the weights of options, by scenario, option and value: written by `--weigh`.\n"

Factors = Mapping[str, Mapping[str, float]]


class Drawn(NamedTuple):
    """What a run has drawn and reached."""

    options: Mapping[str, str]
    points: frozenset[str]
    core_seconds: float


def weighed(scenario: str, weights: Mapping[str, Mapping[Any, float]]) -> dict[str, dict[Any, float]]:
    """Return the weights of a scenario's options with their factors."""
    factors: Factors = _read().get(scenario, {})
    return {
        option: {value: weight * factors.get(option, {}).get(str(value), 1.0) for value, weight in values.items()}
        for option, values in weights.items()
    }


def factors_of(runs: Sequence[Drawn]) -> dict[str, dict[str, float]]:
    """Return a factor for each value: the worth of its runs per core-second, compared with that of all runs.

    A rare point is worth 1, which the runs that reach it share; so what few runs reach is worth most to each.
    """
    reached = Counter(point for run in runs for point in run.points)
    shared = {point: count for point, count in reached.items() if count <= _RARE * len(runs)}
    worth: dict[tuple[str, str], float] = defaultdict(float)
    cost: dict[tuple[str, str], float] = defaultdict(float)
    for run in runs:
        for choice in (("", ""), *run.options.items()):
            worth[choice] += sum(1 / shared[point] for point in run.points if point in shared)
            cost[choice] += run.core_seconds
    mean = worth.pop(("", "")) / cost["", ""]
    factors: dict[str, dict[str, float]] = defaultdict(dict)
    for (option, value), of_value in sorted(worth.items()):
        factors[option][value] = round(min(_MOST, max(_LEAST, of_value / cost[option, value] / mean)), 2)
    return dict(factors)


def write(scenario: str, factors: Factors) -> None:
    """Keep the factors of a scenario, and those of the others."""
    content = yaml.safe_dump({**_read(), scenario: {option: dict(values) for option, values in factors.items()}})
    _FILE.write_text(_HEAD + content)


def _read() -> dict[str, Factors]:
    return yaml.safe_load(_FILE.read_text()) or {}
