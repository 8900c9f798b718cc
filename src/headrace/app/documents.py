"""The API document of every endpoint."""

import functools
from collections.abc import Sequence
from typing import Final

import msgspec
import yaml

from headrace.admin.cluster.routes import ClusterEndpoints
from headrace.admin.cluster.schema_routes import SchemaEndpoints
from headrace.admin.health.routes import HealthEndpoints
from headrace.admin.process.routes import AdministrationEndpoints
from headrace.app.document_routes import DocumentEndpoints
from headrace.commands.registration_routes import RegistrationEndpoints
from headrace.commands.routes import ControlEndpoints
from headrace.functions.routes import FunctionEndpoints
from headrace.http.endpoint import JSON, YAML, Endpoint, endpoints_of
from headrace.http.openapi import Json, document, older
from headrace.pipelines.routes import PipelineEndpoints
from headrace.queries.ksqldb_routes import KsqldbEndpoints
from headrace.queries.routes import QueryEndpoints
from headrace.records import Produced
from headrace.runs.dead_letters.routes import DeadLetterEndpoints
from headrace.runs.routes import JobEndpoints
from headrace.sidecar.active.audit_routes import AuditEndpoints
from headrace.sidecar.active.dead_letter_routes import ActiveDeadLetterEndpoints
from headrace.sidecar.active.routes import ActiveEndpoints
from headrace.sidecar.active.status_routes import ActiveStatusEndpoints
from headrace.sidecar.active.topic_routes import TopicEndpoints
from headrace.sidecar.produce.produce_response import ProduceError
from headrace.sidecar.produce.routes import ProduceRoute
from headrace.sidecar.produce.transaction_routes import TransactionRoute

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
        SchemaEndpoints,
    )
    for endpoint in endpoints_of(family)
]
"""Every endpoint of the product."""


def whole_document() -> Json:
    """Return the document of every endpoint."""
    return document(ENDPOINTS, (Produced, ProduceError))


@functools.cache
def written(version: str, media_type: str) -> bytes:
    """Return the document by version, `3.1` or `3.0`, as JSON or as YAML."""
    if media_type == YAML:
        plain = msgspec.json.decode(
            written(version, JSON)
        )  # without shared parts, which YAML would write as references
        return yaml.dump(plain, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper), sort_keys=False).encode()
    made = whole_document()
    return msgspec.json.encode(older(made) if version == "3.0" else made)
