"""`/adm/chaosmonkey`: assaults on this process, which begin only if `admin.chaos` allows it."""

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.config.backend import is_this_machine
from headrace.config.model import HeadraceConfig
from headrace.errors import Forbidden, InvalidRequest, NotFound, RequestBodyMissing
from headrace.http.endpoint import ADMINISTER, JSON, JSON_BODY, Call, CallEvent, Endpoint, caller_name
from headrace.http.messages import HttpResponse
from headrace_dialects.light4j.chaos import ASSAULTS, Assault, AssaultRequest, AssaultView, Chaos
from headrace_dialects.light4j.light_sections import LightSections
from headrace_dialects.light4j.pass_through import PassThrough


class ChaosEndpoints:
    """Starts assaults, and shows those that run."""

    def __init__(self, config: Callable[[], HeadraceConfig], chaos: Chaos, backend: PassThrough) -> None:
        """Make the endpoints; `config` returns the settings in force."""
        self._config = config
        self._chaos = chaos
        self._backend = backend

    @Endpoint(
        "GET", "/adm/chaosmonkey", "getAssaults", "Assaults that run", ADMINISTER, {200: JSON}, errors=(InvalidRequest,)
    )
    async def assaults(self, call: Call[None, None]) -> HttpResponse:
        self._backend.refuse(call)
        return HttpResponse({name: self._chaos.running().get(name) for name in ASSAULTS})

    @Endpoint(
        "POST",
        "/adm/chaosmonkey/{assault}",
        "startAssault",
        "Start an assault on this process, which ends by itself",
        ADMINISTER,
        example={"seconds": 30, "level": 2, "milliseconds": 500},
        errors=(*JSON_BODY, RequestBodyMissing, InvalidRequest, Forbidden, NotFound),
        audited="assault",
    )
    async def assault(self, call: Call[AssaultRequest, None]) -> AssaultView:
        self._backend.refuse(call)
        assault, by = _assault_of(call.parameters["assault"]), caller_name()
        self._check_chaos(call)
        call.event = CallEvent("process", detail=f"{assault} {msgspec.json.encode(call.body).decode()}")
        if not call.body.seconds:
            self._chaos.end(assault)
            return AssaultView(0.0, by, call.body)
        self._chaos.begin(assault, call.body, by)
        return self._chaos.running()[assault]

    def _check_chaos(self, call: Call[Any, Any]) -> None:
        """Return if the settings allow this caller to start assaults."""
        allowed = self._config().section(LightSections).admin.chaos
        client = call.request.client_address
        if allowed == "none":
            raise InvalidRequest("assaults are switched off here: set admin.chaos to loopback or anywhere")
        if allowed == "loopback" and not (client and is_this_machine(client)):
            raise Forbidden("only callers on this machine may start assaults (admin.chaos)")


def _assault_of(name: str) -> Assault:
    for assault in ASSAULTS:
        if name == assault:
            return assault
    raise NotFound(f"assault {name[:60]!r} does not exist: use {', '.join(ASSAULTS)}")
