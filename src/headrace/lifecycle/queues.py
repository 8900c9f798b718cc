"""Gauges of queues and budgets, which telemetry publishes."""

from collections.abc import Callable

_gauges: dict[str, Callable[[], float]] = {}


def gauges() -> dict[str, float]:
    """Return the present depth of every named queue and budget: name to number."""
    return {name: read() for name, read in list(_gauges.items())}


def register_gauge(name: str, read: Callable[[], float]) -> None:
    """Publish a depth under a name; the last one registered under a name counts."""
    _gauges[name] = read


def unregister_gauge(name: str) -> None:
    """Take a depth back; a name that is not there is fine."""
    _gauges.pop(name, None)
