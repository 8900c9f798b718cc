"""An HTTP endpoint: one declaration at its handler.

The router, the access rule, the API document, the audit event and the command line's requests are derived from it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import MethodType, NoneType
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar, get_args, get_type_hints
from urllib.parse import quote, urlencode

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.errors import HeadraceError
from headrace.http.auth.principals import ADMIN, CHANGE_OWN, METRICS, SEE_OWN
from headrace.http.messages import HttpResponse, decode_body, decode_query, query_of, read_json
from headrace.http.request import HttpRequest, RequestHead, WholeResponse
from headrace.runtime.telemetry.correlation import caller

if TYPE_CHECKING:  # the command line uses endpoints without an audit and its metrics
    from headrace.runtime.telemetry.audit import Audit

Body = TypeVar("Body")
Query = TypeVar("Query")
Errors = tuple[type[HeadraceError], ...]
Kinds = type | str | tuple[type | str, ...]
"""A type as JSON, a media type, or several of them."""
Handler = Callable[..., Awaitable[Any]]
Serve = Callable[[HttpRequest], Coroutine[Any, Any, Any]]
"""Serves a request in a task: responds and returns None. That of an endpoint with steps is `load`, and returns what
`Steps.do` needs; it returns None after a stream, or if another process has responded."""

JSON, TEXT, HTML, YAML = "application/json", "text/plain", "text/html", "text/yaml"
NDJSON, SCRIPT, STYLE = "application/x-ndjson", "text/javascript", "text/css"
ADMINISTRATION: Final = "/adm/"


class Rule(NamedTuple):
    """The access that an endpoint requires of its caller."""

    any_of: tuple[str, ...]
    """Scopes of which one is enough. An endpoint without scopes is open to all."""
    action: str = ""
    """`produce`, `consume`, `group` or `call` where patterns decide."""
    parameter: str = ""
    """Path parameter that names the topic or group. Where the body names it, the handler calls `require`."""
    also: str = ""
    """Another action that the handler requires, of topics or groups that the body names."""


OPEN: Final = Rule(())
ADMINISTER: Final = Rule((ADMIN,))
SEE: Final = Rule((ADMIN, SEE_OWN, CHANGE_OWN))
CHANGE: Final = Rule((ADMIN, CHANGE_OWN))


@dataclasses.dataclass(frozen=True, eq=False)
class Endpoint:
    """One operation of the HTTP API. Decorates its handler, a method that takes a `Call` and returns the response."""

    method: str
    path: str
    id: str
    summary: str
    rule: Rule
    responses: Mapping[int, Kinds] = dataclasses.field(default_factory=dict)
    """Responses to successful requests, by status. By default 200 with the type that the handler returns, else 204."""
    request: Mapping[str, type | str] = dataclasses.field(default_factory=dict)
    """Request bodies by media type: a type, or a description of the bytes. By default JSON of the handler's type."""
    example: object = None
    """A request that succeeds on a topic without schemas."""
    query: type | None = None
    """By default the type that the handler accepts."""
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Request headers it reads, with their meaning."""
    errors: Errors = ()
    """Its specific errors. `errors_of` adds those of bodies, queries, access and every request."""
    error_fields: type | None = None
    """Fields of an error body in addition to the usual ones."""
    error_media: str = ""
    """Another media type of its errors, for clients of another server; their body is that server's."""
    effect: bool = False
    """Whether a GET changes state. Every other method does."""
    affinity: tuple[str, ...] = ()
    """Path parameters that name what only one process has. That process serves the request."""
    long_poll: bool = False
    """Whether a request may wait for records. Connections of such requests have a separate limit."""
    audited: str = ""
    """Action of its audit event; the handler adds the rest in `Call.event`."""
    decoded: bool = True
    """Whether body and query are decoded. If not, the handler gets the bytes of the body and a plain query."""
    strict: bool = True
    """Whether numbers of the body must have their JSON type. If not, an integer may be text, or `5.0`."""
    described: bool = True
    """Whether it is in the API document."""
    whole: bool = False
    """Whether the handler takes the `HttpRequest` instead, reads its body and sends its response; see `Serve`."""
    handler: Handler | None = None

    def __call__(self, handler: Handler) -> Endpoint:
        """Return this endpoint with its handler, and with the types from the handler's annotations."""
        types = get_type_hints(handler)
        body, query = get_args(types["call"]) if self.decoded and not self.whole else (None, None)
        return dataclasses.replace(
            self,
            handler=handler,
            responses=self.responses or ({204: ()} if types["return"] is NoneType else {200: types["return"]}),
            request=self.request or ({JSON: body} if body not in (None, NoneType) else {}),
            query=self.query or (query if query is not NoneType else None),
        )

    def at(self, method: str, path: str, operation_id: str, **others: Any) -> Endpoint:
        """Return an endpoint with the same handler."""
        return dataclasses.replace(self, method=method, path=path, id=operation_id, **others)

    @property
    def changes(self) -> bool:
        """Whether a request changes state."""
        return self.effect or self.method != "GET"

    @property
    def produces(self) -> bool:
        """Whether a request writes records to topics."""
        return self.rule.action == "produce"

    @property
    def administers(self) -> bool:
        """Whether it belongs to the management listener, if there is one: `/adm/`, metrics, and what only the scope
        `admin` allows."""
        any_of = self.rule.any_of
        return self.path.startswith(ADMINISTRATION) or METRICS in any_of or any_of == (ADMIN,)

    @property
    def parameters(self) -> list[str]:
        """Names of the path parameters."""
        return re.findall(r"{(\w+)}", self.path)

    def url(self, query: Mapping[str, object] | None = None, /, **parameters: str) -> str:
        """Return the path with its parameters and query. Query values that are None are left out."""
        path = self.path.format(**{name: quote(value, safe="") for name, value in parameters.items()})
        given = {name: value for name, value in (query or {}).items() if value is not None}
        return f"{path}?{urlencode(given, doseq=True)}" if given else path


def owner_of(request: HttpRequest) -> str:
    """Return the name under which the caller owns what it creates; empty without authentication."""
    principal = request.caller.principal
    return principal.name if principal else ""


def require(request: HttpRequest, any_of: tuple[str, ...], action: str, name: str) -> None:
    """Raise a scope error unless the caller may access a topic or group that the body names."""
    if request.caller.principal:
        request.caller.principal.require(any_of, action, name)


def is_admin(request: HttpRequest) -> bool:
    """Return whether the caller may do everything, as every caller may without authentication."""
    principal = request.caller.principal
    return principal is None or ADMIN in principal.scopes


def may_control(request: HttpRequest, owner: str) -> bool:
    """Return whether the caller may see and control what an owner created: the owner and administrators may."""
    return is_admin(request) or owner_of(request) == owner


def caller_name() -> str:
    """Return the name of the caller as shown to people."""
    return caller.get() or "anonymous"


class CallEvent(NamedTuple):
    """The audit event of a request, in addition to the action of its endpoint."""

    target: str
    """What is changed: `topic orders`, `server`."""
    reason: str = ""
    """The caller's reason. By default it is the error, if there is one."""
    detail: str = ""
    """Added to the action."""
    outcome: str = "SUCCESS"


class Call(Generic[Body, Query]):
    """A request to an endpoint, with its decoded body and query."""

    def __init__(self, request: HttpRequest, body: Body, query: Query) -> None:
        self.request = request
        self.body = body
        self.query = query
        self.parameters: Mapping[str, str] = request.head.route.parameters
        self.event: CallEvent | None = None
        """Set by the handler once the request is allowed and valid; written after it."""

    def action(self, *known: str) -> str:
        """Return the path parameter `action`.

        Raises:
            PathNotFound: It is not one of the known actions.
        """
        found = self.parameters["action"]
        if found not in known:
            raise errors.PathNotFound(f"{found[:60]!r} is not an action of this path: use {', '.join(known)}")
        return found


Before = Callable[[Call[Any, Any]], Awaitable[HttpResponse | None]]
"""Responds in place of an endpoint; None leaves the request to it."""


def endpoints_of(family: type) -> list[Endpoint]:
    """Return the endpoints that a class declares."""
    return [one for one in vars(family).values() if isinstance(one, Endpoint)]


class Steps(Protocol):
    """Serves an endpoint whose usual requests need only what their bodies say; `load` is the endpoint's handler.

    A usual request: `needs`, `do`, `respond`, none of which waits. Every other one: `load` in a task, `do`, `respond`.
    """

    def accepts(self, head: RequestHead) -> bool:
        """Return whether a request with this head may be usual."""

    def needs(self, request: HttpRequest) -> Any:
        """Return what `do` needs for a request with a complete body; None if `load` must wait for that.

        It may set `parsed` of the head.

        Raises:
            HeadraceError: The request cannot be served; nothing was done.
        """

    def do(self, needed: Any, done: Callable[[Any], None]) -> None:
        """Start the work; `done` is called later with its results, once, on the loop.

        Raises:
            HeadraceError: The request cannot be served; nothing was done.
        """

    def respond(self, needed: Any, results: Any) -> WholeResponse:
        """Return the response for the results."""


class ServedEndpoint(NamedTuple):
    """An endpoint with what serves it."""

    endpoint: Endpoint
    serve: Serve
    steps: Steps | None = None


class Route(NamedTuple):
    """What the router finds for a request: its endpoint, and the parameters in its path."""

    endpoint: Endpoint
    serve: Serve
    parameters: Mapping[str, str]
    steps: Steps | None = None


def served(family: object, settings: HttpConfig, audit: Audit | None) -> list[ServedEndpoint]:
    """Return the endpoints of an object.

    Its mapping `steps`, if it has one, has those with steps by endpoint id; its `before` may respond in place of each.
    """
    steps: Mapping[str, Steps] = getattr(family, "steps", {})
    before: Before | None = getattr(family, "before", None)
    found: list[ServedEndpoint] = []
    for endpoint in endpoints_of(type(family)):
        assert endpoint.handler
        handler = MethodType(endpoint.handler, family)
        serve = handler if endpoint.whole else _served(endpoint, handler, settings, audit, before)
        found.append(ServedEndpoint(endpoint, serve, steps.get(endpoint.id)))
    return found


def _served(
    endpoint: Endpoint, handler: Handler, settings: HttpConfig, audit: Audit | None, before: Before | None
) -> Serve:
    kind = endpoint.request.get(JSON)

    async def serve(request: HttpRequest) -> None:
        body: Any = await read_json(request, settings) if endpoint.request else None
        query: Any = query_of(request) if endpoint.query else None
        if endpoint.decoded:
            body = decode_body(body, kind, strict=endpoint.strict) if isinstance(kind, type) else body
            query = decode_query(request, endpoint.query) if endpoint.query else None
        call = Call(request, body, query)
        try:
            response = (before and await before(call)) or await handler(call)
        except HeadraceError as error:
            if call.event:
                report(call.event._replace(reason=call.event.reason or error.description, outcome="FAILURE"))
            raise
        if call.event:
            report(call.event)
        if response is None:
            response = HttpResponse(b"", 204)
        await request.response.send(response if isinstance(response, HttpResponse) else HttpResponse(response))

    def report(what: CallEvent) -> None:
        if audit:
            action = f"{endpoint.audited} {what.detail}".rstrip()
            audit.control(action, what.target, reason=what.reason, outcome=what.outcome)

    return serve


def below(top: type[HeadraceError]) -> Errors:
    """Return an error with all its subclasses."""
    return top, *(error for special in top.__subclasses__() for error in below(special))


JSON_BODY: Final[Errors] = (
    errors.InvalidRequest,
    errors.ContentTypeMismatch,
    errors.PayloadTooLarge,
    errors.EncodingRefused,
)
"""Errors of a JSON body."""
RECORDS_BODY: Final[Errors] = (*JSON_BODY, errors.RequestBodyMissing, errors.TooManyRecords)
"""Errors of a body with records."""
KAFKA: Final[Errors] = (errors.TopicNotFound, errors.PartitionNotFound, *below(errors.KafkaError))
"""Errors of Kafka."""
