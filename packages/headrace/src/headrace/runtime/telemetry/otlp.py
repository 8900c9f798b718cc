"""Metrics over OTLP/HTTP, configured by OpenTelemetry's own variables.

Source: OpenTelemetry specification, `OTLP Exporter Configuration` and `Environment Variable Specification`.
"""

from __future__ import annotations

import gzip
import ssl
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from headrace.errors import ConfigError
from headrace.extras import require
from headrace.runtime.telemetry.metrics import Snapshot
from headrace.runtime.telemetry.periodic_push import PushTarget

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

_PREFIX: Final = "OTEL_EXPORTER_OTLP_"
_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL"
_PATH: Final = "v1/metrics"


def otlp_target(environ: Mapping[str, str], instance: str) -> OtlpTarget | None:
    """Return where the variables send metrics; None if they name no endpoint, or switch metrics off.

    Args:
        environ: The variables.
        instance: Name of this process, `service.instance.id`.

    Raises:
        ConfigError: A variable has a value that is not usable.
        EnvironmentProblem: The library is missing.
    """
    given = {name: value.strip() for name, value in environ.items() if value.strip()}
    off = given.get("OTEL_SDK_DISABLED", "").lower() == "true" or given.get("OTEL_METRICS_EXPORTER") == "none"
    base = given.get(f"{_PREFIX}ENDPOINT", "")
    url = given.get(f"{_PREFIX}METRICS_ENDPOINT", f"{base.rstrip('/')}/{_PATH}" if base else "")
    if off or not url:
        return None
    require("otel", "an OTLP endpoint")
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ConfigError(f"{_PREFIX}ENDPOINT should be a URL such as http://localhost:4318")
    if (protocol := _option(given, "PROTOCOL", "http/protobuf")) != "http/protobuf":
        raise ConfigError(f"{_PREFIX}PROTOCOL is {protocol[:40]}, which is not supported: set http/protobuf")
    return OtlpTarget(url, given, instance)


class OtlpTarget(PushTarget):
    """A collector, or another server that takes OTLP."""

    def __init__(self, url: str, given: Mapping[str, str], instance: str) -> None:
        """Take the variables; see `otlp_target`."""
        headers = {name.lower(): value for name, value in _pairs(_option(given, "HEADERS", ""), "HEADERS").items()}
        headers["content-type"] = "application/x-protobuf"
        self._gzip = _option(given, "COMPRESSION", "none") == "gzip"
        if self._gzip:
            headers["content-encoding"] = "gzip"
        super().__init__(
            "otlp",
            url,
            headers,
            interval_seconds=_seconds(_INTERVAL, given.get(_INTERVAL, "60000")),
            timeout_seconds=_seconds(f"{_PREFIX}TIMEOUT", _option(given, "TIMEOUT", "10000")),
        )
        if file := _option(given, "CERTIFICATE", ""):
            try:
                self.tls = ssl.create_default_context(cafile=file)
            except OSError as cause:
                raise ConfigError(f"{_PREFIX}CERTIFICATE: {file} holds no authorities in PEM: correct it") from cause
        own = {"service.name": given.get("OTEL_SERVICE_NAME", ""), "service.instance.id": instance}
        named = _pairs(given.get("OTEL_RESOURCE_ATTRIBUTES", ""), "OTEL_RESOURCE_ATTRIBUTES")
        self._resource = {"service.name": "headrace"} | named | {name: value for name, value in own.items() if value}
        self._started_at = time.time_ns()

    def encode(self, snapshot: Snapshot) -> list[bytes]:
        """Return one ExportMetricsServiceRequest."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

        request = ExportMetricsServiceRequest()
        found = request.resource_metrics.add()
        for name, value in self._resource.items():
            found.resource.attributes.add(key=name).value.string_value = value
        scope = found.scope_metrics.add()
        scope.scope.name = "headrace"
        times = {"start_time_unix_nano": self._started_at, "time_unix_nano": time.time_ns()}
        for family in snapshot.families:
            if family.samples:
                _add(scope.metrics.add(name=family.name, description=family.documentation), family, times)
        body: bytes = request.SerializeToString()
        return [gzip.compress(body) if self._gzip else body]

    def problem_in(self, response: bytes) -> str:
        """Return what the server did not take of a request that it accepted in part."""
        from google.protobuf.message import DecodeError
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

        try:
            partial = ExportMetricsServiceResponse.FromString(response).partial_success
        except DecodeError:  # some servers respond with JSON or text
            return ""
        rejected = partial.rejected_data_points
        return f"{rejected} data points were rejected: {partial.error_message}" if rejected else ""


def _add(metric: Any, family: Metric, times: Mapping[str, int]) -> None:
    """Add the points of a family; values are cumulative since the start of the process."""
    if family.type == "histogram":
        metric.histogram.aggregation_temporality = 2
        series: dict[tuple[tuple[str, str], ...], Any] = {}
        for sample in family.samples:
            key = tuple((name, value) for name, value in sample.labels.items() if name != "le")
            if key not in series:
                series[key] = metric.histogram.data_points.add(**times)
                _label(series[key], key)
            point = series[key]
            if "le" in sample.labels:
                point.bucket_counts.append(int(sample.value) - sum(point.bucket_counts))
                if sample.labels["le"] != "+Inf":
                    point.explicit_bounds.append(float(sample.labels["le"]))
            elif sample.name.endswith("_count"):
                point.count = int(sample.value)
            else:
                point.sum = sample.value
        return
    if family.type == "counter":
        metric.sum.aggregation_temporality, metric.sum.is_monotonic = 2, True
    points = metric.sum.data_points if family.type == "counter" else metric.gauge.data_points
    for sample in family.samples:
        _label(points.add(as_double=sample.value, **times), tuple(sample.labels.items()))


def _label(point: Any, labels: tuple[tuple[str, str], ...]) -> None:
    for name, value in labels:
        point.attributes.add(key=name).value.string_value = value


def _option(given: Mapping[str, str], name: str, default: str) -> str:
    """Return a variable for metrics, or else that for all signals."""
    return given.get(f"{_PREFIX}METRICS_{name}", given.get(f"{_PREFIX}{name}", default))


def _pairs(text: str, variable: str) -> dict[str, str]:
    """Return `name=value` pairs, separated by commas, with percent encoding."""
    found = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{variable} has a part without a name and `=`: write name=value,name=value")
        found[unquote(name.strip())] = unquote(value.strip())
    return found


def _seconds(variable: str, text: str) -> float:
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = 0.0
    if not 1 <= milliseconds <= 86_400_000:
        raise ConfigError(f"{variable} should be milliseconds, from 1 to 86400000")
    return milliseconds / 1000
