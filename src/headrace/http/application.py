"""The ASGI application: routes each request to its endpoint, and turns each error into a response."""

import asyncio
import contextlib
import functools
import logging
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from itertools import zip_longest
from typing import Final

from headrace.config.http import HttpConfig
from headrace.config.spelling import nearest
from headrace.errors import AuthTokenMissing, Draining, HeadraceError, InternalError, MethodNotAllowed, PathNotFound
from headrace.http.admission import Admission
from headrace.http.asgi import ALWAYS_OPEN, LAST_BYTES, AsgiApp, ClientGone, Message, Receive, Scope, Send, headers_of
from headrace.http.auth import Authenticator, Principal
from headrace.http.endpoint import ADMINISTRATION, OPEN, PRINCIPAL, Endpoint, principal_of, served
from headrace.http.forwarding import Forwarder
from headrace.http.messages import CORRELATION, TRACEABILITY, given_id, response_error
from headrace.http.request_checks import RequestChecks
from headrace.http.request_report import ServedRequest, end_span, log_access, server_span
from headrace.runtime import Deadline
from headrace.runtime.telemetry.audit import Audit
from headrace.runtime.telemetry.correlation import caller, correlation_id, new_correlation_id
from headrace.runtime.telemetry.metrics import Metrics
from headrace.runtime.telemetry.tracing import TraceSpan, current_span

log = logging.getLogger(__name__)

_DENIED: Final = (401, 403)
_SHOWN_CHARACTERS: Final = 200
_SIMILAR: Final = 0.7
_PRODUCING: Final = ("/producers/", "/transactions")
_Methods = dict[str, tuple[Endpoint, AsgiApp]]


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
        self.checks = RequestChecks(settings)
        self.gate = Gate()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at = time.perf_counter()
        headers = headers_of(scope)
        identity = given_id(headers, CORRELATION) or new_correlation_id()
        correlation_id.set(identity.decode())
        caller.set("")  # the context is that of the connection, which may have had another caller
        ids = [(CORRELATION, identity)]
        if trace := given_id(headers, TRACEABILITY):
            ids.append((TRACEABILITY, trace))
        status = size_bytes = 0
        span = None if scope["path"].startswith(self._router.always_open) else server_span(scope["method"], headers)
        current_span.set(span)

        async def send_with_ids(message: Message) -> None:
            nonlocal status, size_bytes
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *ids]
            else:
                size_bytes += len(message.get("body", b""))
            await send(message)

        try:
            self.checks.check(scope, headers)
            await self._admit(scope, receive, send_with_ids)
        except ClientGone:
            log.debug("the client closed the connection before its request was complete")
        except Exception as cause:  # boundary: the user sees one error body, never a stack trace
            error = error_of(scope, cause)
            if self._audit and not status:
                self._event(self._audit, scope, error)
            if status:  # the response has begun; unless it is a stream, the server closes the connection
                if isinstance(cause, HeadraceError):
                    if last_bytes := scope["state"].get(LAST_BYTES):
                        await send_with_ids({"type": "http.response.body", "body": last_bytes(cause)})
                        return
                    log.warning("%s %s failed in the middle of its response: %s", scope["method"], scope["path"], cause)
                raise
            # Its traceback refers to this frame and the body: a cycle that only a collection would free.
            await response_error(receive, send_with_ids, error.with_traceback(None))
        finally:
            self._ended(scope, status, size_bytes, time.perf_counter() - started_at, dict(ids), span)

    def _ended(
        self,
        scope: Scope,
        status: int,
        size_bytes: int,
        seconds: float,
        ids: dict[bytes, bytes],
        span: TraceSpan | None,
    ) -> None:
        """Count, log and trace a request that has ended; `status` is 0 if it has no response."""
        route = scope["endpoint"].path if "endpoint" in scope else "none"
        if status:
            self._metrics.request(route, status, seconds)
        logged = self._access_log and not scope["path"].startswith(self._router.always_open)
        if not (span or logged):
            return
        given = [ids.get(name, b"").decode() for name in (CORRELATION, TRACEABILITY)]
        served = ServedRequest(
            scope, scope["method"], route, status, size_bytes, seconds, given[0], given[1], caller.get()
        )
        if logged:
            log_access(served, span)
        if span:
            end_span(span, served)

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(self._router.always_open):
            await self._route(scope, receive, send)
            return
        if not self.gate.enter():
            raise Draining()
        try:
            if self.gate.disturbance and not scope["path"].startswith(ADMINISTRATION):
                await self.gate.disturbance()
            await self._route(scope, receive, send)
        finally:
            self.gate.leave()

    async def _route(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Identify the caller first, so that unknown callers do not learn which paths exist.
        forwarded = self.forwarder is not None and self.forwarder.is_forwarded(scope)
        if forwarded:
            principal = principal_of(scope)
        else:
            principal = await self._identify(scope, self._authenticator) if self._authenticator else None
        endpoint, app = self._router.find(scope)
        if self.forwarder and "instance" in scope["path_params"]:
            app = functools.partial(self.forwarder.serve, app)
        if self._authenticator is None or endpoint.rule == OPEN:
            self.checks.check_site(headers_of(scope), changes=endpoint.changes)
            await app(scope, receive, send)
            return
        if principal is None:
            raise AuthTokenMissing()
        rule = endpoint.rule
        principal.require(rule.any_of, rule.action, scope["path_params"][rule.parameter] if rule.parameter else None)
        self.checks.check_site(headers_of(scope), changes=endpoint.changes)
        with Admission(self._authenticator, principal, scope, receive) as admission:
            # The process that forwarded a request has its credentials, and ends it.
            await app(scope, receive if forwarded else admission.receive, send)

    async def _identify(self, scope: Scope, authenticator: Authenticator) -> Principal | None:
        headers, certificate = headers_of(scope), scope["state"].get("certificate")
        address = scope["client"][0] if scope.get("client") else ""
        scope[PRINCIPAL] = None
        if self._router.may_be_open(scope["path"]):
            with contextlib.suppress(HeadraceError):  # a probe with an expired token counts as one without a token
                scope[PRINCIPAL] = await authenticator.identify(headers, certificate, address, wait=False)
        else:
            scope[PRINCIPAL] = await authenticator.identify(headers, certificate, address, wait=True)
        principal: Principal | None = scope[PRINCIPAL]
        if principal:
            caller.set(principal.name)
        return principal

    def _event(self, audit: Audit, scope: Scope, error: HeadraceError) -> None:
        """Audit a request that was denied, or a produce request that was not sent."""
        path = scope["path"]
        if error.status in _DENIED:
            client = scope.get("client")
            audit.refused(f"{scope['method']} {path}", client[0] if client else "", error)
        elif scope["method"] == "POST" and path.startswith(_PRODUCING):
            topic = str(error.parameters.get("topic") or path.removeprefix(_PRODUCING[0]))
            audit.not_sent("" if topic == path else topic, error)


class Router:
    """Finds the endpoint of a request by method and path."""

    always_open: tuple[str, ...] = ALWAYS_OPEN
    """Beginnings of the paths that are served while draining."""

    def __init__(self, endpoints: Iterable[tuple[Endpoint, AsgiApp]]) -> None:
        self._paths: dict[str, _Methods] = {}
        patterns: dict[str, _Methods] = {}
        open_paths = []
        for endpoint, app in endpoints:
            paths = patterns if endpoint.parameters else self._paths
            methods = paths.setdefault(endpoint.path, {})
            methods[endpoint.method] = endpoint, app
            if endpoint.method == "GET" and not endpoint.changes:
                methods["HEAD"] = endpoint, app
            if endpoint.rule == OPEN and endpoint.path != "/":
                open_paths.append(endpoint.path.partition("{")[0])
        self._methods = [*self._paths.values(), *patterns.values()]
        self._open_paths = tuple(open_paths)
        self._patterns = [
            (re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", path)), methods) for path, methods in patterns.items()
        ]

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
        return cls(one for one in endpoints if fits(one[0]))

    def may_be_open(self, path: str) -> bool:
        """Return whether a path begins like that of an open endpoint."""
        return path == "/" or path.startswith(self._open_paths)

    def find(self, scope: Scope) -> tuple[Endpoint, AsgiApp]:
        """Return the endpoint of a request; put it and its path parameters into the scope.

        Raises:
            PathNotFound, MethodNotAllowed: There is none.
        """
        method, path = scope["method"], scope["path"]
        methods = self._paths.get(path)
        parameters: dict[str, str] = {}
        if methods is None:
            methods, parameters = self._match(method, path)
        found = methods.get(method)
        if found is None:
            allow = ", ".join(sorted(methods))
            raise MethodNotAllowed(f"{method} {path[:_SHOWN_CHARACTERS]}: this path takes {allow}", allow=allow)
        scope["endpoint"] = found[0]
        scope["path_params"] = parameters
        return found

    def _match(self, method: str, path: str) -> tuple[_Methods, dict[str, str]]:
        for pattern, methods in self._patterns:
            if match := pattern.fullmatch(path):
                return methods, match.groupdict()
        near = self._nearest(method, path[:_SHOWN_CHARACTERS])
        hint = f"did you mean {method} {near}? All paths: /specui.html" if near else "all are at /specui.html"
        raise PathNotFound(f"{method} {path[:_SHOWN_CHARACTERS]}: no endpoint has this path; {hint}")

    def _nearest(self, method: str, path: str) -> str:
        """Return the endpoint path that is most similar to an unknown path; empty if none is similar."""
        parts = path.split("/")
        known: dict[str, str] = {}
        for endpoint in (methods[method][0] for methods in self._methods if method in methods):
            steps = zip_longest(endpoint.path.split("/"), parts)
            # A parameter matches anything.
            filled = "/".join(given or own if own[:1] == "{" else own for own, given in steps if own)
            known.setdefault(f"/{filled}", endpoint.path)
        return known.get(nearest(path, known, _SIMILAR), "")


def error_of(scope: Scope, cause: Exception) -> HeadraceError:
    """Return the error to respond with for an exception. Defects are logged."""
    if isinstance(cause, HeadraceError):
        return cause
    log.error("defect while serving %s %s", scope["method"], scope["path"][:200], exc_info=cause)
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
