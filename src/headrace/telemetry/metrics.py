"""Counts what Headrace does, and shows it in the words of the catalogue.

Counting is plain dictionaries on the loop, so it costs a batch or a request well under a microsecond; the metrics
library runs only when `/metrics` is read. Source: Prometheus text format 0.0.4.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.lifecycle import gauges
from headrace.records import TopicPartition
from headrace.telemetry.catalogue import BY_NAME, CATALOGUE

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
"""Media type of `Metrics.render`."""

_SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_Labels = tuple[str, ...]
_ENDED: Final = "headrace_ended_records_total"
_REQUESTS: Final = "headrace_http_request_seconds"
_BREAKER: Final = "headrace_breaker_open"

DELIVERY_COUNTS: Final[Mapping[str, tuple[str, _Labels]]] = {
    "taken": ("headrace_received_records_total", ()),
    "delivered": (_ENDED, ("delivered",)),
    "delegated": (_ENDED, ("delegated",)),
    "dead_letters": (_ENDED, ("dead_letter",)),
    "delayed": (_ENDED, ("retry_topic",)),
    "skipped": (_ENDED, ("skipped",)),
    "skipped_by_hand": (_ENDED, ("skipped_by_operator",)),
    "given_up": (_ENDED, ("discarded",)),
    "redeliveries": ("headrace_redelivered_records_total", ()),
    "refusals": ("headrace_refused_deliveries_total", ()),
    "gap": ("headrace_gap_offsets_total", ()),
    "spared": ("headrace_ended_before_records_total", ()),
    "abandoned": ("headrace_abandoned_records_total", ()),
    "late": ("headrace_late_records_total", ()),
    "open": ("headrace_open_records", ()),
    "breaker_open": (_BREAKER, ()),
    "read": ("headrace_received_records_total", ()),
    "corrupt": ("headrace_corrupt_records_total", ()),
    "tombstone": ("headrace_tombstone_records_total", ()),
}
"""The name of a count of a pump or a flow: its metric, and its labels after `kind` and `consumer`."""


class Metrics(Collector):
    """The numbers of one process; call its methods on the loop, once per batch."""

    def __init__(self) -> None:
        self._requested_records = 0
        self._acknowledged_records = 0
        self._audit: Counter[str] = Counter()
        self._deliveries: dict[tuple[str, str], list[Callable[[], Mapping[str, int]]]] = defaultdict(list)
        self._requests: dict[tuple[str, int], _Durations] = defaultdict(_Durations)
        self.lag_of: Callable[[], Iterable[tuple[str, TopicPartition, int]]] = tuple
        """Returns group, partition and lag in records, as far as it is known; called when `/metrics` is read."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def produced(self, requested_records: int, acknowledged_records: int) -> None:
        """Count the records of a produce request, and those of them that Kafka acknowledged."""
        self._requested_records += requested_records
        self._acknowledged_records += acknowledged_records

    def audit_notes(self, outcome: str, notes: int) -> None:
        """Count notes of the audit that were `written`, `lost` on the way, or `dropped` because the queue was full."""
        self._audit[outcome] += notes

    def watch_deliveries(self, kind: str, consumer: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Show the counts of a pump or a flow; several of one consumer are added up.

        Args:
            kind: `reactive`, `function` or `pipeline`.
            consumer: Its name.
            read: Returns the counts; called when `/metrics` is read.
        """
        self._deliveries[kind, consumer].append(read)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request; `route` is a pattern, never a path with names in it."""
        self._requests[route, status].add(seconds)

    def forget_deliveries(self, kind: str, consumer: str) -> None:
        """Show the counts of a consumer no longer."""
        self._deliveries.pop((kind, consumer), None)

    def render(self) -> bytes:
        """Return every number in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        samples = self._samples()
        for spec in CATALOGUE:
            family: Metric
            if spec.name == _REQUESTS:
                yield self._request_family()
                continue
            if spec.type == "counter":
                family = CounterMetricFamily(spec.name.removesuffix("_total"), spec.help, labels=spec.labels)
            else:
                family = GaugeMetricFamily(spec.name, spec.help, labels=spec.labels)
            for labels, value in samples[spec.name].items():
                family.add_metric(labels, value)
            yield family

    def _samples(self) -> Mapping[str, Mapping[_Labels, float]]:
        """Return the present numbers: metric to label values to number."""
        found: dict[str, dict[_Labels, float]] = defaultdict(dict)
        for key, value in gauges().items():
            labels = dict(key.labels)
            found[key.metric][tuple(labels[name] for name in BY_NAME[key.metric].labels)] = value
        found["headrace_produce_requested_records_total"][()] = self._requested_records
        found["headrace_produce_acknowledged_records_total"][()] = self._acknowledged_records
        found["headrace_consumer_lag_records"] |= {
            (group, at.topic, str(at.partition)): records for group, at, records in self.lag_of()
        }
        found["headrace_audit_notes_total"] |= {(outcome,): notes for outcome, notes in self._audit.items()}
        for consumer, reads in self._deliveries.items():
            for counts in (read() for read in reads):
                for name, count in counts.items():
                    metric, more = DELIVERY_COUNTS[name]
                    earlier = found[metric].get((*consumer, *more), 0)
                    # Pumps of one consumer share its breaker.
                    value = max(earlier, count) if metric == _BREAKER else earlier + count
                    found[metric][(*consumer, *more)] = value
        return found

    def _request_family(self) -> Metric:
        spec = BY_NAME[_REQUESTS]
        family = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        for (route, status), durations in self._requests.items():
            family.add_metric((route, str(status)), list(durations.buckets()), durations.sum_seconds)
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
