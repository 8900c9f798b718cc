"""`/reactive-consumers`: consumers that teams register, change and remove. Each team sees its own."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec

from headrace import errors
from headrace.commands.registration_table import Registration, Registrations
from headrace.config.explain import mask
from headrace.config.registered import check_size
from headrace.errors import InvalidRequest
from headrace.http.auth.principals import ADMIN, CHANGE_OWN
from headrace.http.endpoint import CHANGE, JSON, KAFKA, SEE, Call, CallEvent, Endpoint, Rule, caller_name
from headrace.http.messages import HttpResponse
from headrace.runtime import Readiness

REGISTRATIONS: Final = "/reactive-consumers"
REGISTRATION: Final = REGISTRATIONS + "/{name}"
_LIST: Final = (errors.KafkaUnavailable,)
_KNOWN: Final = (errors.NotFound, errors.KafkaUnavailable)


class RegistrationSettings(msgspec.Struct):
    """The settings of a reactive consumer as in the file, and `enabled`."""

    topics: list[str]
    group: str
    backend: dict[str, Any]
    enabled: bool = True


class RegistrationView(msgspec.Struct, rename="camel", omit_defaults=True):
    """A registered consumer."""

    name: str
    owner: str
    version: int
    """Changes with each change of the registration."""
    changed_at: str
    state: Literal["running", "waiting", "disabled", "refused"]
    """`waiting`: it does not run yet, see `why`. `refused`: it is not allowed to run; `why` says what to change."""
    why: str = ""
    settings: dict[str, Any] | None = None
    """The registered settings, without secrets and header values."""


class RegistrationList(msgspec.Struct):
    """Registered consumers, by name."""

    consumers: list[RegistrationView]


class Removed(msgspec.Struct):
    """A consumer that was removed. Its group keeps its offsets."""

    name: str


class RegistrationEndpoints:
    """Registers consumers, and shows, changes and removes those of the caller."""

    def __init__(self, registrations: Registrations, readiness_of: Callable[[str], Readiness]) -> None:
        """Make the endpoints; `readiness_of` returns the readiness of a registered consumer."""
        self._registrations = registrations
        self._readiness_of = readiness_of

    @Endpoint("GET", REGISTRATIONS, "listRegistrations", "The caller's registered consumers", SEE, errors=_LIST)
    async def list(self, call: Call[None, None]) -> RegistrationList:
        return RegistrationList([self._view(one) for one in self._registrations.all_of(_owner(call))])

    @Endpoint("GET", REGISTRATION, "showRegistration", "A registered consumer of the caller", SEE, errors=_KNOWN)
    async def show(self, call: Call[None, None]) -> RegistrationView:
        return self._details(self._registrations.one_of(_owner(call), call.parameters["name"]))

    @Endpoint(
        "PUT",
        REGISTRATION,
        "register",
        "Register a reactive consumer, or change it",
        Rule((CHANGE_OWN,)),
        {200: RegistrationView, 201: RegistrationView},
        request={JSON: RegistrationSettings},
        example={"topics": ["orders"], "group": "billing", "backend": {"url": "http://localhost:8444/kafka/records"}},
        errors=(*KAFKA, errors.Conflict, errors.RegistrationQuota),
        audited="register",
        decoded=False,
    )
    async def put(self, call: Call[bytes, None]) -> HttpResponse:
        name = call.parameters["name"]
        check_size(len(call.body))
        try:
            config = msgspec.json.decode(call.body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
            raise InvalidRequest(f"the body is not valid JSON: {str(cause)[:200]}") from cause
        call.event = CallEvent(f"reactive {name}")
        one, new = await self._registrations.put(caller_name(), call.request.caller.principal, name, config)
        return HttpResponse(self._details(one), 201 if new else 200)

    @Endpoint(
        "DELETE",
        REGISTRATION,
        "unregister",
        "Remove a registered consumer; its group keeps its offsets",
        CHANGE,
        errors=(*KAFKA, errors.NotFound),
        audited="unregister",
    )
    async def remove(self, call: Call[None, None]) -> Removed:
        name = call.parameters["name"]
        call.event = CallEvent(f"reactive {name}")
        await self._registrations.remove(_owner(call), name)
        return Removed(name)

    def _details(self, one: Registration) -> RegistrationView:
        view = self._view(one)
        view.settings = mask(one.config)
        return view

    def _view(self, one: Registration) -> RegistrationView:
        at = datetime.fromtimestamp(one.at_ms / 1000, UTC).isoformat(timespec="milliseconds")
        view = RegistrationView(one.name, one.owner, one.version, at, "running")
        if refused := self._registrations.refusal_of(one):
            view.state, view.why = "refused", refused.description
        elif one.settings and not one.settings.enabled:
            view.state = "disabled"
        elif why := self._readiness_of(one.name):
            view.state, view.why = "running" if why.ready else "waiting", why.reason
        return view


def _owner(call: Call[Any, Any]) -> str | None:
    """Return the owner whose registrations the caller sees; None for those of all owners."""
    principal = call.request.caller.principal
    return principal.name if principal and ADMIN not in principal.scopes else None
