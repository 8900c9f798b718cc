"""Counts which rare branches of the core a run takes: those of `points.yaml`, and the failpoints of the core.

A count is planted before each statement that the file names, so the core has no line for it.
"""

import contextlib
import functools
import gc
from collections import defaultdict
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Final, NamedTuple

import yaml

from headrace_devkit.simulation.mutations import code_with, replace_code

_COUNT: Final = "count_point"


class Point(NamedTuple):
    """A branch of the core."""

    file: str
    at: str
    """Where its statement begins."""
    when: str = "True"
    """An expression there: whether it counts."""


POINTS: Final[Mapping[str, Point]] = {
    name: Point(**row) for name, row in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}
_counting: list[MutableMapping[str, int]] = []


@functools.cache  # they stay
def plant_points() -> None:
    """Have the functions of this process count."""
    gc.unfreeze()  # what is frozen is not listed
    for file, replacements in changes().items():
        for function in replace_code(file, code_with(file, replacements)):
            function.__globals__[_COUNT] = _count


def changes() -> Mapping[str, Mapping[str, str]]:
    """Return by file what each statement becomes."""
    counted: dict[str, dict[str, str]] = defaultdict(dict)
    for name, point in POINTS.items():
        there = counted[point.file].get(point.at, point.at)
        counted[point.file][point.at] = f"{_COUNT}({name!r}, {point.when}); {there}"
    return counted


@contextlib.contextmanager
def counted_in(counts: MutableMapping[str, int]) -> Iterator[None]:
    """Count in this table, as `reach NAME`."""
    _counting.append(counts)
    try:
        yield
    finally:
        _counting.pop()


def _count(name: str, is_reached: bool) -> None:
    if is_reached and _counting:
        _counting[-1][f"reach {name}"] += 1
