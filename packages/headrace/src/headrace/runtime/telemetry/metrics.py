"""The metrics: their catalogue, and the numbers of one process.

All are plain numbers, because a counter of the metrics library costs eight times as much. Pumps, queues and flows have
counts of their own, which are read when `/metrics` is read.
"""

import csv
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, GCCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, UntypedMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from headrace.records import TopicPartition
from headrace.runtime import gauges
from headrace.runtime.gauge_registry import BUCKET_SECONDS, DurationHistogram, Measured
from headrace.runtime.telemetry.correlation import caller


class MetricSpec(NamedTuple):
    """Name and meaning of a metric."""

    name: str
    """As Prometheus shows it: a counter ends in `_total`."""
    type: str
    """`counter`, `gauge`, `histogram`, or `untyped`: a counter that does not end in `_total`."""
    unit: str
    labels: tuple[str, ...]
    help: str


def _table(name: str) -> list[dict[str, str]]:
    with Path(__file__).with_name(name).open(newline="") as file:
        return list(csv.DictReader(file))


def _parts(count: str) -> list[str]:
    """Return the name of a count and, if it has one, its label: `name=label`."""
    return count.split("=")


_METRICS, _OUTCOMES = _table("metrics.csv"), _table("outcomes.csv")
CATALOGUE: Final = tuple(
    MetricSpec(row["name"], row["type"], row["unit"], tuple(row["labels"].split()), row["help"]) for row in _METRICS
)
"""Every metric. `docs/reference/metrics.md` is made from it."""
BY_NAME: Final = {spec.name: spec for spec in CATALOGUE}

OUTCOMES: Final = {row["outcome"]: row["meaning"] for row in _OUTCOMES}
"""Values of the label `outcome` of `headrace_completed_records_total`."""
CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
"""Media type of `text_of`."""

_FAMILIES: Final[Mapping[str, Callable[..., Metric]]] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
    "untyped": UntypedMetricFamily,
}
_Labels = tuple[str, ...]
_ENDED: Final = "headrace_completed_records_total"
_BREAKER: Final = "headrace_breaker_open"
_CLIENTS: Final = "headrace_client_requests_total"
_MAX_PRINCIPALS: Final = 100
_MAX_NAME_CHARACTERS: Final = 100
ANONYMOUS: Final = "anonymous"
"""Label `principal` of requests without a known caller."""

DELIVERY_COUNTS: Final[Mapping[str, tuple[str, _Labels]]] = {
    **{count: (row["name"], tuple(label)) for row in _METRICS for count, *label in map(_parts, row["counts"].split())},
    **{row["count"]: (_ENDED, (row["outcome"],)) for row in _OUTCOMES},
}
"""The name of a count of a pump or a flow: its metric, and its labels after `kind` and `consumer`."""


class Snapshot(NamedTuple):
    """All numbers at one time."""

    families: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        """Return the families, as a registry does."""
        return self.families


def text_of(snapshot: Snapshot) -> bytes:
    """Return numbers in Prometheus' text format; may run on another thread, because large ones take a while."""
    return generate_latest(snapshot)


class Metrics(Collector):
    """The numbers of one process; call its methods on the loop, once per batch."""

    def __init__(self) -> None:
        self._requested_records = self._acknowledged_records = 0
        self._audit_events: dict[_Labels, int] = defaultdict(int)
        self._requests: dict[tuple[str, int], DurationHistogram] = defaultdict(DurationHistogram)
        """By route and status."""
        self._clients: dict[tuple[str, int], int] = defaultdict(int)
        """By label of the caller, and hundreds of the status."""
        self._principals: dict[str, str] = {"": ANONYMOUS}
        self.on_request: Callable[[str, str, int, float], None] | None = None
        """Called with route, label of the caller, status and seconds of each answered request."""
        self._deliveries: dict[tuple[str, str], list[Callable[[], Mapping[str, int]]]] = defaultdict(list)
        self.lag_of: Callable[[], Iterable[tuple[str, TopicPartition, int]]] = tuple
        """Returns group, partition and lag in records, as far as it is known; called when `/metrics` is read."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def produced(self, requested_records: int, acknowledged_records: int) -> None:
        """Count the records of a produce request, and those of them that Kafka acknowledged."""
        self._requested_records += requested_records
        self._acknowledged_records += acknowledged_records

    def audit_events(self, outcome: str, events: int) -> None:
        """Count events of the audit that were `written`, `lost` on the way, or `dropped` because the queue was full."""
        self._audit_events[outcome,] += events

    def watch_deliveries(self, kind: str, consumer: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Show the counts of a pump or a flow, read for each `/metrics`; several of one consumer are added up."""
        self._deliveries[kind, consumer].append(read)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count one answered request of the present caller; `route` is a pattern, never a path with names in it."""
        self._requests[route, status].add(seconds)
        principal = self._principals.get(name := caller.get()) or self._label_of(name)
        self._clients[principal, status // 100] += 1
        if self.on_request:
            self.on_request(route, principal, status, seconds)

    def _label_of(self, name: str) -> str:
        """Return the label of a new caller."""
        if len(self._principals) > _MAX_PRINCIPALS:
            return "other"
        return self._principals.setdefault(name, name[:_MAX_NAME_CHARACTERS])

    def forget_deliveries(self, kind: str, consumer: str) -> None:
        """Show the counts of a consumer no longer."""
        self._deliveries.pop((kind, consumer), None)

    def snapshot(self) -> Snapshot:
        """Return every number as it is now, those of the process and of garbage collection included; on the loop."""
        return Snapshot([*self._registry.collect()])

    def collect(self) -> Iterable[Metric]:
        samples = self._samples()
        for spec in CATALOGUE:
            family: Any = _FAMILIES[spec.type](spec.name.removesuffix("_total"), spec.help, labels=spec.labels)
            for labels, value in samples[spec.name].items():
                family.add_metric(labels, *(_buckets(value) if isinstance(value, DurationHistogram) else (value,)))
            yield family

    def _samples(self) -> Mapping[str, Mapping[_Labels, Measured]]:
        """Return the present numbers: metric to label values to number."""
        found: dict[str, dict[_Labels, Any]] = defaultdict(dict)
        for key, value in gauges().items():
            labels = dict(key.labels)
            found[key.metric][tuple(labels[name] for name in BY_NAME[key.metric].labels)] = value
        found[_CLIENTS] |= {(name, f"{hundreds}xx"): count for (name, hundreds), count in self._clients.items()}
        found["headrace_audit_events_total"] |= self._audit_events
        found["headrace_http_request_seconds"] = {
            (route, str(status)): durations for (route, status), durations in self._requests.items()
        }
        found["headrace_produce_records_total"] = {
            ("acknowledged",): self._acknowledged_records,
            ("failed",): self._requested_records - self._acknowledged_records,
        }
        found["headrace_consumer_lag_records"] |= {
            (group, at.topic, str(at.partition)): records for group, at, records in self.lag_of()
        }
        for consumer, reads in self._deliveries.items():
            for counts in (read() for read in reads):
                for name, count in counts.items():
                    metric, more = DELIVERY_COUNTS[name]
                    earlier = found[metric].get((*consumer, *more), 0)
                    # Pumps of one consumer share its breaker.
                    value = max(earlier, count) if metric == _BREAKER else earlier + count
                    found[metric][(*consumer, *more)] = value
        return found


def _buckets(histogram: DurationHistogram) -> tuple[list[tuple[str, float]], float]:
    bounds = [*map(str, BUCKET_SECONDS), "+Inf"]
    return [*zip(bounds, itertools.accumulate(histogram.counts), strict=True)], histogram.seconds
