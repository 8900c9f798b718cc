"""The levels of loggers of this process. A restart has those of the configuration."""

import logging
from typing import Final

ROOT: Final = "ROOT"


def levels() -> dict[str, int]:
    """Return the levels of the root and of each logger with one of its own, by name."""
    known = logging.getLogger().manager.loggerDict
    own = {name: one.level for name, one in known.items() if isinstance(one, logging.Logger) and one.level}
    return {ROOT: logging.getLogger().level, **dict(sorted(own.items()))}


def names() -> set[str]:
    """Return the names of all loggers, and of the packages that have some."""
    return {ROOT, *logging.getLogger().manager.loggerDict}


def change_level(name: str, level: int) -> None:
    """Set the level of a known logger."""
    logging.getLogger(None if name == ROOT else name).setLevel(level)
