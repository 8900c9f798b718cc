"""The health of one process: its endpoints, the watch of the backend, and the check of durability."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from headrace.admin.health.examination import Durability, examination, require
from headrace.admin.health.routes import HealthEndpoints
from headrace.consumers.consumers_parts import ConsumersParts
from headrace.process_context import ProcessContext
from headrace.runtime import ServerWatch, Service
from headrace.runtime.feature_parts import NeededParts, Parts
from headrace.runtime.gauge_registry import register_gauge
from headrace.runtime.tls import ClientTlsFiles


class HealthParts(Parts):
    """Readiness and metrics of the process, and what they watch."""

    def __init__(self, context: ProcessContext, needed: NeededParts) -> None:
        self._context = context
        consumers = needed.of(ConsumersParts).consumers
        self._examine = examination(context.config.kafka, context.admin, lambda: consumers.requirements)
        link, own = context.process.link, context.process.supervisor.readiness
        readiness = (lambda: {**own(), **link.others()}) if link else own
        name = context.audit.service_id if context.audit else "headrace"
        self.endpoints = [
            HealthEndpoints(readiness, name, context.metrics, context.config.health, context.process.others)
        ]
        register_gauge("headrace_ready", lambda: int(all(service.ready for service in own().values())))

    def services(self) -> Sequence[Service]:
        config, clock = self._context.config, self._context.clock
        services: list[Service] = []
        if url := config.health.downstream_url:
            from headrace.admin.health.backend_check import BackendCheck

            origin = urlsplit(url)[:2]
            backends = (one.backend for one in config.reactive_consumers.values())
            tls = next((backend.tls for backend in backends if urlsplit(backend.url)[:2] == origin), None)
            files = ClientTlsFiles("health", tls, clock) if tls and origin[0] == "https" else None
            services.append(ServerWatch("backend", BackendCheck(config.health, url, files), clock))
        if config.durability == "report" and (config.reactive_consumers or config.functions):
            services.append(Durability(self._examine, clock))
        return services

    async def open(self) -> None:
        if self._context.config.durability == "strict":
            await require(self._examine)
