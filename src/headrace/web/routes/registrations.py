"""`/reactive-consumers`: consumers that teams register, change and remove; each sees its own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.config.http import HttpConfig
from headrace.config.registered import shown
from headrace.control.registrations import Registration, Registrations
from headrace.errors import InvalidRequest
from headrace.lifecycle import Readiness
from headrace.security.principals import ADMIN
from headrace.web.access import Note, noted, principal_of, who
from headrace.web.bodies import answer
from headrace.web.exchange import headers_of, read_json

REGISTRATIONS: Final = "/reactive-consumers"
REGISTRATION: Final = REGISTRATIONS + "/{name}"


class RegistrationSettings(msgspec.Struct):
    """What stands below a consumer's name in the file, with what else may stand there, and `enabled`."""

    topics: list[str]
    group: str
    backend: dict[str, Any]
    enabled: bool = True


class RegistrationView(msgspec.Struct, rename="camel", omit_defaults=True):
    """A registered consumer."""

    name: str
    owner: str
    version: int
    """Another one after each change."""
    changed_at: str
    state: Literal["running", "waiting", "disabled", "refused"]
    """`waiting`: it is to run, and `why` says what for; `refused`: it may not, and `why` says what to change."""
    why: str = ""
    settings: dict[str, Any] | None = None
    """What was registered, without secrets and without the values of headers."""


class RegistrationList(msgspec.Struct):
    """Registered consumers, by name."""

    consumers: list[RegistrationView]


class Removed(msgspec.Struct):
    """A consumer that is registered no longer; its group keeps its offsets."""

    name: str


class RegistrationApi(NamedTuple):
    """What the endpoints speak to."""

    registrations: Registrations
    readiness_of: Callable[[str], Readiness]
    """How what runs under a name is."""
    note: Note


class _Endpoints:
    def __init__(self, api: RegistrationApi, settings: HttpConfig) -> None:
        self._api = api
        self._settings = settings

    async def list(self, request: Request) -> Response:
        found = self._api.registrations.all_of(_whose(request))
        return answer(RegistrationList([self._view(one) for one in found]))

    async def show(self, request: Request) -> Response:
        return self._answer(self._api.registrations.one_of(_whose(request), request.path_params["name"]))

    async def put(self, request: Request) -> Response:
        name, principal = request.path_params["name"], principal_of(request.scope)
        body = await read_json(request.receive, headers_of(request.scope), self._settings)
        self._api.registrations.check_size(len(body))
        try:
            config = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise InvalidRequest(f"the body is no JSON: {str(cause)[:200]}") from cause
        work = self._api.registrations.put(who(), principal, name, config)
        one, new = await noted(self._api.note, "register", f"reactive {name}", "", work)
        return self._answer(one, 201 if new else 200)

    async def remove(self, request: Request) -> Response:
        name = request.path_params["name"]
        work = self._api.registrations.remove(_whose(request), name)
        await noted(self._api.note, "unregister", f"reactive {name}", "", work)
        return answer(Removed(name))

    def _answer(self, one: Registration, status: int = 200) -> Response:
        view = self._view(one)
        view.settings = shown(one.config)
        return answer(view, status)

    def _view(self, one: Registration) -> RegistrationView:
        at = datetime.fromtimestamp(one.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
        view = RegistrationView(one.name, one.owner, one.version, at, "running")
        if refused := self._api.registrations.refusal_of(one):
            view.state, view.why = "refused", refused.description
        elif one.settings and not one.settings.enabled:
            view.state = "disabled"
        elif why := self._api.readiness_of(one.name):
            view.state, view.why = "running" if why.ready else "waiting", why.reason
        return view


def _whose(request: Request) -> str | None:
    """Return whose registrations a caller sees; None for everybody's."""
    principal = principal_of(request.scope)
    return principal.name if principal and ADMIN not in principal.scopes else None


def registration_routes(api: RegistrationApi, settings: HttpConfig) -> list[Route]:
    """Return the endpoints."""
    to = _Endpoints(api, settings)
    return [
        Route(REGISTRATIONS, to.list),
        Route(REGISTRATION, to.show),
        Route(REGISTRATION, to.put, methods=["PUT"]),
        Route(REGISTRATION, to.remove, methods=["DELETE"]),
    ]
