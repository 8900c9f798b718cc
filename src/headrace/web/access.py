"""Who may use which endpoint: the one table of rules, and the guard that holds them. What is not in it is denied."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import AuthTokenMissing, HeadraceError, PathNotFound
from headrace.security import Authenticator, Principal
from headrace.security.principals import ADMIN, CHANGE_OWN, METRICS, READ, SEE_OWN, WRITE
from headrace.telemetry.correlation import caller
from headrace.web.exchange import headers_of

T = TypeVar("T")
Note = Callable[[str, str, str, str], None]
"""Notes an operation in the audit: action, target, reason, outcome."""


class Rule(NamedTuple):
    """What an endpoint asks of its caller."""

    any_of: tuple[str, ...]
    """Scopes of which one is enough; none: everybody may come."""
    action: str = ""
    """`produce`, `consume` or `group` where patterns decide."""
    parameter: str = ""
    """Part of the path that names the topic or group; where the body names it, the route calls `require`."""


OPEN: Final = Rule(())
_SEE: Final = Rule((ADMIN, SEE_OWN, CHANGE_OWN))
_CHANGE: Final = Rule((ADMIN, CHANGE_OWN))
RULES: Final[Mapping[tuple[str, str], Rule]] = {
    ("POST", "/producers/{topic}"): Rule((WRITE,), "produce", "topic"),
    ("POST", "/transactions"): Rule((WRITE,), "produce"),
    ("GET", "/health/liveness"): OPEN,
    ("GET", "/health/readiness"): OPEN,
    ("GET", "/health/{serviceId}"): OPEN,
    ("GET", "/live"): OPEN,
    ("GET", "/ready"): OPEN,
    ("GET", "/"): OPEN,
    ("GET", "/metrics"): Rule((METRICS, ADMIN)),
    ("GET", "/spec.yaml"): OPEN,
    ("GET", "/openapi.json"): OPEN,
    ("GET", "/specui.html"): OPEN,
    ("GET", "/specui/start.js"): OPEN,
    ("GET", "/specui/swagger-ui-bundle.js"): OPEN,
    ("GET", "/specui/swagger-ui.css"): OPEN,
    ("GET", "/adm/dead-letters"): Rule((ADMIN,)),
    ("GET", "/adm/dead-letters/{topic}"): Rule((ADMIN,)),
    ("GET", "/adm/dead-letters/{topic}/statistics"): Rule((ADMIN,)),
    ("GET", "/consumers/deadLetter/reactive"): Rule((READ, WRITE), "consume"),
    ("POST", "/consumers/deadLetter/reactive"): Rule((READ, WRITE), "consume"),
    ("POST", "/consumers/active/audit"): Rule((READ, WRITE), "consume"),
    ("GET", "/adm/reactive-consumers"): _SEE,
    ("GET", "/adm/reactive-consumers/{name}"): _SEE,
    ("POST", "/adm/reactive-consumers/{name}/pause"): _CHANGE,
    ("POST", "/adm/reactive-consumers/{name}/resume"): _CHANGE,
    ("POST", "/adm/reactive-consumers/{name}/seek"): _CHANGE,
    ("POST", "/adm/reactive-consumers/{name}/skip"): _CHANGE,
    ("PATCH", "/adm/reactive-consumers/{name}/settings"): _CHANGE,
    ("DELETE", "/adm/reactive-consumers/{name}/settings"): _CHANGE,
    ("DELETE", "/adm/reactive-consumers/{name}/commands/{id}"): _CHANGE,
    ("GET", "/reactive-consumers"): _SEE,
    ("GET", "/reactive-consumers/{name}"): _SEE,
    ("PUT", "/reactive-consumers/{name}"): Rule((CHANGE_OWN,)),
    ("DELETE", "/reactive-consumers/{name}"): _CHANGE,
    ("POST", "/adm/dead-letters/{topic}/redrive"): Rule((ADMIN,)),
    ("POST", "/adm/dead-letters/{topic}/drop"): Rule((ADMIN,)),
    ("POST", "/adm/dead-letters/{topic}/quarantine"): Rule((ADMIN,)),
    ("POST", "/adm/replays"): Rule((ADMIN,)),
    ("POST", "/adm/messagereplaymetadata"): Rule((ADMIN,)),
    ("GET", "/adm/jobs"): Rule((ADMIN,)),
    ("GET", "/adm/jobs/{job}"): Rule((ADMIN,)),
    ("POST", "/adm/jobs/{job}/pause"): Rule((ADMIN,)),
    ("POST", "/adm/jobs/{job}/resume"): Rule((ADMIN,)),
    ("POST", "/adm/jobs/{job}/stop"): Rule((ADMIN,)),
}
"""Every endpoint by method and path."""

_OPEN_PATHS: Final = tuple(path.partition("{")[0] for (_, path), rule in RULES.items() if rule == OPEN and path != "/")
_PRINCIPAL: Final = "headrace.principal"


def require(scope: Scope, any_of: tuple[str, ...], action: str, name: str) -> None:
    """Return if the request's principal may touch a topic or group that its body names.

    Raises:
        AuthTokenScopeMismatch, ScopeTokenScopeMismatch: It may not.
    """
    principal = principal_of(scope)
    if principal:
        principal.require(any_of, action, name)


def principal_of(scope: Scope) -> Principal | None:
    """Return who sends a request; None where nobody has to say."""
    return scope.get(_PRINCIPAL)


def is_admin(scope: Scope) -> bool:
    """Return whether the request's principal may do everything; without authentication every caller may."""
    principal = principal_of(scope)
    return principal is None or ADMIN in principal.scopes


def who() -> str:
    """Return who asks, for people."""
    return caller.get() or "anonymous"


async def noted(note: Note, action: str, target: str, reason: str, work: Awaitable[T]) -> T:
    """Do something, and note in the audit how it ended."""
    try:
        done = await work
    except HeadraceError as error:
        note(action, target, reason or error.description, "FAILURE")
        raise
    note(action, target, reason, "SUCCESS")
    return done


def may_steer(scope: Scope, owner: str) -> bool:
    """Return whether the request's principal may see and steer what is somebody's: the owner, and administrators."""
    principal = principal_of(scope)
    return is_admin(scope) or (principal is not None and owner == principal.name)


def expires_at(scope: Scope) -> float:
    """Return until when the request's principal is known, in seconds since the epoch; what lasts longer ends then."""
    principal = principal_of(scope)
    return principal.expires_at if principal else float("inf")


def is_known(scope: Scope) -> bool:
    """Return whether the caller proved who it is, or nobody has to."""
    return scope.get(_PRINCIPAL, True) is not None


class Guard:
    """Finds out who calls before a path is looked at; so strangers learn nothing of which paths there are."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator) -> None:
        self._app = app
        self._authenticator = authenticator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_PRINCIPAL] = None
        if scope["path"] == "/" or scope["path"].startswith(_OPEN_PATHS):
            with contextlib.suppress(HeadraceError):  # a probe with an old token is answered as one with none
                scope[_PRINCIPAL] = await self._identify(scope, wait=False)
        else:
            scope[_PRINCIPAL] = await self._identify(scope, wait=True)
        principal: Principal | None = scope[_PRINCIPAL]
        if principal:
            caller.set(principal.name)
        await self._app(scope, receive, send)

    async def _identify(self, scope: Scope, *, wait: bool) -> Principal:
        address = scope["client"][0] if scope.get("client") else ""
        certificate = scope["state"].get("certificate")
        return await self._authenticator.identify(headers_of(scope), certificate, address, wait=wait)

    def protect(self, path: str, app: ASGIApp) -> ASGIApp:
        """Return an endpoint behind its rule."""

        async def behind_rule(scope: Scope, receive: Receive, send: Send) -> None:
            method = "GET" if scope["method"] == "HEAD" else scope["method"]
            rule = RULES.get((method, path))
            principal: Principal | None = scope[_PRINCIPAL]
            if rule is None:
                raise PathNotFound()
            if rule == OPEN:
                await app(scope, receive, send)
                return
            if principal is None:
                raise AuthTokenMissing()
            name = scope["path_params"][rule.parameter] if rule.parameter else None
            principal.require(rule.any_of, rule.action, name)
            self._authenticator.in_flight.enter(principal.name)
            try:
                await app(scope, receive, send)
            finally:
                self._authenticator.in_flight.leave(principal.name)

        return behind_rule
