"""What the endpoints that steer consumers take and answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from headrace import errors
from headrace.control.commands import CommandAnswer, SeekRequest, SettingsRequest, SkipRequest, Where
from headrace.control.consumer_status import Details
from headrace.web.operation import JSON, KAFKA, OWN_BODY, Errors, Operation
from headrace.web.routes.control import CONSUMER, CONSUMERS, Consumers, TakenBack, WaitQuery

_STEERED: Final[Errors] = (*OWN_BODY, *KAFKA, errors.NotFound)
_COMMAND: Final = {200: CommandAnswer, 202: CommandAnswer}
_TIMES: Final[Errors] = (*KAFKA, errors.NotFound)

CONTROL_OPERATIONS: Final[Mapping[tuple[str, str], Operation]] = {
    ("GET", CONSUMERS): Operation("listConsumers", "Every reactive consumer and function", {200: Consumers}),
    ("GET", CONSUMER): Operation(
        "showConsumer", "How a consumer and each of its partitions is", {200: Details}, errors=(errors.NotFound,)
    ),
    ("POST", f"{CONSUMER}/pause"): Operation(
        "pauseConsumer",
        "Have a consumer, or partitions of it, stand still; what is under way ends",
        {200: Details},
        request={JSON: Where},
        example={"reason": "the database is being moved"},
        errors=_STEERED,
    ),
    ("POST", f"{CONSUMER}/resume"): Operation(
        "resumeConsumer", "Have it go on", {200: Details}, request={JSON: Where}, example={}, errors=_STEERED
    ),
    ("POST", f"{CONSUMER}/seek"): Operation(
        "seekConsumer",
        "Go on elsewhere in some or all partitions; what is under way ends first",
        _COMMAND,
        request={JSON: SeekRequest},
        example={"to": "end", "reason": "what waits is of no use any more"},
        query=WaitQuery,
        errors=(*_STEERED, errors.OffsetsKeptElsewhere),
    ),
    ("POST", f"{CONSUMER}/skip"): Operation(
        "skipRecord",
        "Pass over one record for good",
        _COMMAND,
        request={JSON: SkipRequest},
        example={"partition": 0, "offset": 0, "reason": "no order, see ticket 7"},
        query=WaitQuery,
        errors=_STEERED,
    ),
    ("PATCH", f"{CONSUMER}/settings"): Operation(
        "changeSettings",
        "Use other settings at once, in every process and after restarts",
        {200: Details},
        request={JSON: SettingsRequest},
        example={"rateRecords": 100},
        errors=_STEERED,
    ),
    ("DELETE", f"{CONSUMER}/settings"): Operation(
        "resetSettings", "Use the settings of the file again", {200: Details}, errors=_TIMES
    ),
    ("DELETE", f"{CONSUMER}/commands/{{id}}"): Operation(
        "takeBackCommand", "Take a command back that no process has done yet", {200: TakenBack}, errors=_TIMES
    ),
}
