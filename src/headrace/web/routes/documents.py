"""The API document, and a page that shows it. Source: sidecar.md 3.2."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import yaml
from openapi_ui_bundles import swagger_ui
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.errors import InvalidRequest
from headrace.lifecycle import run_blocking
from headrace.web.bodies import answer
from headrace.web.openapi import document, older
from headrace.web.operation import HTML, JSON, SCRIPT, STYLE, YAML
from headrace.web.operations import ASSETS, OPERATIONS, DocumentQuery, Index

_PAGE: Final = b"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>Headrace</title><link rel="stylesheet" href="specui/swagger-ui.css"></head>
<body>
<div id="page"></div>
<script src="specui/swagger-ui-bundle.js"></script>
<script src="specui/start.js"></script>
</body>
</html>
"""
_START: Final = b'SwaggerUIBundle({url: "openapi.json", dom_id: "#page", deepLinking: true, validatorUrl: null})\n'
_POLICY: Final = (
    "default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)
_INDEX: Final = {
    "/specui.html": "every operation, to read and to try out",
    "/openapi.json": "the same for programs; /spec.yaml as YAML",
    "/health/readiness": "whether each service does its work",
    "/metrics": "every number, for Prometheus",
}


def document_routes() -> list[Route]:
    """Return the endpoints of the document, of its page, and of what the page needs; none asks another site."""
    assets = [path.removeprefix(ASSETS) for _, path in OPERATIONS if path.startswith(ASSETS)]
    return [
        Route("/", _index),
        Route("/spec.yaml", _served(_yaml, YAML)),
        Route("/openapi.json", _served(_json, JSON)),
        Route("/specui.html", _page),
        *(Route(ASSETS + name, functools.partial(_asset, name)) for name in assets),
    ]


async def _index(request: Request) -> Response:
    return answer(Index(importlib.metadata.version("headrace"), _INDEX))


def _served(render: Callable[[str], bytes], kind: str) -> Callable[[Request], object]:
    async def show(request: Request) -> Response:
        try:
            query = msgspec.convert(dict(request.query_params), DocumentQuery)
        except msgspec.ValidationError as cause:
            raise InvalidRequest(f"the query is not one of this path: {cause}; ?version=3.0 is") from cause
        return Response(await run_blocking(render, query.version), media_type=kind)

    return show


@functools.cache
def _json(version: str) -> bytes:
    made = document()
    return msgspec.json.encode(older(made) if version == "3.0" else made)


@functools.cache
def _yaml(version: str) -> bytes:
    plain = msgspec.json.decode(_json(version))  # no part of it twice, so nothing is written as a reference
    return yaml.dump(plain, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False).encode()


async def _page(request: Request) -> Response:
    return Response(_PAGE, media_type=HTML, headers={"content-security-policy": _POLICY})


async def _asset(name: str, request: Request) -> Response:
    data = _START if name == "start.js" else await run_blocking((Path(swagger_ui.static_path) / name).read_bytes)
    return Response(data, media_type=STYLE if name.endswith(".css") else SCRIPT)
