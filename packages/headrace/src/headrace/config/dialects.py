"""Configurations of other products, read in place of `headrace.yaml`: which there are, and which one a path has."""

from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Final

from headrace.config.dialect import Dialect
from headrace.extras import kinds_of_guests, points_of

GROUP: Final = "headrace.config.dialects"
"""The group of entry points by which another package registers a dialect: `NAME = "package.module:Class"`."""


def registered(points: Iterable[EntryPoint]) -> Sequence[Dialect]:
    """Return the dialects of entry points.

    Raises:
        EnvironmentProblem: An entry point cannot be loaded, or is not a dialect.
    """
    return [kind() for kind in kinds_of_guests(points, Dialect, "dialect")]


DIALECTS: Final = registered(points_of(GROUP))
"""The first that recognises a path reads it; looked for once per process."""


def dialect_of(path: Path | None) -> Dialect | None:
    """Return the dialect of what a path names; None for a `headrace.yaml`, or without a path."""
    return next((each for each in DIALECTS if path and each.recognises(path)), None)
