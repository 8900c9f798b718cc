"""The application: routes each request to its endpoint, and turns each error into a response.

A request goes one way: `needs` says whether it needs more than its body, `do` never waits, and its results get a
response. Where more is needed, a task waits for that in `load`: for the caller, and for what the endpoint needs.
"""

import asyncio
import functools
import logging
import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final

from headrace.config.http import HttpConfig
from headrace.errors import (
    AuthTokenMissing,
    Draining,
    EnvironmentProblem,
    HeadraceError,
    InternalError,
    MethodNotAllowed,
    PathNotFound,
)
from headrace.extras import foreign_path, package_of_path
from headrace.http.admission import Admission
from headrace.http.auth import Authenticator, Principal
from headrace.http.auth.principals import ANYONE, RequestCaller
from headrace.http.endpoint import ADMINISTRATION, OPEN, Endpoint, Route, ServedEndpoint, served
from headrace.http.forwarding import Forwarder
from headrace.http.messages import error_response, respond_error
from headrace.http.request import ALWAYS_OPEN, ClientGone, HttpRequest, RequestHead, WholeResponse
from headrace.http.request_checks import RequestChecks
from headrace.http.request_report import end_span, log_access, server_span
from headrace.http.targets import Targets
from headrace.runtime import Deadline, clock
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.correlation import caller, correlation_id
from headrace.runtime.telemetry.metrics import Metrics
from headrace.runtime.telemetry.tracing import current_span

log = logging.getLogger(__name__)

_DENIED: Final = (401, 403)
_SHOWN_CHARACTERS: Final = 200
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
        self._metrics = metrics
        self._access_log = settings.access_log
        self._authenticator = authenticator
        self._audit = audit
        self._router = router
        self.targets = router.targets
        self.checks = RequestChecks(settings)
        self.gate = Gate()

    def needs(self, request: HttpRequest) -> bool:
        """Return whether a request with a complete head needs a task, because it needs more than its body.

        What the head says is found once for all requests with the same one, and the caller for each.
        """
        try:
            if request.head.route is None and not self._find_steps(request):
                return True
            if self._authenticator:
                principal = self._authenticator.known(request.head.headers)
                if principal is None:
                    return True
                request.caller = RequestCaller(principal)
                _require(request.head.route, principal)
        except HeadraceError:
            return True  # `load` responds with the error
        return False

    def _find_steps(self, request: HttpRequest) -> bool:
        """Find the route of a head; return whether its endpoint has steps that accept it."""
        if not self._router.has_steps:
            return False
        head = request.head
        route = head.route = self._router.find(head)
        if route.steps is None or not route.steps.accepts(head):
            return False
        self.checks.check(request)
        return True

    def do(self, request: HttpRequest) -> bool:
        """Serve a request that needs only its body, which is complete; return False if `load` must wait for more."""
        if self.gate.disturbance or not self.gate.enter():
            return False
        request.is_entered = True
        request.identify()
        request.span = server_span(request.head.method, request.head.headers)
        steps = request.head.route.steps
        try:
            if self._authenticator:
                self._authenticator.enter(request.caller, is_counted=False)
            needed = steps.needs(request)
            if needed is None:
                self._leave(request)
                return False
            steps.do(needed, functools.partial(self._respond, request, needed))
        except Exception as cause:  # noqa: BLE001 boundary: the user sees one error body, never a stack trace
            self._set_context(request)
            self._end(request, error_response(self._error(request, cause)))
        return True

    async def load(self, request: HttpRequest) -> bool:
        """Serve a request with a complete head: wait for what it needs, then do it.

        Return whether the response follows later, without this task.
        """
        responds_later = False
        request.identify()
        self._set_context(request)
        if not request.head.path.startswith(self._router.always_open):
            request.span = server_span(request.head.method, request.head.headers)
        current_span.set(request.span)
        try:
            self.checks.check(request)
            needed = await self._load(request)
            if needed is not None:
                request.head.route.steps.do(needed, functools.partial(self._respond, request, needed))
                responds_later = True
        except ClientGone:
            log.debug("the client closed the connection before its request was complete")
        except Exception as cause:  # boundary: the user sees one error body, never a stack trace
            self._leave(request)
            error = self._error(request, cause)
            if not request.response.status:
                await respond_error(request, error)
            elif request.response.last_bytes and error is cause:
                await request.response.end(request.response.last_bytes(error))
            else:  # the response has begun, and the connection ends
                if error is cause:
                    called = request.head.method, request.head.path
                    log.warning("%s %s failed in the middle of its response: %s", *called, cause)
                raise
        finally:
            if not responds_later:
                self._leave(request)
                self._ended(request)
        return responds_later

    def _respond(self, request: HttpRequest, needed: Any, results: Any) -> None:
        """Respond with the results of what was done."""
        if self._authenticator or self._access_log:  # otherwise no caller is known, and nothing is logged
            self._set_context(request)
        try:
            response = request.head.route.steps.respond(needed, results)
        except Exception as defect:  # noqa: BLE001 boundary: what the user sees is one error body
            self._set_context(request)
            response = error_response(error_of(request, defect))
        self._end(request, response)

    def _end(self, request: HttpRequest, response: WholeResponse) -> None:
        self._leave(request)
        request.response.respond(response)
        self._ended(request)

    def _set_context(self, request: HttpRequest) -> None:
        """Set the ids for the audit and the log: the context may be that of a connection or of several requests."""
        correlation_id.set(request.correlation_id.decode())
        caller.set(request.caller.principal.name if request.caller.principal else "")

    def _error(self, request: HttpRequest, cause: Exception) -> HeadraceError:
        """Return the error to respond with; audit it unless the response has begun."""
        # Tracebacks refer to the frames of this request: cycles that only a collection would free.
        error = error_of(request, cause).with_traceback(None)
        error.__cause__ = error.__context__ = None
        if self._audit and not request.response.status:
            self._event(self._audit, request, error)
        return error

    def _leave(self, request: HttpRequest) -> None:
        """Stop counting a request that is counted."""
        if request.is_entered:
            request.is_entered = False
            self.gate.leave()
        if self._authenticator:
            self._authenticator.leave(request.caller)

    def _ended(self, request: HttpRequest) -> None:
        """Count, log and trace a request that has ended; its status is 0 if it has no response."""
        seconds = clock.perf_counter() - request.started_at
        if request.response.status:
            self._metrics.request(request.head.pattern, request.response.status, seconds)
        if self._access_log and not request.head.path.startswith(self._router.always_open):
            log_access(request, seconds, caller.get())
        if request.span:
            end_span(request.span, request, caller.get())

    async def _load(self, request: HttpRequest) -> Any:
        """Let a request in, find its caller and endpoint, and return what that returns."""
        if not request.head.path.startswith(self._router.always_open):
            if not self.gate.enter():
                raise Draining()
            request.is_entered = True
            if self.gate.disturbance and not request.head.path.startswith(ADMINISTRATION):
                await self.gate.disturbance()
        # Identify the caller first, so that unknown callers do not learn which paths exist.
        is_forwarded = self.forwarder is not None and self.forwarder.is_forwarded(request)
        if request.caller.is_counted and request.caller.principal:
            caller.set(request.caller.principal.name)
        elif self._authenticator and not is_forwarded:
            await self._identify(request, self._authenticator)
        route = request.head.route = self._router.find(request.head)
        endpoint, serve = route.endpoint, route.serve
        if self.forwarder and endpoint.affinity:
            serve = functools.partial(self.forwarder.serve, serve)
        self.checks.check_site(request.head.headers, changes=endpoint.changes)
        if self._authenticator is None or endpoint.rule == OPEN:
            return await serve(request)
        principal = request.caller.principal
        if principal is None:
            raise AuthTokenMissing()
        _require(route, principal)
        self._authenticator.enter(request.caller)
        if is_forwarded:  # the process that forwarded it has its credentials, and ends it
            return await serve(request)
        with Admission(self._authenticator, principal, request):
            return await serve(request)

    async def _identify(self, request: HttpRequest, authenticator: Authenticator) -> None:
        shown = request.head.headers, request.certificate, request.client_address
        is_open = self._router.may_be_open(request.head.path)
        request.caller = ANYONE
        try:
            principal = await authenticator.identify(*shown, wait=not is_open)
        except HeadraceError:
            if not is_open:
                raise
            # A probe with an expired token counts as one without a token.
            request.caller = RequestCaller(is_anonymous=True)
            return
        request.caller = RequestCaller(principal)
        caller.set(principal.name)

    def _event(self, audit: Audit, request: HttpRequest, error: HeadraceError) -> None:
        """Audit a request that was denied, or a produce request that was not sent."""
        path = request.head.path
        if error.status in _DENIED:
            audit.refused(f"{request.head.method} {path}", request.client_address, error)
            return
        topic = self.targets.topic_of(request.head.method, path)
        if topic is not None:
            audit.not_sent(str(error.parameters.get("topic") or topic), error)


def _require(route: Route, principal: Principal) -> None:
    rule = route.endpoint.rule
    principal.require(rule.any_of, rule.action, route.parameters[rule.parameter] if rule.parameter else None)


class Router:
    """Finds the endpoint of a request by method and path."""

    always_open: tuple[str, ...] = ALWAYS_OPEN
    """Beginnings of the paths that are served while draining."""

    def __init__(self, endpoints: Iterable[ServedEndpoint]) -> None:
        self._paths: dict[str, _Methods] = {}
        patterns: dict[str, _Methods] = {}
        open_paths = []
        self.has_steps = False
        self._known: dict[tuple[str, str], Route] = {}
        endpoints = list(endpoints)
        self.targets = Targets(endpoints)
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
            if endpoint.rule == OPEN:
                open_paths.append(endpoint.path.partition("{")[0])
        self._open_paths = tuple(open_paths)
        self._patterns = [(_pattern(path), methods) for path, methods in patterns.items()]

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
        return path.startswith(self._open_paths)

    def find(self, head: RequestHead) -> Route:
        """Return the endpoint of a head, and its path parameters.

        Raises:
            PathNotFound, MethodNotAllowed: There is none.
        """
        key = head.method, head.path
        route = self._known.get(key)
        if route is None:
            route = self._look_up(*key)
            if len(head.path) <= _SHOWN_CHARACTERS:
                if len(self._known) >= _MOST_KNOWN_ROUTES:
                    self._known.clear()
                self._known[key] = route
        return route

    def _look_up(self, method: str, path: str) -> Route:
        methods = self._paths.get(path)
        parameters: dict[str, str] = {}
        if methods is None:
            methods, parameters = self._match(method, path)
        found = methods.get(method)
        if found is None:
            allow = ", ".join(sorted(methods))
            text = f"{method} {path[:_SHOWN_CHARACTERS]}: this path takes {allow}{foreign_path()(method, path)}"
            raise MethodNotAllowed(text, allow=allow)
        return Route(found.endpoint, found.serve, parameters, found.steps)

    def _match(self, method: str, path: str) -> tuple[_Methods, dict[str, str]]:
        for pattern, methods in self._patterns:
            if match := pattern.fullmatch(path):
                return methods, match.groupdict()
        hint = package_of_path(path) or foreign_path()(method, path) or "; all are at /specui.html"
        raise PathNotFound(f"{method} {path[:_SHOWN_CHARACTERS]}: no endpoint has this path{hint}")


def _pattern(path: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path))


def error_of(request: HttpRequest, cause: Exception) -> HeadraceError:
    """Return the error to respond with for an exception. Defects are logged."""
    if isinstance(cause, HeadraceError):
        return cause
    log.error("defect while serving %s %s", request.head.method, request.head.path[:_SHOWN_CHARACTERS], exc_info=cause)
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
