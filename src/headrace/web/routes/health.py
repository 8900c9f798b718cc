"""Whether the process lives, and whether it does its work. Source: sidecar.md 12.1; decisions.md 6."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from headrace.errors import PathNotFound
from headrace.lifecycle import Readiness
from headrace.web.access import is_known


def health_routes(readiness: Callable[[], Mapping[str, Readiness]], service_id: str) -> list[Route]:
    """Return the health endpoints; `readiness` gives every service's name and how it is."""

    async def liveness(request: Request) -> Response:
        return Response(b'{"status":"alive"}', media_type="application/json")

    async def ready(request: Request) -> Response:
        services = readiness()
        ok = all(service.ready for service in services.values())
        body: dict[str, object] = {"ready": ok}
        if is_known(request.scope):
            body["services"] = {name: service._asdict() for name, service in services.items()}
        return Response(msgspec.json.encode(body), 200 if ok else 503, media_type="application/json")

    async def original(request: Request) -> Response:
        if request.path_params["serviceId"] != service_id:
            raise PathNotFound(
                f"{request.url.path[:200]}: there are /health/liveness, /health/readiness and /health/{service_id} "
                "(audit.service_id)"
            )
        ok = all(service.ready for service in readiness().values())
        return PlainTextResponse("OK" if ok else "ERROR", 200 if ok else 400)

    return [
        Route("/health/liveness", liveness),
        Route("/health/readiness", ready),
        Route("/health/{serviceId}", original),
        Route("/live", liveness),
        Route("/ready", ready),
    ]
