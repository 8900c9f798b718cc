"""The API document, generated from endpoints, their types, and the error classes.

A type of which `one_required` names fields needs at least one of these, though each has a default.

Source: OpenAPI Specification 3.1.0.
"""

import importlib.metadata
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, get_args

import msgspec

from headrace import errors
from headrace.errors import HeadraceError
from headrace.http.auth.principals import ADMIN, CHANGE_OWN, METRICS, READ, SEE_OWN, WRITE
from headrace.http.endpoint import JSON, JSON_BODY, OPEN, YAML, Endpoint
from headrace.http.request import ALWAYS_OPEN

Json = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_EDGE: Final = (errors.AmbiguousRequest, errors.OriginRefused, errors.HeadersTooLarge, errors.TransferCodingUnknown)
_TYPES: Final[Mapping[str, Json]] = {JSON: {"type": "object"}, YAML: {"type": "object"}}
"""Schemas of bodies that have no type in the code."""
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
_RESPONSE_HEADERS: Final = {
    "X-Correlation-Id": {"description": "Names the request.", "required": True, "schema": {"type": "string"}}
}


class Status(msgspec.Struct, rename="camel"):
    """Why a request was rejected or failed."""

    status_code: int
    code: str
    message: str
    description: str
    severity: Literal["ERROR"]
    metadata: dict[str, Any]


def document(
    endpoints: Iterable[Endpoint],
    tags: Mapping[str, Sequence[str]],
    parameters: Mapping[str, str],
    types: Sequence[type] = (),
) -> Json:
    """Return the OpenAPI 3.1 document of endpoints.

    Args:
        endpoints: What to describe.
        tags: Groups of operations: the beginnings of the paths in each. The longest beginning counts.
        parameters: The meanings of path parameters; one without is the name of something.
        types: Types that only descriptions name.
    """
    described = [endpoint for endpoint in endpoints if endpoint.described]
    paths: Json = {}
    for endpoint in described:
        operation = _operation(endpoint, parameters)
        operation["tags"] = [_tag(endpoint, tags)]
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = operation
    made = {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": importlib.metadata.version("headrace"),
            "description": "Kafka over HTTP. Every error has the same body, `Status`. Its `metadata.retriable` says "
            "whether the same request may succeed later.",
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": tag} for tag in tags],
        "paths": paths,
        "components": {"schemas": _schemas(described, types), "securitySchemes": _SECURITY},
    }
    plain: Json = msgspec.json.decode(msgspec.json.encode(made))
    return plain


def errors_of(endpoint: Endpoint) -> tuple[type[HeadraceError], ...]:
    """Return every error that an endpoint may respond with, except for defects."""
    body = JSON_BODY if endpoint.request else ()
    query = (errors.InvalidRequest,) if endpoint.query else ()
    guard = () if endpoint.rule == OPEN else _GUARD
    gate = () if endpoint.path.startswith(ALWAYS_OPEN) else _GATE
    return tuple(dict.fromkeys((*endpoint.errors, *body, *query, *guard, *gate, *_EDGE)))


def _schemas(endpoints: Sequence[Endpoint], parts: Sequence[type]) -> Json:
    types = itertools.chain.from_iterable(
        (*itertools.chain(*map(_several, endpoint.responses.values())), *endpoint.request.values())
        for endpoint in endpoints
    )
    structs = [kind for kind in (*types, *parts, Status) if not isinstance(kind, str)]
    schemas = msgspec.json.schema_components(structs, ref_template=_REF)[1]
    for kind in _structs(structs):
        if names := getattr(kind, "one_required", ()):
            schemas[kind.__name__]["anyOf"] = [{"required": [name]} for name in names]
    return schemas


def _structs(types: Sequence[type]) -> set[type]:
    """Return the structs among types and their parts."""
    found: set[type] = set()
    pending: list[object] = [*msgspec.inspect.multi_type_info(types)]
    while pending:
        node = pending.pop()
        if isinstance(node, msgspec.inspect.StructType):
            if node.cls in found:
                continue
            found.add(node.cls)
        if isinstance(node, msgspec.Struct):
            pending += [getattr(node, name) for name in node.__struct_fields__]
        elif isinstance(node, tuple):
            pending += node
    return found


def _tag(endpoint: Endpoint, tags: Mapping[str, Sequence[str]]) -> str:
    """Return the group of an operation."""
    fits = [(len(begin), tag) for tag, begins in tags.items() for begin in begins if endpoint.path.startswith(begin)]
    return max(fits)[1]


def _operation(endpoint: Endpoint, parameters: Mapping[str, str]) -> Json:
    described: Json = {
        "operationId": endpoint.id,
        "summary": endpoint.summary,
        "tags": [],
        "parameters": [*_parameters(endpoint, parameters)],
        "responses": _responses(endpoint),
        "security": [{"kafka_auth": [scope]} for scope in endpoint.rule.any_of],
    }
    if endpoint.request:
        content = {media: _media(kind) for media, kind in endpoint.request.items()}
        if endpoint.example is not None:
            content[JSON]["example"] = endpoint.example
        described["requestBody"] = {"required": not _may_be_left_out(endpoint), "content": content}
    return described


def _may_be_left_out(endpoint: Endpoint) -> bool:
    """Return whether a request without a body counts as one with `{}`."""
    try:
        msgspec.convert({}, endpoint.request[JSON])
    except (KeyError, msgspec.ValidationError):
        return False
    return True


def _parameters(endpoint: Endpoint, meanings: Mapping[str, str]) -> Iterator[Json]:
    text = {"type": "string"}
    for name in endpoint.parameters:
        meaning = meanings.get(name, f"Name of the {name}.")
        yield {"name": name, "in": "path", "required": True, "description": meaning, "schema": text}
    if endpoint.query:
        components = msgspec.json.schema_components([endpoint.query], ref_template=_REF)[1]
        query = components[endpoint.query.__name__]
        for name, schema in query["properties"].items():
            yield {"name": name, "in": "query", "required": name in query["required"], "schema": schema}
    for name, meaning in endpoint.headers.items():
        yield {"name": name, "in": "header", "description": meaning, "schema": {**text, "minLength": 1}}


def _media(kind: type | str) -> Json:
    return {"schema": {"type": "string", "description": kind} if isinstance(kind, str) else _ref(kind)}


def _several(kinds: type | str | tuple[type | str, ...]) -> tuple[type | str, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def _ref(kind: type) -> Json:
    if items := get_args(kind):
        return {"type": "array", "items": _ref(items[0])}
    if kind is str:
        return {"type": "string"}
    return {"$ref": _REF.format(name=kind.__name__)}


def _responses(endpoint: Endpoint) -> Json:
    responses: Json = {}
    for status, kinds in endpoint.responses.items():
        content = {}
        for kind in _several(kinds):
            if kind is list:
                content[JSON] = {"schema": {"type": "array"}}
            elif isinstance(kind, str):
                content[kind] = {"schema": _TYPES.get(kind, {} if kind.endswith("+json") else {"type": "string"})}
            else:
                content[JSON] = _media(kind)
        responses[str(status)] = {"description": "Success.", "headers": _RESPONSE_HEADERS, "content": content}
    by_status: dict[int, list[type[HeadraceError]]] = {}
    for error in sorted(errors_of(endpoint), key=lambda error: (error.status, error.code)):
        by_status.setdefault(error.status, []).append(error)
    for status, group in by_status.items():
        response = responses.setdefault(str(status), {"headers": _RESPONSE_HEADERS, "content": {}})
        response["description"] = "\n".join(
            f"- `{error.code}` {' '.join((error.__doc__ or '').split())}" for error in group
        )
        failure, other = _failure(group, endpoint.error_fields), response["content"].get(JSON)
        response["content"][JSON] = {"schema": {"anyOf": [other["schema"], failure]} if other else failure}
        if endpoint.error_media:
            response["content"][endpoint.error_media] = {"schema": {"type": "object"}}
        if any(error.retry_after_seconds for error in group):
            wait = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            response["headers"] = {**_RESPONSE_HEADERS, "Retry-After": wait}
    return dict(sorted(responses.items()))


def _failure(group: Iterable[type[HeadraceError]], more_fields: type | None) -> Json:
    """Describe an error body by its codes and its additional fields."""
    properties: Json = {"code": {"enum": [*dict.fromkeys(error.code for error in group)]}}
    if more_fields:
        names = [field.encode_name for field in msgspec.structs.fields(more_fields)]
        properties |= {name: {"$ref": f"{_ref(more_fields)['$ref']}/properties/{name}"} for name in names}
    return {"allOf": [_ref(Status), {"properties": properties}]}
