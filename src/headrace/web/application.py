"""Every endpoint behind one ASGI app."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from headrace.config.model import HttpConfig
from headrace.lifecycle import Readiness
from headrace.sidecar.produce import ProduceService
from headrace.telemetry.metrics import Metrics
from headrace.web.middleware import Edge, Gate
from headrace.web.routes.health import health_routes
from headrace.web.routes.metrics import metrics_route
from headrace.web.routes.produce import PATH, PREFIX, ProduceRoute


class Application:
    """The ASGI app: edge, gate, routes."""

    def __init__(
        self,
        settings: HttpConfig,
        produce: ProduceService,
        readiness: Callable[[], Mapping[str, Readiness]],
        metrics: Metrics,
    ) -> None:
        self._produce = ProduceRoute(produce, metrics, settings.max_body_bytes)
        routes = [
            Route(PATH, self._produce, methods=["POST"]),
            *health_routes(readiness),
            metrics_route(metrics),
        ]
        self._router = Router(routes, redirect_slashes=False)
        self._labels = {route.endpoint: route.path for route in routes}
        self.gate = Gate(self._route, settings.max_connections)
        """Closes when draining."""
        self._edge = Edge(self.gate, metrics, self._label_of)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._edge(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Producing goes round the router, which costs it a third of its requests per second.
        if scope["method"] == "POST" and scope["path"].startswith(PREFIX):
            scope["endpoint"] = self._produce
            await self._produce(scope, receive, send)
        else:
            scope["app"] = self  # so the router raises what it does not know, and the edge answers it
            await self._router(scope, receive, send)

    def _label_of(self, scope: Scope) -> str:
        endpoint = scope.get("endpoint")
        return self._labels[endpoint] if endpoint else "none"
