"""Configurations of other products, read in place of `headrace.yaml`: which there are, and which one a path has."""

from pathlib import Path
from typing import Final

from headrace.config.dialect import Dialect
from headrace.extras import kinds_of_guests

GROUP: Final = "headrace.config.dialects"
"""The group of entry points by which another package registers a dialect: `NAME = "package.module:Class"`."""


def dialect_of(path: Path | None) -> Dialect | None:
    """Return the first dialect that recognises a path; None for a `headrace.yaml`, however it is called.

    A file whose name ends with `.yaml` asks none of them, because loading them takes time at each start.

    Raises:
        EnvironmentProblem: An entry point cannot be loaded, or is not a dialect.
    """
    if path is None or (path.suffix == ".yaml" and path.is_file()):
        return None
    kinds = kinds_of_guests(GROUP, Dialect, "dialect")
    return next((one for one in (kind() for kind in kinds) if one.recognises(path)), None)
