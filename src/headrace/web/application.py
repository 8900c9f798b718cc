"""Every endpoint behind one ASGI app."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from starlette.exceptions import HTTPException
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.config.http import HttpConfig
from headrace.lifecycle import Readiness
from headrace.security import Authenticator
from headrace.sidecar.produce import ProduceService
from headrace.telemetry.audit import Audit
from headrace.telemetry.metrics import Metrics
from headrace.web.access import Guard
from headrace.web.hot_path import HotPath
from headrace.web.middleware import Edge, Gate
from headrace.web.operations import OPERATIONS
from headrace.web.origin import Origins, refuse_other_sites
from headrace.web.routes.audit import audit_routes
from headrace.web.routes.documents import document_routes
from headrace.web.routes.health import health_routes
from headrace.web.routes.metrics import metrics_route
from headrace.web.routes.produce import PATH, PREFIX, ProduceRoute
from headrace.web.routes.transactions import TRANSACTIONS, TransactionRoute
from headrace.web.routes.writing import Writing

Routes = Sequence[Route]
"""Endpoints, for whoever puts a process together."""


class Application:
    """The ASGI app: edge, gate, routes."""

    def __init__(
        self,
        settings: HttpConfig,
        produce: ProduceService,
        writing: Writing,
        readiness: Callable[[], Mapping[str, Readiness]],
        metrics: Metrics,
        authenticator: Authenticator | None = None,
        audit: Audit | None = None,
        *,
        more: Routes = (),
    ) -> None:
        """Make the endpoints, `more` beside those of every process; without an authenticator everybody may use all."""
        self._produce = ProduceRoute(produce, writing, metrics, settings)
        routes = self.routes = [
            Route(PATH, self._produce, methods=["POST"]),
            Route(TRANSACTIONS, TransactionRoute(writing, settings), methods=["POST"]),
            *health_routes(readiness, audit.service_id if audit else "headrace"),
            metrics_route(metrics),
            *document_routes(),
            *audit_routes(audit, settings),
            *more,
        ]
        self._hot = refuse_other_sites(self._produce, ("POST",))
        for route in routes:
            methods = {one for one in route.methods or () if _changes(one, route.path)}
            route.app = refuse_other_sites(route.app, methods)
        self._labels = {route.endpoint: route.path for route in routes}
        self._guarded = authenticator is not None
        inner: ASGIApp = self._route
        if authenticator:
            inner = guard = Guard(inner, authenticator)
            for route in routes:
                route.app = guard.protect(route.path, route.app)
            self._hot = guard.protect(PATH, self._hot)
        self._router = Router(routes, redirect_slashes=False)
        self.gate = Gate(inner)
        """Closes when draining."""
        self.streams = self._produce.stream
        self.gate.on_drain = self.streams.drain
        origins = Origins(settings)
        self._edge = Edge(self.gate, metrics, self._label_of, origins.check, audit)
        self.hot_path = HotPath(settings, produce, metrics, self.gate, origins, authenticator)
        """Takes what it can before it gets here."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._edge(scope, receive, send)

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Producing goes round the router, which costs it a third of its requests per second.
        if scope["method"] == "POST" and scope["path"].startswith(PREFIX):
            scope["endpoint"] = self._produce
            if self._guarded:
                scope["path_params"] = {"topic": scope["path"][len(PREFIX) :]}
            await self._hot(scope, receive, send)
        else:
            scope["app"] = self  # so the router raises what it does not know, and the edge answers it
            try:
                await self._router(scope, receive, send)
            except HTTPException as cause:
                if cause.status_code == 405:  # the router names the methods of the first route of this path only
                    same = [route for route in self.routes if route.matches(scope)[0] is not Match.NONE]
                    cause.headers = {"Allow": ", ".join({one for route in same for one in route.methods or ()})}
                raise

    def _label_of(self, scope: Scope) -> str:
        endpoint = scope.get("endpoint")
        return self._labels[endpoint] if endpoint else "none"


def _changes(method: str, path: str) -> bool:
    operation = OPERATIONS.get(("GET" if method == "HEAD" else method, path))
    return operation is None or operation.changes(method)
