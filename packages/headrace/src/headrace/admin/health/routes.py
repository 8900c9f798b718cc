"""Endpoints of health and metrics."""

import logging
from collections.abc import Callable, Mapping
from typing import Final, Literal

import msgspec

from headrace.config.administration import HealthConfig
from headrace.errors import PathNotFound
from headrace.http.auth.principals import ADMIN, METRICS
from headrace.http.endpoint import OPEN, TEXT, Call, Endpoint, Rule
from headrace.http.messages import HttpResponse
from headrace.http.other_processes import OtherProcesses
from headrace.kafka import hanging_consumers
from headrace.runtime import Readiness, run_blocking
from headrace.runtime.telemetry.joined_metrics import joined_metrics
from headrace.runtime.telemetry.metrics import CONTENT_TYPE, Metrics, text_of

log = logging.getLogger(__name__)


class Liveness(msgspec.Struct):
    """Whether the process must be replaced. Hanging consumers are listed for known callers."""

    status: Literal["alive", "hangs"]
    consumers: list[str] | msgspec.UnsetType = msgspec.UNSET


class ServiceReadiness(msgspec.Struct):
    """Whether one service works, and if not, why."""

    ready: bool
    reason: str


class ReadinessReport(msgspec.Struct):
    """Whether every service works. The services are listed for known callers."""

    ready: bool
    services: dict[str, ServiceReadiness] | msgspec.UnsetType = msgspec.UNSET


_DEFAULTS: Final = HealthConfig()
_READINESS: Final = "Whether every service works"


class HealthResult(msgspec.Struct):
    """Readiness in one word."""

    result: Literal["OK", "ERROR"]


class HealthEndpoints:
    """Liveness, readiness and metrics."""

    def __init__(
        self,
        readiness: Callable[[], Mapping[str, Readiness]],
        service_id: str,
        metrics: Metrics,
        settings: HealthConfig = _DEFAULTS,
        others: OtherProcesses | None = None,
    ) -> None:
        """Make the endpoints.

        Args:
            readiness: Returns the readiness of every service by its name.
            others: The other processes of the run, if there are several.
        """
        self._others = others
        self._readiness = readiness
        self._settings = settings
        self._service_id = service_id
        self._metrics = metrics

    @Endpoint(
        "GET", "/health/liveness", "getLiveness", "Whether the process is alive", OPEN, {200: Liveness, 503: Liveness}
    )
    async def liveness(self, call: Call[None, None]) -> HttpResponse:
        if not (names := hanging_consumers()):
            return HttpResponse(Liveness("alive"))
        log.critical("liveness failed: calls into the Kafka client hang in %s", ", ".join(names))
        return HttpResponse(Liveness("hangs", names if not call.request.caller.is_anonymous else msgspec.UNSET), 503)

    live = liveness.at("GET", "/live", "getLive")

    @Endpoint(
        "GET", "/health/readiness", "getReadiness", _READINESS, OPEN, {200: ReadinessReport, 503: ReadinessReport}
    )
    async def readiness(self, call: Call[None, None]) -> HttpResponse:
        services = {name: ServiceReadiness(one.ready, one.reason) for name, one in self._readiness().items()}
        ready = all(one.ready for one in services.values())
        report = ReadinessReport(ready, services if not call.request.caller.is_anonymous else msgspec.UNSET)
        return HttpResponse(report, 200 if ready else 503)

    ready = readiness.at("GET", "/ready", "getReady")

    @Endpoint(
        "GET",
        "/health/{serviceId}",
        "getHealth",
        f"{_READINESS}, in one word",
        OPEN,
        {200: (TEXT, HealthResult), 400: (TEXT, HealthResult)},
        errors=(PathNotFound,),
    )
    async def health(self, call: Call[None, None]) -> HttpResponse:
        if not self._settings.enabled:
            raise PathNotFound("this path is switched off (health.enabled): use /health/liveness or /health/readiness")
        if call.parameters["serviceId"] != self._service_id:
            raise PathNotFound(
                f"{call.request.head.path[:200]} does not exist: use /health/liveness, /health/readiness or "
                f"/health/{self._service_id} (audit.service_id)"
            )
        ready = all(service.ready for service in self._readiness().values())
        result: Literal["OK", "ERROR"] = "OK" if ready else "ERROR"
        if self._settings.use_json:
            return HttpResponse(HealthResult(result), 200 if ready else 400)
        return HttpResponse(result.encode(), 200 if ready else 400, TEXT.encode())

    control_plane = health.at("GET", "/adm/health/{serviceId}", "getHealthOfControlPlane", described=False)

    @Endpoint("GET", "/metrics", "getMetrics", "All metrics, for Prometheus", Rule((METRICS, ADMIN)), {200: TEXT})
    async def metrics(self, call: Call[None, None]) -> HttpResponse:
        text = await run_blocking(text_of, self._metrics.snapshot())
        others = self._others
        if others and others.concern(call.request):
            found = {**dict.fromkeys(others.numbers, b""), **await others.responses(call.request), others.number: text}
            text = await run_blocking(joined_metrics, found)
        return HttpResponse(text, 200, CONTENT_TYPE.encode())
