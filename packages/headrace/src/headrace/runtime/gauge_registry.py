"""Gauges of queues, budgets and states, and histograms of durations, which telemetry publishes."""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

BUCKET_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds of the buckets of a histogram."""


class DurationHistogram:
    """Counts durations by bucket."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKET_SECONDS) + 1)
        """Durations in each bucket; the last one has those above every bound."""
        self.seconds = 0.0
        """The sum of all durations."""

    def add(self, seconds: float, times: int = 1) -> None:
        self.counts[bisect_left(BUCKET_SECONDS, seconds)] += times
        self.seconds += seconds * times


Measured = float | DurationHistogram


class GaugeKey(NamedTuple):
    """One gauge: the name of its metric, and its labels."""

    metric: str
    """A name in `headrace.runtime.telemetry.metrics`."""
    labels: tuple[tuple[str, str], ...] = ()
    """Names and values, sorted by name."""


_gauges: dict[GaugeKey, Callable[[], Measured]] = {}


def gauges() -> Mapping[GaugeKey, Measured]:
    """Return the present value of every registered gauge."""
    return {key: read() for key, read in list(_gauges.items())}


def register_gauge(metric: str, read: Callable[[], Measured], **labels: str) -> None:
    """Publish a value under a metric's name; a second registration with the same labels replaces the first."""
    _gauges[GaugeKey(metric, tuple(sorted(labels.items())))] = read


def unregister_gauge(metric: str, **labels: str) -> None:
    """Stop publishing a value; does nothing if it is not registered."""
    _gauges.pop(GaugeKey(metric, tuple(sorted(labels.items()))), None)
