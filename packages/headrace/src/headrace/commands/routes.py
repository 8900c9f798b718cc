"""`/adm/reactive-consumers`: status and control of reactive consumers and functions."""

import functools
from collections.abc import Sequence
from typing import Annotated, Any, Final

import msgspec

from headrace import errors
from headrace.commands.commands import Commands, PartitionsRequest, SeekRequest, SettingsRequest, SkipRequest
from headrace.commands.consumer_control import CommandResponse, ConsumerControl
from headrace.commands.consumer_status import ConsumerStatuses, Details, Summary
from headrace.commands.joined_status import joined, joined_details
from headrace.config.spelling import hint
from headrace.consumers.running_consumer import RunningConsumer
from headrace.errors import NotFound
from headrace.http.endpoint import CHANGE, KAFKA, SEE, Call, CallEvent, Endpoint, Errors, caller_name, may_control
from headrace.http.messages import HttpResponse
from headrace.http.other_processes import OtherProcesses

CONSUMERS: Final = "/adm/reactive-consumers"
CONSUMER: Final = CONSUMERS + "/{name}"
_ERRORS: Final[Errors] = (*KAFKA, errors.NotFound)
_changes = functools.partial(Endpoint, rule=CHANGE, errors=_ERRORS)
_COMMAND: Final = {200: CommandResponse, 202: CommandResponse}
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=60)]


class Consumers(msgspec.Struct):
    """The consumers of this process that the caller may see."""

    consumers: list[Summary]


class WaitQuery(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """How long to wait for the process to which the partition is assigned."""

    wait_seconds: _Seconds = 10.0


class CancelledCommand(msgspec.Struct):
    """Partitions in which a pending command was cancelled."""

    id: str
    partitions: list[str]


class ControlEndpoints:
    """Status and control of the consumers of this deployment."""

    def __init__(
        self,
        control: ConsumerControl,
        statuses: ConsumerStatuses,
        commands: Commands,
        others: OtherProcesses | None = None,
    ) -> None:
        """Serve them; `others` are the other processes of the run, if there are several."""
        self._others = others
        self._control = control
        self._statuses = statuses
        self._commands = commands

    @Endpoint("GET", CONSUMERS, "listConsumers", "Every reactive consumer and function", SEE)
    async def list(self, call: Call[None, None]) -> Consumers:
        shown = [self._statuses.summary(one) for one in self._visible(call)]
        if self._others:
            shown = joined([shown, *(one.consumers for one in await self._others.ask(call, Consumers))])
        return Consumers(sorted(shown, key=lambda one: one.name))

    @Endpoint("GET", CONSUMER, "showConsumer", "Status of a consumer and its partitions", SEE, errors=(NotFound,))
    async def show(self, call: Call[None, None]) -> Details:
        found = await self._statuses.details(self._consumer(call))
        return joined_details([found, *await self._others.ask(call, Details)]) if self._others else found

    @_changes(
        "POST",
        f"{CONSUMER}/pause",
        "pauseConsumer",
        "Pause a consumer or some of its partitions; records in flight finish first",
        example={"reason": "the database is being moved"},
        audited="pause",
    )
    async def pause(self, call: Call[PartitionsRequest, None]) -> Details:
        consumer = self._consumer_of(call)
        await self._commands.pause(consumer, call.body, caller_name())
        return await self._statuses.details(consumer)

    @_changes(
        "POST",
        f"{CONSUMER}/resume",
        "resumeConsumer",
        "Resume a consumer or some of its partitions",
        example={},
        audited="resume",
    )
    async def resume(self, call: Call[PartitionsRequest, None]) -> Details:
        consumer = self._consumer_of(call)
        await self._commands.resume(consumer, call.body)
        return await self._statuses.details(consumer)

    @_changes(
        "POST",
        f"{CONSUMER}/seek",
        "seekConsumer",
        "Continue at another position in some or all partitions; records in flight finish first",
        responses=_COMMAND,
        example={"to": "latest", "reason": "the waiting records are obsolete"},
        errors=(*_ERRORS, errors.OffsetsKeptElsewhere),
        audited="seek",
    )
    async def seek(self, call: Call[SeekRequest, WaitQuery]) -> HttpResponse:
        consumer = self._consumer_of(call)
        return _response(await self._commands.seek(consumer, call.body, caller_name(), call.query.wait_seconds))

    @_changes(
        "POST",
        f"{CONSUMER}/skip",
        "skipRecord",
        "Skip one record for good",
        responses=_COMMAND,
        example={"partition": 0, "offset": 0, "reason": "not an order, see ticket 7"},
        audited="skip",
    )
    async def skip(self, call: Call[SkipRequest, WaitQuery]) -> HttpResponse:
        consumer = self._consumer_of(call)
        return _response(await self._commands.skip(consumer, call.body, caller_name(), call.query.wait_seconds))

    @_changes(
        "PATCH",
        f"{CONSUMER}/settings",
        "changeSettings",
        "Use other settings at once, in every process and after restarts",
        example={"rateRecords": 100},
        audited="change settings",
    )
    async def change_settings(self, call: Call[SettingsRequest, None]) -> Details:
        consumer = self._consumer_of(call)
        await self._commands.change(consumer, call.body, caller_name())
        return await self._statuses.details(consumer)

    @_changes("DELETE", f"{CONSUMER}/commands/{{id}}", "recallCommand", "Cancel a pending command", audited="cancel")
    async def cancel(self, call: Call[None, None]) -> CancelledCommand:
        consumer, identity = self._consumer_of(call, call.parameters["id"]), call.parameters["id"]
        partitions = await self._control.cancel(consumer, identity)
        if not partitions:
            raise NotFound(f"command {identity[:60]} of {consumer.name} is not pending: it is done or does not exist")
        return CancelledCommand(identity, [str(partition) for partition in partitions])

    def _consumer(self, call: Call[Any, Any]) -> RunningConsumer:
        name, visible = call.parameters["name"], {one.name: one for one in self._visible(call)}
        if consumer := visible.get(name):
            return consumer
        raise NotFound(f"consumer {name[:60]!r} does not run here: {hint(name, sorted(visible))}")

    def _visible(self, call: Call[Any, Any]) -> Sequence[RunningConsumer]:
        return [one for one in self._control.consumers.values() if may_control(call.request, one.owner)]

    def _consumer_of(self, call: Call[Any, Any], detail: str = "") -> RunningConsumer:
        """Return the consumer, and add the values of the request to its audit event."""
        consumer = self._consumer(call)
        fields = {} if call.body is None else msgspec.structs.asdict(call.body)
        reason = fields.pop("reason", "")
        given = {name: value for name, value in fields.items() if value is not None and value is not msgspec.UNSET}
        detail = msgspec.json.encode(given).decode() if given else detail
        call.event = CallEvent(f"{consumer.kind} {consumer.name}", reason, detail)
        return consumer


def _response(response: CommandResponse) -> HttpResponse:
    return HttpResponse(response, 202 if response.pending else 200)
