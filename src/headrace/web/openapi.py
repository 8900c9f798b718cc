"""The API document, made of the table of rules, the table of operations, the types in it, and the error classes.

Source: OpenAPI Specification 3.1.0; 3.0.3 for the older spelling.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, get_args

import msgspec

from headrace import errors
from headrace.errors import HeadraceError
from headrace.security.principals import ADMIN, CHANGE_OWN, METRICS, READ, SEE_OWN, WRITE
from headrace.web.access import OPEN, RULES, Rule
from headrace.web.connection import ALWAYS_OPEN
from headrace.web.operation import JSON, YAML, Operation
from headrace.web.operations import ASSETS, OPERATIONS, PARAMETERS, PARTS, Status

Json = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_EDGE: Final = (errors.AmbiguousRequest, errors.OriginRefused, errors.HeadersTooLarge, errors.TransferCodingUnknown)
_TAGS: Final = (
    ("Produce", ("/producers", "/transactions")),
    ("Dead letters", ("/adm/dead-letters", "/consumers/deadLetter")),
    ("Consumer control", ("/adm/reactive-consumers",)),
    ("Registered consumers", ("/reactive-consumers",)),
    ("Jobs and replays", ("/adm/jobs", "/adm/replays", "/adm/messagereplaymetadata")),
    ("Audit", ("/consumers/active/audit",)),
    ("Health and metrics", ("/health", "/live", "/ready", "/metrics")),
    ("Documents", ("/",)),
)
"""Groups of operations by what their paths begin with; the first that fits counts."""
_RECORDS: Final = {"ProduceRecord", "CountedRecord"}
"""Types of which one needs a key or a value."""
_GATE: Final = (errors.Draining, errors.ServerBusy)
_GUARD: Final = (
    *errors.Unauthenticated.__subclasses__(),
    *errors.Forbidden.__subclasses__(),
    errors.KeysUnavailable,
    errors.TooManyRequests,
)
_SECURITY: Final = {
    "kafka_auth": {
        "type": "oauth2",
        "description": "OAuth 2.0, client credentials. With the header X-Scope-Token, the scopes of that token count.",
        "flows": {
            "clientCredentials": {
                "tokenUrl": "https://localhost:6882/token",
                "scopes": {
                    WRITE: "Kafka producer",
                    READ: "Kafka consumer",
                    ADMIN: "Administration",
                    METRICS: "Metrics",
                    SEE_OWN: "Seeing one's own registered consumers",
                    CHANGE_OWN: "Registering consumers, and changing one's own",
                },
            }
        },
    }
}
_ANSWERED: Final = {
    "X-Correlation-Id": {"description": "Names the request.", "required": True, "schema": {"type": "string"}}
}


def document() -> Json:
    """Return the OpenAPI 3.1 document of everything that is served."""
    paths: Json = {}
    for (method, path), operation in OPERATIONS.items():
        if path.startswith(ASSETS):
            continue
        paths.setdefault(path, {})[method.lower()] = _operation(path, operation, RULES[method, path])
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": importlib.metadata.version("headrace"),
            "description": "Kafka over HTTP. Every error has one body, `Status`, which says in `metadata.retriable` "
            "whether the same request may succeed later.",
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag, _ in _TAGS],
        "paths": paths,
        "components": {"schemas": _schemas(), "securitySchemes": _SECURITY},
    }
    plain: Json = msgspec.json.decode(msgspec.json.encode(made))
    return plain


def errors_of(path: str, operation: Operation, rule: Rule) -> tuple[type[HeadraceError], ...]:
    """Return every error that a request to an endpoint may be answered with, but those of a defect."""
    guard = () if rule == OPEN else _GUARD
    gate = () if path.startswith(ALWAYS_OPEN) else _GATE
    return tuple(dict.fromkeys((*operation.errors, *guard, *gate, *_EDGE)))


def _schemas() -> Json:
    types = itertools.chain.from_iterable(
        (*itertools.chain(*map(_several, operation.answers.values())), *operation.request.values())
        for operation in OPERATIONS.values()
    )
    structs = [kind for kind in (*types, *PARTS, Status) if not isinstance(kind, str)]
    schemas = msgspec.json.schema_components(structs, ref_template=_REF)[1]
    for name in _RECORDS & schemas.keys():
        schemas[name]["anyOf"] = [{"required": ["key"]}, {"required": ["value"]}]
    return schemas


def _operation(path: str, operation: Operation, rule: Rule) -> Json:
    described: Json = {
        "operationId": operation.id,
        "summary": operation.summary,
        "tags": [next(tag for tag, begins in _TAGS if path.startswith(begins))],
        "parameters": [*_parameters(path, operation)],
        "responses": _responses(operation, errors_of(path, operation, rule)),
        "security": [{"kafka_auth": [scope]} for scope in rule.any_of],
    }
    if operation.request:
        content = {media: _media(kind) for media, kind in operation.request.items()}
        if operation.example is not None:
            content[JSON]["example"] = operation.example
        described["requestBody"] = {"required": not _may_be_left_out(operation), "content": content}
    return described


def _may_be_left_out(operation: Operation) -> bool:
    """Return whether a request without a body is taken for one with `{}`."""
    try:
        msgspec.convert({}, operation.request[JSON])
    except msgspec.ValidationError:
        return False
    return True


def _parameters(path: str, operation: Operation) -> Iterator[Json]:
    text = {"type": "string"}
    for name in re.findall(r"{(\w+)}", path):
        yield {"name": name, "in": "path", "required": True, "description": PARAMETERS[name], "schema": text}
    if operation.query:
        components = msgspec.json.schema_components([operation.query], ref_template=_REF)[1]
        query = components[operation.query.__name__]
        for name, schema in query["properties"].items():
            yield {"name": name, "in": "query", "required": name in query["required"], "schema": schema}
    for name, meaning in operation.headers.items():
        yield {"name": name, "in": "header", "description": meaning, "schema": {**text, "minLength": 1}}


def _media(kind: type | str) -> Json:
    return {"schema": {"type": "string", "description": kind} if isinstance(kind, str) else _ref(kind)}


def _several(kinds: type | str | tuple[type | str, ...]) -> tuple[type | str, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _ref(kind: type) -> Json:
    if items := get_args(kind):
        return {"type": "array", "items": _ref(items[0])}
    return {"$ref": _REF.format(name=kind.__name__)}


def _responses(operation: Operation, failures: Iterable[type[HeadraceError]]) -> Json:
    responses: Json = {}
    for status, kinds in operation.answers.items():
        content = {}
        for kind in _several(kinds):
            if isinstance(kind, str):
                content[kind] = {"schema": {"type": "object" if kind in (JSON, YAML) else "string"}}
            else:
                content[JSON] = _media(kind)
        responses[str(status)] = {"description": "As asked.", "headers": _ANSWERED, "content": content}
    by_status: dict[int, list[type[HeadraceError]]] = {}
    for error in sorted(failures, key=lambda error: (error.status, error.code)):
        by_status.setdefault(error.status, []).append(error)
    for status, group in by_status.items():
        response = responses.setdefault(str(status), {"headers": _ANSWERED, "content": {}})
        response["description"] = "\n".join(f"- `{error.code}` {_meaning(error)}" for error in group)
        response["content"][JSON] = {"schema": _failure(group, operation.beside)}
        if any(error.retry_after_seconds for error in group):
            wait = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            response["headers"] = {**_ANSWERED, "Retry-After": wait}
    return dict(sorted(responses.items()))


def _meaning(error: type[HeadraceError]) -> str:
    return " ".join((error.__doc__ or "").split())


def _failure(group: Iterable[type[HeadraceError]], beside: type | None) -> Json:
    """Describe an error body by its codes, and by what may stand beside its own fields."""
    properties: Json = {"code": {"enum": [error.code for error in group]}}
    if beside:
        fields = msgspec.structs.fields(beside)
        properties |= {f.encode_name: {"$ref": f"{_ref(beside)['$ref']}/properties/{f.encode_name}"} for f in fields}
    return {"allOf": [_ref(Status), {"properties": properties}]}


def older(node: Any) -> Any:
    """Return a document in the words of OpenAPI 3.0, as far as it has words; what it cannot say is left out."""
    if isinstance(node, list):
        return [older(part) for part in node]
    if not isinstance(node, Mapping):
        return "3.0.3" if node == "3.1.0" else node
    node = {key: value for key, value in node.items() if (key, value) not in (("default", None), ("required", []))}
    if {"type": "null"} in node.get("anyOf", ()):
        rest = [part for part in node.pop("anyOf") if part != {"type": "null"}]
        node |= {"nullable": True} | (rest[0] if len(rest) == 1 and "$ref" not in rest[0] else {"anyOf": rest})
    if not isinstance(bound := node.get("exclusiveMinimum", True), bool):
        node |= {"minimum": bound, "exclusiveMinimum": True}
    if "prefixItems" in node:
        node["items"] = {"anyOf": node.pop("prefixItems")}
    return {key: older(value) for key, value in node.items()}
