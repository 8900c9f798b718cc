"""The API document of every endpoint, and a page that shows it."""

import functools
import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
import yaml
from openapi_ui_bundles import swagger_ui

from headrace.control.administration.routes import AdministrationEndpoints
from headrace.control.cluster.routes import ClusterEndpoints
from headrace.control.dead_letters.routes import DeadLetterEndpoints
from headrace.control.health.routes import HealthEndpoints
from headrace.control.routes import ControlEndpoints
from headrace.control.runs.routes import JobEndpoints
from headrace.control.table.registration_routes import RegistrationEndpoints
from headrace.functions.routes import FunctionEndpoints
from headrace.http.endpoint import HTML, JSON, OPEN, SCRIPT, STYLE, YAML, Call, Endpoint, endpoints_of
from headrace.http.messages import HttpResponse
from headrace.http.openapi import Json, document, older
from headrace.pipelines.routes import PipelineEndpoints
from headrace.queries.ksqldb_routes import KsqldbEndpoints
from headrace.queries.routes import QueryEndpoints
from headrace.records import Produced
from headrace.runtime import run_blocking
from headrace.sidecar.active.audit_routes import AuditEndpoints
from headrace.sidecar.active.dead_letter_routes import ActiveDeadLetterEndpoints
from headrace.sidecar.active.routes import ActiveEndpoints
from headrace.sidecar.active.status_routes import ActiveStatusEndpoints
from headrace.sidecar.active.topic_routes import TopicEndpoints
from headrace.sidecar.produce.produce_response import ProduceError
from headrace.sidecar.produce.routes import ProduceRoute
from headrace.sidecar.produce.transaction_routes import TransactionRoute

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
_INDEX: Final = {
    "/specui.html": "every operation, to read and to try out",
    "/openapi.json": "the same for programs; /spec.yaml as YAML",
    "/health/readiness": "whether each service works",
    "/metrics": "all metrics, for Prometheus; at http.management if that is set",
}


class Index(msgspec.Struct):
    """Paths to start with."""

    headrace: str
    """The version."""
    paths: dict[str, str]


class DocumentQuery(msgspec.Struct, forbid_unknown_fields=True):
    """The OpenAPI version of the document."""

    version: Literal["3.1", "3.0"] = "3.1"


class DocumentEndpoints:
    """The document, its page, and the parts of the page. None of them needs another site."""

    @Endpoint("GET", "/", "getIndex", "Paths to start with", OPEN)
    async def index(self, call: Call[None, None]) -> Index:
        return Index(importlib.metadata.version("headrace"), _INDEX)

    @Endpoint("GET", "/openapi.json", "getOpenApi", "This document as JSON", OPEN, {200: JSON})
    async def as_json(self, call: Call[None, DocumentQuery]) -> HttpResponse:
        return HttpResponse(await run_blocking(_json, call.query.version))

    @as_json.at("GET", "/spec.yaml", "getSpecification", summary="This document as YAML", responses={200: YAML})
    async def as_yaml(self, call: Call[None, DocumentQuery]) -> HttpResponse:
        return HttpResponse(await run_blocking(_yaml, call.query.version), 200, YAML.encode())

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


ENDPOINTS: Final[Sequence[Endpoint]] = [
    endpoint
    for family in (
        ProduceRoute,
        TransactionRoute,
        ActiveEndpoints,
        HealthEndpoints,
        DocumentEndpoints,
        AuditEndpoints,
        ControlEndpoints,
        FunctionEndpoints,
        PipelineEndpoints,
        QueryEndpoints,
        KsqldbEndpoints,
        ActiveStatusEndpoints,
        ActiveDeadLetterEndpoints,
        DeadLetterEndpoints,
        JobEndpoints,
        RegistrationEndpoints,
        TopicEndpoints,
        AdministrationEndpoints,
        ClusterEndpoints,
    )
    for endpoint in endpoints_of(family)
]
"""Every endpoint of the product."""


def whole_document() -> Json:
    """Return the document of every endpoint."""
    return document(ENDPOINTS, (Produced, ProduceError))


@functools.cache
def _json(version: str) -> bytes:
    made = whole_document()
    return msgspec.json.encode(older(made) if version == "3.0" else made)


@functools.cache
def _yaml(version: str) -> bytes:
    plain = msgspec.json.decode(_json(version))  # without shared parts, which YAML would write as references
    return yaml.dump(plain, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False).encode()


async def _asset(name: str) -> bytes:
    return await run_blocking((Path(swagger_ui.static_path) / name).read_bytes)
