"""The list of calibration scripts: each runs on the model and on the real broker."""

from collections.abc import Callable
from typing import Any, NamedTuple

from headrace_devkit.simulation.calibration.stages import Stage


class Script(NamedTuple):
    """A script and how its trace is compared."""

    run: Callable[[Stage], None]
    protocols: tuple[str, ...]
    brokers: int
    exact: bool
    """Whether numbers of partitions count; else only how many there are, where Kafka is free to choose."""


SCRIPTS: dict[str, Script] = {}


def script(*protocols: str, brokers: int = 1, exact: bool = False) -> Callable[[Callable[[Stage], None]], Any]:
    """Add a script."""

    def add(run: Callable[[Stage], None]) -> Callable[[Stage], None]:
        SCRIPTS[run.__name__] = Script(run, protocols or ("classic", "consumer"), brokers, exact)
        return run

    return add
