"""What Headrace counts, and the only door to the metrics library.

Counting is plain dictionaries on the loop, so it costs a batch or a request well under a microsecond; the library is
met when someone reads. Source: Prometheus text format 0.0.4.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.lifecycle import gauges

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
"""Media type of `Metrics.render`."""

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_Labels = tuple[str, ...]


class Metrics(Collector):
    """The numbers of one process; call its methods on the loop, once per batch."""

    def __init__(self) -> None:
        self._records_in = _Counted("headrace_records_in", "Records taken in, by way in", "path")
        self._records_out = _Counted("headrace_records_out", "Records handed on for certain, by way in", "path")
        self._audit = _Counted("headrace_audit_notes", "Notes of the audit by what became of them", "outcome")
        self._deliveries: dict[str, Callable[[], Mapping[str, int]]] = {}
        self._requests: dict[tuple[str, int], _Durations] = defaultdict(_Durations)
        self._lag: dict[_Labels, float] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def records_in(self, path: str, records: int) -> None:
        """Count records that came in; `path` names a way in, such as `produce` or `reactive/orders`."""
        self._records_in.add(records, path)

    def records_out(self, path: str, records: int) -> None:
        """Count records that were acknowledged where they went."""
        self._records_out.add(records, path)

    def audit_notes(self, outcome: str, notes: int) -> None:
        """Count notes of the audit that were `written`, `lost` on the way, or `dropped` for want of room."""
        self._audit.add(notes, outcome)

    def watch_deliveries(self, path: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Show the counts of a delivery pump under its way in; `read` is called whenever somebody looks.

        `taken` and `delivered` are also its records in and out.
        """
        self._deliveries[path] = read

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request; `route` is a pattern, never a path with names in it."""
        self._requests[route, status].add(seconds)

    def lag(self, group: str, topic: str, partition: int, records: int) -> None:
        """Set how many records of a partition a group has not committed."""
        self._lag[group, topic, str(partition)] = records

    def forget_deliveries(self, path: str) -> None:
        """Show the counts of a way in no longer."""
        self._deliveries.pop(path, None)

    def forget_lag(self, group: str) -> None:
        """Show the lag of a group no longer."""
        self._lag = {labels: records for labels, records in self._lag.items() if labels[0] != group}

    def render(self) -> bytes:
        """Return every number in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        for counted, outcome in ((self._records_in, "taken"), (self._records_out, "delivered")):
            family = counted.family()
            for path, read in self._deliveries.items():
                if (records := read().get(outcome)) is not None:
                    family.add_metric((path,), records)
            yield family
        yield self._audit.family()
        yield self._request_family()
        yield self._delivery_family()
        yield _gauge_family(
            "headrace_consumer_lag_records",
            "Records not committed yet",
            ("group", "topic", "partition"),
            self._lag.items(),
        )
        depths = (((name,), value) for name, value in gauges().items())
        yield _gauge_family("headrace_depth", "Present depth of queues and budgets", ("name",), depths)

    def _delivery_family(self) -> Metric:
        family = CounterMetricFamily(
            "headrace_delivery_records", "Records by what became of their delivery", labels=("path", "outcome")
        )
        for path, read in self._deliveries.items():
            for outcome, records in read().items():
                family.add_metric((path, outcome), records)
        return family

    def _request_family(self) -> Metric:
        family = HistogramMetricFamily(
            "headrace_http_request_seconds", "Time to the end of the answer", labels=("route", "status")
        )
        for (route, status), durations in self._requests.items():
            family.add_metric((route, str(status)), list(durations.buckets()), durations.sum_seconds)
        return family


class _Counted:
    """A counter with labels."""

    def __init__(self, name: str, text: str, *labels: str) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._values: dict[_Labels, int] = defaultdict(int)

    def add(self, amount: int, *labels: str) -> None:
        self._values[labels] += amount

    def family(self) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, value in self._values.items():
            family.add_metric(labels, value)
        return family


class _Durations:
    """How many durations fell below each limit."""

    __slots__ = ("_counts", "sum_seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self.sum_seconds = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self.sum_seconds += seconds

    def buckets(self) -> Iterator[tuple[str, float]]:
        total = 0
        for limit, count in zip((*map(str, _SECONDS), "+Inf"), self._counts, strict=True):
            total += count
            yield limit, total


def _gauge_family(name: str, text: str, labels: _Labels, values: Iterable[tuple[_Labels, float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family
