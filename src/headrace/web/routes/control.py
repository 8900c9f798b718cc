"""`/adm/reactive-consumers`: how what runs is, and steering it."""

from __future__ import annotations

import difflib
from collections.abc import Awaitable
from functools import partial
from typing import Annotated, Any, Final, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.config.http import HttpConfig
from headrace.control.commands import CommandAnswer, Commands, SeekRequest, SettingsRequest, SkipRequest, Where
from headrace.control.consumer_control import ConsumerControl
from headrace.control.consumer_status import ConsumerStatuses, Summary
from headrace.control.running_consumer import RunningConsumer
from headrace.errors import NotFound
from headrace.web.access import Note, may_steer, noted, who
from headrace.web.bodies import answer, body_of, query_of

CONSUMERS: Final = "/adm/reactive-consumers"
CONSUMER: Final = CONSUMERS + "/{name}"
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=60)]


class Consumers(msgspec.Struct):
    """Every consumer of this process that the caller may see."""

    consumers: list[Summary]


class WaitQuery(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """How long to wait for the process that has the partition."""

    wait_seconds: _Seconds = 10.0


class TakenBack(msgspec.Struct):
    """Partitions in which a command waited no longer."""

    id: str
    partitions: list[str]


class ControlApi(NamedTuple):
    """What the endpoints speak to."""

    control: ConsumerControl
    statuses: ConsumerStatuses
    commands: Commands
    note: Note


class _Endpoints:
    def __init__(self, api: ControlApi, settings: HttpConfig) -> None:
        self._api = api
        self._settings = settings

    async def list(self, request: Request) -> Response:
        api = self._api
        shown = [
            api.statuses.summary(one) for one in api.control.consumers.values() if may_steer(request.scope, one.owner)
        ]
        return answer(Consumers(sorted(shown, key=lambda one: one.name)))

    async def show(self, request: Request) -> Response:
        return await self._details(self._consumer(request))

    async def hold(self, action: str, request: Request) -> Response:
        consumer, where = self._consumer(request), await self._body(request, Where)
        commands = self._api.commands
        pauses = action == "pause"
        work = commands.pause(consumer, where, who()) if pauses else commands.resume(consumer, where)
        await self._noted(action, consumer, where, work)
        return await self._details(consumer)

    async def command(self, action: str, kind: type[Any], request: Request) -> Response:
        consumer, asked = self._consumer(request), await self._body(request, kind)
        wait = query_of(request, WaitQuery).wait_seconds
        work = getattr(self._api.commands, action)(consumer, asked, who(), wait)
        done: CommandAnswer = await self._noted(action, consumer, asked, work)
        return answer(done, 202 if done.pending else 200)

    async def settings(self, request: Request) -> Response:
        consumer, commands = self._consumer(request), self._api.commands
        if request.method == "DELETE":
            await self._noted("reset settings", consumer, None, commands.reset(consumer))
        else:
            asked = await self._body(request, SettingsRequest)
            await self._noted("change settings", consumer, asked, commands.change(consumer, asked, who()))
        return await self._details(consumer)

    async def take_back(self, request: Request) -> Response:
        consumer, identity = self._consumer(request), request.path_params["id"]
        taken = await self._noted(
            f"take back {identity}", consumer, None, self._api.control.take_back(consumer, identity)
        )
        if not taken:
            raise NotFound(f"no command {identity[:60]} of {consumer.name} waits: it is done, or there was none")
        return answer(TakenBack(identity, [str(partition) for partition in taken]))

    def _consumer(self, request: Request) -> RunningConsumer:
        consumers, name = self._api.control.consumers, request.path_params["name"]
        consumer = consumers.get(name)
        if consumer is None or not may_steer(request.scope, consumer.owner):
            seen = [known for known, one in consumers.items() if may_steer(request.scope, one.owner)]
            near = difflib.get_close_matches(name, seen, 1, 0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sorted(seen)) or 'none'}"
            raise NotFound(f"no consumer here is called {name[:60]!r}: {hint}")
        return consumer

    async def _details(self, consumer: RunningConsumer) -> Response:
        return answer(await self._api.statuses.details(consumer))

    async def _body(self, request: Request, kind: type[Any]) -> Any:
        return await body_of(request, kind, self._settings)

    async def _noted(self, action: str, consumer: RunningConsumer, asked: Any, work: Awaitable[Any]) -> Any:
        """Do something, and note in the audit who asked for it and how it ended."""
        target = f"{consumer.kind} {consumer.name}"
        told = msgspec.json.encode({name: value for name, value in _said(asked) if name != "reason"}).decode()
        action = action if told == "{}" else f"{action} {told}"
        return await noted(self._api.note, action, target, getattr(asked, "reason", ""), work)


def _said(asked: Any) -> list[tuple[str, Any]]:
    fields = msgspec.structs.asdict(asked).items() if asked is not None else ()
    return [(name, value) for name, value in fields if value is not None and value is not msgspec.UNSET]


def control_routes(api: ControlApi, settings: HttpConfig) -> list[Route]:
    """Return the endpoints."""
    to = _Endpoints(api, settings)
    return [
        Route(CONSUMERS, to.list),
        Route(CONSUMER, to.show),
        Route(f"{CONSUMER}/pause", partial(to.hold, "pause"), methods=["POST"]),
        Route(f"{CONSUMER}/resume", partial(to.hold, "resume"), methods=["POST"]),
        Route(f"{CONSUMER}/seek", partial(to.command, "seek", SeekRequest), methods=["POST"]),
        Route(f"{CONSUMER}/skip", partial(to.command, "skip", SkipRequest), methods=["POST"]),
        Route(f"{CONSUMER}/settings", to.settings, methods=["PATCH", "DELETE"]),
        Route(f"{CONSUMER}/commands/{{id}}", to.take_back, methods=["DELETE"]),
    ]
