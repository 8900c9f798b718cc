"""Gauges of queues, budgets and states, which telemetry publishes."""

from collections.abc import Callable, Mapping
from typing import NamedTuple


class GaugeKey(NamedTuple):
    """One gauge: the name of its metric, and its labels."""

    metric: str
    """A name in `headrace.telemetry.metrics`."""
    labels: tuple[tuple[str, str], ...] = ()
    """Names and values, sorted by name."""


_gauges: dict[GaugeKey, Callable[[], float]] = {}


def gauges() -> Mapping[GaugeKey, float]:
    """Return the present value of every registered gauge."""
    return {key: read() for key, read in list(_gauges.items())}


def register_gauge(metric: str, read: Callable[[], float], **labels: str) -> None:
    """Publish a value under a metric's name; a second registration with the same labels replaces the first."""
    _gauges[GaugeKey(metric, tuple(sorted(labels.items())))] = read


def unregister_gauge(metric: str, **labels: str) -> None:
    """Publish a value no longer; does nothing if it is not registered."""
    _gauges.pop(GaugeKey(metric, tuple(sorted(labels.items()))), None)
