"""`GET /metrics`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.telemetry.metrics import CONTENT_TYPE, Metrics


def metrics_route(metrics: Metrics) -> Route:
    """Return the endpoint that shows every number."""

    async def show(request: Request) -> Response:
        return Response(metrics.render(), headers={"content-type": CONTENT_TYPE})

    return Route("/metrics", show)
