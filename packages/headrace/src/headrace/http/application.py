"""The application: routes each request to its endpoint, and turns each error into a response.

A request goes one way: `needs` says whether it needs more than its body, `do` never waits, and its results get a
response. Where more is needed, a task waits for that in `load`: for the caller, and for what the endpoint needs.
"""

import asyncio
import functools
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import zip_longest
from typing import Any, Final, NamedTuple

from headrace.config.http import HttpConfig
from headrace.config.spelling import nearest
from headrace.errors import (
    AuthTokenMissing,
    Draining,
    EnvironmentProblem,
    HeadraceError,
    InternalError,
    MethodNotAllowed,
    PathNotFound,
)
from headrace.extras import package_of_path
from headrace.http.admission import Admission
from headrace.http.auth import Authenticator, Principal
from headrace.http.endpoint import ADMINISTRATION, OPEN, Endpoint, ServedEndpoint, served
from headrace.http.forwarding import Forwarder
from headrace.http.messages import CORRELATION, TRACEABILITY, HttpResponse, error_response, given_id, respond_error
from headrace.http.request import ALWAYS_OPEN, ClientGone, HttpRequest
from headrace.http.request_checks import RequestChecks
from headrace.http.request_report import end_span, log_access, server_span
from headrace.http.targets import Targets
from headrace.runtime import Deadline
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.correlation import caller, correlation_id, new_correlation_id
from headrace.runtime.telemetry.metrics import Metrics
from headrace.runtime.telemetry.tracing import current_span

log = logging.getLogger(__name__)

_DENIED: Final = (401, 403)
_SHOWN_CHARACTERS: Final = 200
_SIMILAR: Final = 0.7
_MOST_KNOWN_ROUTES: Final = 1000
_Methods = dict[str, ServedEndpoint]


class Application:
    """Serves the endpoints of a router."""

    def __init__(
        self,
        settings: HttpConfig,
        router: "Router",
        metrics: Metrics,
        authenticator: Authenticator | None = None,
        audit: Audit | None = None,
        forwarder: Forwarder | None = None,
    ) -> None:
        """Make the application; without `authenticator` every caller may use every endpoint."""
        self.forwarder = forwarder
        """As given."""
        self._metrics = metrics
        self._access_log = settings.access_log
        self._authenticator = authenticator
        self._audit = audit
        self._router = router
        self.targets = router.targets
        """Those of the router."""
        self.checks = RequestChecks(settings)
        self.gate = Gate()

    def needs(self, request: HttpRequest) -> bool:
        """Return whether a request with a complete head needs a task, because it needs more than its body.

        What the head says is found once for all requests with the same one, and the caller for each.
        """
        try:
            if request.steps is None and not self._find_steps(request):
                return True
            if self._authenticator:
                request.principal = self._authenticator.known(request.headers)
                if request.principal is None:
                    return True
                _require(request.endpoint, request.principal, request)
        except HeadraceError:
            return True  # `load` responds with the error
        return False

    def _find_steps(self, request: HttpRequest) -> bool:
        if not self._router.has_steps:
            return False
        found = self._router.find(request)
        if found.steps is None or not found.steps.accepts(request):
            return False
        self.checks.check(request)
        request.steps = found.steps
        return True

    def do(self, request: HttpRequest) -> bool:
        """Serve a request that needs only its body, which is complete; return False if `load` must wait for more."""
        if self.gate.disturbance or not self.gate.enter():
            return False
        request.is_entered = True
        identify(request)
        request.span = server_span(request.method, request.headers)
        try:
            if self._authenticator and request.principal:
                self._authenticator.enter(request.principal)
                request.is_counted = request.is_in_flight = True
            needed = request.steps.needs(request)
            if needed is None:
                self._leave(request)
                return False
            request.steps.do(needed, functools.partial(self._respond, request, needed))
        except Exception as cause:  # noqa: BLE001 boundary: the user sees one error body, never a stack trace
            self._set_context(request)
            self._end(request, error_response(self._error(request, cause)))
        return True

    async def load(self, request: HttpRequest) -> None:
        """Serve a request with a complete head: wait for what it needs, then do it."""
        identify(request)
        self._set_context(request)
        if not request.path.startswith(self._router.always_open):
            request.span = server_span(request.method, request.headers)
        current_span.set(request.span)
        try:
            self.checks.check(request)
            needed = await self._load(request)
            if needed is not None:
                request.steps.do(needed, functools.partial(self._respond, request, needed))
                request.is_direct = True
        except ClientGone:
            log.debug("the client closed the connection before its request was complete")
        except Exception as cause:  # boundary: the user sees one error body, never a stack trace
            self._leave(request)
            error = self._error(request, cause)
            if not request.status:
                await respond_error(request, error)
            elif request.last_bytes and error is cause:
                await request.end(request.last_bytes(error))
            else:  # the response has begun, and the connection ends
                if error is cause:
                    log.warning("%s %s failed in the middle of its response: %s", request.method, request.path, cause)
                raise
        finally:
            if not request.is_direct:
                self._leave(request)
                self._ended(request)

    def _respond(self, request: HttpRequest, needed: Any, results: Any) -> None:
        """Respond with the results of what was done."""
        if self._authenticator or self._access_log:  # otherwise no caller is known, and nothing is logged
            self._set_context(request)
        try:
            response = request.steps.respond(needed, results)
        except Exception as defect:  # noqa: BLE001 boundary: what the user sees is one error body
            self._set_context(request)
            response = error_response(error_of(request, defect))
        self._end(request, response)

    def _end(self, request: HttpRequest, response: HttpResponse) -> None:
        self._leave(request)
        request.respond(response)
        self._ended(request)

    def _set_context(self, request: HttpRequest) -> None:
        """Set the ids for the audit and the log: the context may be that of a connection or of several requests."""
        correlation_id.set(request.correlation_id.decode())
        caller.set(request.principal.name if request.principal else "")

    def _error(self, request: HttpRequest, cause: Exception) -> HeadraceError:
        """Return the error to respond with; audit it unless the response has begun."""
        # Tracebacks refer to the frames of this request: cycles that only a collection would free.
        error = error_of(request, cause).with_traceback(None)
        error.__cause__ = error.__context__ = None
        if self._audit and not request.status:
            self._event(self._audit, request, error)
        return error

    def _leave(self, request: HttpRequest) -> None:
        """Stop counting a request that is counted."""
        if request.is_entered:
            request.is_entered = False
            self.gate.leave()
        if request.is_in_flight and self._authenticator and request.principal:
            request.is_in_flight = False
            self._authenticator.in_flight.leave(request.principal.name)

    def _ended(self, request: HttpRequest) -> None:
        """Count, log and trace a request that has ended; its status is 0 if it has no response."""
        seconds = time.perf_counter() - request.started_at
        if request.status:
            self._metrics.request(request.route, request.status, seconds)
        if self._access_log and not request.path.startswith(self._router.always_open):
            log_access(request, seconds, caller.get())
        if request.span:
            end_span(request.span, request, caller.get())

    async def _load(self, request: HttpRequest) -> Any:
        """Let a request in, find its caller and endpoint, and return what that returns."""
        if not request.path.startswith(self._router.always_open):
            if not self.gate.enter():
                raise Draining()
            request.is_entered = True
            if self.gate.disturbance and not request.path.startswith(ADMINISTRATION):
                await self.gate.disturbance()
        # Identify the caller first, so that unknown callers do not learn which paths exist.
        is_forwarded = self.forwarder is not None and self.forwarder.is_forwarded(request)
        if request.is_counted and request.principal:
            caller.set(request.principal.name)
        elif self._authenticator and not is_forwarded:
            await self._identify(request, self._authenticator)
        endpoint, load, request.steps = self._router.find(request)
        if self.forwarder and endpoint.affinity:
            load = functools.partial(self.forwarder.serve, load)
        if self._authenticator is None or endpoint.rule == OPEN:
            self.checks.check_site(request.headers, changes=endpoint.changes)
            return await load(request)
        if request.principal is None:
            raise AuthTokenMissing()
        _require(endpoint, request.principal, request)
        self.checks.check_site(request.headers, changes=endpoint.changes)
        self._authenticator.in_flight.enter(request.principal.name)
        request.is_in_flight = True
        if is_forwarded:  # the process that forwarded it has its credentials, and ends it
            return await load(request)
        with Admission(self._authenticator, request.principal, request):
            return await load(request)

    async def _identify(self, request: HttpRequest, authenticator: Authenticator) -> None:
        address = request.client_address
        request.principal = None
        if self._router.may_be_open(request.path):
            request.is_anonymous = True
            try:  # a probe with an expired token counts as one without a token
                request.principal = await authenticator.identify(
                    request.headers, request.certificate, address, wait=False
                )
            except HeadraceError:
                return
            request.is_anonymous = False
        else:
            request.principal = await authenticator.identify(request.headers, request.certificate, address, wait=True)
        caller.set(request.principal.name)

    def _event(self, audit: Audit, request: HttpRequest, error: HeadraceError) -> None:
        """Audit a request that was denied, or a produce request that was not sent."""
        path = request.path
        if error.status in _DENIED:
            audit.refused(f"{request.method} {path}", request.client_address, error)
            return
        topic = self.targets.topic_of(request.method, path)
        if topic is not None:
            audit.not_sent(str(error.parameters.get("topic") or topic), error)


def identify(request: HttpRequest) -> None:
    """Give a request its ids: those of the client if they are valid."""
    headers = request.headers
    request.correlation_id = given_id(headers, CORRELATION) or new_correlation_id()
    request.traceability_id = given_id(headers, TRACEABILITY)


def _require(endpoint: Endpoint, principal: Principal, request: HttpRequest) -> None:
    rule = endpoint.rule
    principal.require(rule.any_of, rule.action, request.parameters[rule.parameter] if rule.parameter else None)


class Router:
    """Finds the endpoint of a request by method and path."""

    always_open: tuple[str, ...] = ALWAYS_OPEN
    """Beginnings of the paths that are served while draining."""

    def __init__(self, endpoints: Iterable[ServedEndpoint]) -> None:
        self._paths: dict[str, _Methods] = {}
        patterns: dict[str, _Methods] = {}
        open_paths = []
        self.has_steps = False
        """Whether an endpoint has steps."""
        self._known: dict[tuple[str, str], _Route] = {}
        endpoints = list(endpoints)
        self.targets = Targets(endpoints)
        """What the targets of its endpoints tell."""
        for one in endpoints:
            endpoint = one.endpoint
            self.has_steps |= one.steps is not None
            paths = patterns if endpoint.parameters else self._paths
            methods = paths.setdefault(endpoint.path, {})
            if endpoint.method in methods and methods[endpoint.method].endpoint.method == endpoint.method:
                raise EnvironmentProblem(
                    f"two installed features serve {endpoint.method} {endpoint.path}: uninstall one of their packages"
                )
            methods[endpoint.method] = one
            if endpoint.method == "GET" and not endpoint.changes:
                methods["HEAD"] = one
            if endpoint.rule == OPEN and endpoint.path != "/":
                open_paths.append(endpoint.path.partition("{")[0])
        self._methods = [*self._paths.values(), *patterns.values()]
        self._open_paths = tuple(open_paths)
        self._patterns = [(_pattern(path), methods) for path, methods in patterns.items()]
        every = [one.endpoint for methods in self._methods for one in methods.values()]
        self._foreign = [(endpoint, _pattern(path)) for endpoint in every for path in endpoint.foreign_paths]

    @classmethod
    def of(
        cls,
        families: Iterable[object],
        settings: HttpConfig,
        audit: Audit | None,
        fits: Callable[[Endpoint], bool] = lambda _: True,
    ) -> "Router":
        """Make the router of the endpoints of objects, only of those that fit."""
        endpoints = (one for family in families for one in served(family, settings, audit))
        return cls(one for one in endpoints if fits(one.endpoint))

    def may_be_open(self, path: str) -> bool:
        """Return whether a path begins like that of an open endpoint."""
        return path == "/" or path.startswith(self._open_paths)

    def find(self, request: HttpRequest) -> ServedEndpoint:
        """Return the endpoint of a request; put it and its path parameters into the request.

        Raises:
            PathNotFound, MethodNotAllowed: There is none.
        """
        key = request.method, request.path
        route = self._known.get(key)
        if route is None:
            route = self._look_up(*key)
            if len(request.path) <= _SHOWN_CHARACTERS:
                if len(self._known) >= _MOST_KNOWN_ROUTES:
                    self._known.clear()
                self._known[key] = route
        request.endpoint = route.found.endpoint
        request.parameters = route.parameters
        return route.found

    def _look_up(self, method: str, path: str) -> "_Route":
        methods = self._paths.get(path)
        parameters: dict[str, str] = {}
        if methods is None:
            methods, parameters = self._match(method, path)
        found = methods.get(method)
        if found is None:
            allow = ", ".join(sorted(methods))
            here = self._path_here(method, path)
            hint = f"; did you mean {method} {here}?" if here else ""
            raise MethodNotAllowed(f"{method} {path[:_SHOWN_CHARACTERS]}: this path takes {allow}{hint}", allow=allow)
        return _Route(found, parameters)

    def _match(self, method: str, path: str) -> tuple[_Methods, dict[str, str]]:
        for pattern, methods in self._patterns:
            if match := pattern.fullmatch(path):
                return methods, match.groupdict()
        near = self._path_here(method, path) or self._nearest(method, path[:_SHOWN_CHARACTERS])
        hint = f"did you mean {method} {near}? All paths: /specui.html" if near else "all are at /specui.html"
        hint = package_of_path(path) or hint
        raise PathNotFound(f"{method} {path[:_SHOWN_CHARACTERS]}: no endpoint has this path; {hint}")

    def _path_here(self, method: str, path: str) -> str:
        """Return the path here of an operation that another product has at a path; empty if none is known."""
        for endpoint, pattern in self._foreign:
            if endpoint.method == method and (match := pattern.fullmatch(path)):
                return endpoint.url(**match.groupdict())[:_SHOWN_CHARACTERS]
        return ""

    def _nearest(self, method: str, path: str) -> str:
        """Return the endpoint path that is most similar to an unknown path; empty if none is similar."""
        parts = path.split("/")
        known: dict[str, str] = {}
        administers = path.startswith(ADMINISTRATION[:-1])  # else what administers is not suggested
        for endpoint in (methods[method].endpoint for methods in self._methods if method in methods):
            if endpoint.path.startswith(ADMINISTRATION) and not administers:
                continue
            steps = zip_longest(endpoint.path.split("/"), parts)
            # A parameter matches anything.
            filled = "/".join(given or own if own[:1] == "{" else own for own, given in steps if own)
            known.setdefault(f"/{filled}", endpoint.path)
        return known.get(nearest(path, known, _SIMILAR), "")


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path))


class _Route(NamedTuple):
    found: ServedEndpoint
    parameters: Mapping[str, str]


def error_of(request: HttpRequest, cause: Exception) -> HeadraceError:
    """Return the error to respond with for an exception. Defects are logged."""
    if isinstance(cause, HeadraceError):
        return cause
    log.error("defect while serving %s %s", request.method, request.path[:_SHOWN_CHARACTERS], exc_info=cause)
    return InternalError(
        "a defect of Headrace; please report it: the log has details under this response's X-Correlation-Id. "
        "Records of the request may or may not have been written"
    )


class Gate:
    """Counts requests in progress, and rejects new ones while draining."""

    def __init__(self) -> None:
        self._in_progress = 0
        self._idle = asyncio.Event()
        self.draining = False
        """Set to reject new requests."""
        self.disturbance: Callable[[], Awaitable[None]] | None = None
        """Set by an assault: it delays a request or raises its error. Administration is exempt."""

    def enter(self) -> bool:
        """Count a request until `leave`; return False if it is rejected."""
        if self.draining:
            return False
        self._in_progress += 1
        return True

    def leave(self) -> None:
        """Stop counting a request."""
        self._in_progress -= 1
        if not self._in_progress:
            self._idle.set()

    async def drain(self, deadline: Deadline) -> None:
        """Reject new requests; wait for responses to those in progress, at most until the deadline."""
        self.draining = True
        if self._in_progress:
            self._idle.clear()
            await asyncio.wait_for(self._idle.wait(), deadline.remaining_seconds)
