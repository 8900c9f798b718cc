"""The API document of every endpoint over HTTP, and a page that shows it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from headrace.http.endpoint import HTML, JSON, OPEN, SCRIPT, STYLE, YAML, Call, Endpoint
from headrace.http.messages import HttpResponse
from headrace.runtime import run_blocking

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
    b"default-src 'none'; connect-src 'self'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
)


class DocumentEndpoints:
    """The document, its page, and the parts of the page. None of them needs another site."""

    def __init__(self, written: Callable[[str], bytes]) -> None:
        """Serve a document; `written` returns it by media type."""
        self._written = written

    @Endpoint("GET", "/openapi.json", "getOpenApi", "This document as JSON", OPEN, {200: JSON})
    async def as_json(self, call: Call[None, None]) -> HttpResponse:
        return HttpResponse(await run_blocking(self._written, JSON))

    @as_json.at("GET", "/spec.yaml", "getSpecification", summary="This document as YAML", responses={200: YAML})
    async def as_yaml(self, call: Call[None, None]) -> HttpResponse:
        return HttpResponse(await run_blocking(self._written, YAML), 200, YAML.encode())

    @Endpoint("GET", "/specui.html", "getSpecificationPage", "This document to read and to try out", OPEN, {200: HTML})
    async def page(self, call: Call[None, None]) -> HttpResponse:
        return HttpResponse(_PAGE, 200, HTML.encode(), headers=[(b"content-security-policy", _POLICY)])

    @Endpoint("GET", "/specui/start.js", "getStart", "Start of that page", OPEN, {200: SCRIPT}, described=False)
    async def start(self, call: Call[None, None]) -> HttpResponse:
        return HttpResponse(_START, 200, SCRIPT.encode())

    @start.at("GET", "/specui/swagger-ui-bundle.js", "getCode", summary="Code of that page")
    async def code(self, call: Call[None, None]) -> HttpResponse:
        return HttpResponse(await _asset("swagger-ui-bundle.js"), 200, SCRIPT.encode())

    @start.at("GET", "/specui/swagger-ui.css", "getStyle", summary="Style of that page", responses={200: STYLE})
    async def style(self, call: Call[None, None]) -> HttpResponse:
        return HttpResponse(await _asset("swagger-ui.css"), 200, STYLE.encode())


async def _asset(name: str) -> bytes:
    from openapi_ui_bundles import swagger_ui

    return await run_blocking((Path(swagger_ui.static_path) / name).read_bytes)
