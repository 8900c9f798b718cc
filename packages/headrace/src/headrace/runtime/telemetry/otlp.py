"""Metrics over OTLP by OpenTelemetry's exporter, which reads its own variables. Imported only if they ask for it."""

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import export
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from headrace.errors import EnvironmentProblem
from headrace.runtime.clock import Clock
from headrace.runtime.telemetry.metrics import Metrics, Snapshot
from headrace.runtime.telemetry.opentelemetry_sdk import HeadSession, resource_of
from headrace.runtime.telemetry.periodic_push import PeriodicPush, PushFailed
from headrace.runtime.threads import run_blocking

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
_CUMULATIVE: Final = export.AggregationTemporality.CUMULATIVE
_NO_EXTREME: Final[Any] = None
"""Headrace's histograms have no least and largest value; the class of the SDK has no type for that."""


class OtlpPush(PeriodicPush):
    """Pushes to the collector that the variables name."""

    def __init__(self, metrics: Metrics, clock: Clock, instance: str) -> None:
        """Take the variables; `instance` is the name of this process.

        Raises:
            EnvironmentProblem: The interval is not usable.
        """
        super().__init__("otlp", "the OTLP collector", _interval_seconds(), clock)
        self._metrics = metrics
        self._session = HeadSession()
        self._exporter = OTLPMetricExporter(session=self._session)
        self._resource = resource_of({"service.instance.id": instance})
        self._started_at = int(clock.time() * 1e9)

    async def send(self) -> None:
        if not await run_blocking(self._export, self._metrics.snapshot()):
            raise PushFailed(self._session.outcome)

    async def stop(self) -> None:
        self._exporter.shutdown()  # ends its wait for the next try
        await super().stop()

    def _export(self, snapshot: Snapshot) -> bool:
        now = int(self._clock.time() * 1e9)
        times: Mapping[str, Any] = {"start_time_unix_nano": self._started_at, "time_unix_nano": now}
        metrics = [_metric(family, times) for family in snapshot.families if family.samples]
        scope = export.ScopeMetrics(InstrumentationScope("headrace"), metrics, "")
        data = export.MetricsData([export.ResourceMetrics(self._resource, [scope], "")])
        return self._exporter.export(data) is export.MetricExportResult.SUCCESS


def _metric(family: "Metric", times: Mapping[str, Any]) -> export.Metric:
    """Return the points of a family; values are cumulative since the start of the process."""
    data: export.DataT
    if family.type == "histogram":
        data = export.Histogram([*_histograms(family, times)], _CUMULATIVE)
    else:
        points = [export.NumberDataPoint(one.labels, value=float(one.value), **times) for one in family.samples]
        data = export.Sum(points, _CUMULATIVE, True) if family.type == "counter" else export.Gauge(points)
    return export.Metric(family.name, family.documentation, "", data)


def _histograms(family: "Metric", times: Mapping[str, Any]) -> Iterable[export.HistogramDataPoint]:
    series: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for sample in family.samples:
        key = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        name = sample.labels.get("le") or sample.name.rpartition("_")[2]
        series.setdefault(key, {})[name] = sample.value
    for key, values in series.items():
        count, total = int(values.pop("count")), values.pop("sum")
        upto = [int(value) for value in values.values()]
        yield export.HistogramDataPoint(
            dict(key),
            count=count,
            sum=total,
            bucket_counts=[after - before for before, after in zip([0, *upto], upto, strict=False)],
            explicit_bounds=[float(bound) for bound in values if bound != "+Inf"],
            min=_NO_EXTREME,
            max=_NO_EXTREME,
            **times,
        )


def _interval_seconds() -> float:
    try:
        milliseconds = float(os.environ.get(_INTERVAL, "") or 60_000)
    except ValueError:
        milliseconds = 0.0
    if not 1 <= milliseconds <= 86_400_000:
        raise EnvironmentProblem(f"{_INTERVAL} should be milliseconds, from 1 to 86400000")
    return milliseconds / 1000
