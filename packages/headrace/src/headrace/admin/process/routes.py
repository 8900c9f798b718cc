"""`/adm`: a process, its loggers, its reloads and its end. All need the scope `admin`."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from msgspec import Meta

from headrace.admin.process.modules import ALL, Modules, ModuleView, Reloads
from headrace.admin.process.server_info import ServerInfo, server_info
from headrace.config.known_secrets import SecretMask
from headrace.config.model import HeadraceConfig
from headrace.config.spelling import hint
from headrace.errors import InvalidRequest, RequestBodyMissing
from headrace.http.endpoint import ADMINISTER, JSON, JSON_BODY, Before, Call, CallEvent, Endpoint, Errors
from headrace.http.messages import HttpResponse, unknown_name
from headrace.http.other_processes import OtherProcesses
from headrace.runtime import clock, run_blocking
from headrace.runtime.telemetry.log_levels import change_level, levels, names
from headrace.runtime.telemetry.recent_logs import RecentLogs

T = TypeVar("T")
Level = Literal["DEBUG", "INFO", "WARN", "ERROR"]
_LEVELS: Final = {"DEBUG": logging.DEBUG, "INFO": logging.INFO, "WARN": logging.WARNING, "ERROR": logging.ERROR}
_NAMES: Final = {level: name for name, level in _LEVELS.items()}
_WINDOW_MS: Final = 600_000
_BODY: Final[Errors] = (*JSON_BODY, RequestBodyMissing)
_adm = functools.partial(Endpoint, rule=ADMINISTER)


class LoggerChange(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """A level for a logger and all below it."""

    name: Annotated[str, Meta(max_length=200)]
    level: Level


_decode_changes: Final = msgspec.json.Decoder(Annotated[list[LoggerChange], Meta(max_length=100)]).decode
_decode_names: Final = msgspec.json.Decoder(Annotated[list[str], Meta(max_length=100)]).decode


class LoggerLevel(msgspec.Struct, rename="camel"):
    """A logger that has a level."""

    name: str
    level: str


class ContentQuery(msgspec.Struct, rename="camel", forbid_unknown_fields=True):
    """Which records of the log to return."""

    logger_name: Annotated[str, Meta(max_length=200)] = ""
    """This logger and those below it; by default all."""
    logger_level: Level = "ERROR"
    """Lowest level."""
    start_time: Annotated[int, Meta(ge=0)] | None = None
    """Milliseconds since the epoch; by default ten minutes before the end."""
    end_time: Annotated[int, Meta(ge=0)] | None = None
    """Milliseconds since the epoch; by default now."""
    offset: Annotated[int, Meta(ge=0)] = 0
    """Matching records to leave out, the oldest first."""
    limit: Annotated[int, Meta(ge=1, le=1000)] = 100


class LogEntry(msgspec.Struct, rename="camel"):
    """A record of the log, with secrets masked."""

    timestamp: int
    level: str
    message: str
    correlation_id: str


class LoggerContent(msgspec.Struct):
    """The records of one logger."""

    total: int
    """Matching records of this logger in memory."""
    logs: list[LogEntry]


class ModuleList(msgspec.Struct):
    """The parts of a process that it can reload."""

    modules: list[ModuleView]


class ShutdownReport(msgspec.Struct, rename="camel"):
    """The process ends."""

    time: int
    """Milliseconds since the epoch."""
    service_id: str
    drain_seconds: float
    """How long it waits for work in flight."""


@dataclasses.dataclass(eq=False)
class AdministrationEndpoints:
    """Administration of this process."""

    _config: Callable[[], HeadraceConfig]
    """Returns the settings in force."""
    _logs: RecentLogs
    _modules: Modules
    _shut_down: Callable[[], None]
    _mask: SecretMask
    _others: OtherProcesses | None = None
    """The other processes of the run, if there are several."""
    before: Before | None = None
    """What responds in place of an operation, if a feature sets it."""

    @_adm("GET", "/adm/server/info", "getServerInfo", "Version, machine, libraries and settings")
    async def info(self, call: Call[None, None]) -> ServerInfo:
        return await run_blocking(server_info, self._config())

    @_adm("GET", "/adm/logger", "getLoggers", "Loggers that have a level")
    async def loggers(self, call: Call[None, None]) -> list[LoggerLevel]:
        return _states()

    @_adm(
        "POST",
        "/adm/logger",
        "setLoggers",
        "Change levels of loggers until the process ends",
        request={JSON: list[LoggerChange]},
        example=[{"name": "headrace.kafka", "level": "DEBUG"}],
        errors=_BODY,
        audited="change log levels",
        decoded=False,
    )
    async def set_loggers(self, call: Call[bytes, None]) -> list[LoggerLevel]:
        changes, known = _decode(call.body, _decode_changes), names()
        for change in changes:
            if change.name not in known:
                raise unknown_name("logger", change.name, known)
        call.event = CallEvent("loggers", detail=", ".join(f"{one.name} {one.level}" for one in changes))
        for change in changes:
            change_level(change.name, _LEVELS[change.level])
        await self._ask_others(call)
        return _states()

    async def _ask_others(self, call: Call[bytes, None]) -> Mapping[int, bytes | None]:
        """Have the other processes do the same; return their responses by number, None of one that gives none."""
        others = self._others
        if not others or not others.concern(call.request):
            return {}
        return {**dict.fromkeys(others.numbers), **await others.responses(call.request, call.body)}

    @_adm(
        "GET", "/adm/logger/content", "getLoggerContent", "Latest records of the log, by logger", responses={200: JSON}
    )
    async def content(self, call: Call[None, ContentQuery]) -> HttpResponse:
        return HttpResponse(await run_blocking(self._content, call.query))

    def _content(self, query: ContentQuery) -> dict[str, LoggerContent]:
        end = int(clock.time() * 1000) if query.end_time is None else query.end_time
        start = max(0, end - _WINDOW_MS) if query.start_time is None else query.start_time
        name = "" if query.logger_name == "ROOT" else query.logger_name
        records = self._logs.find(name, _LEVELS[query.logger_level], start, end)
        self._mask.look()
        found: dict[str, LoggerContent] = {}
        for index, record in enumerate(records):
            logger = found.setdefault(record.logger, LoggerContent(0, []))
            logger.total += 1
            if query.offset <= index < query.offset + query.limit:
                text = self._mask(record.message)
                logger.logs.append(LogEntry(record.timestamp, _name_of(record.level), text, record.correlation_id))
        return found

    @_adm("GET", "/adm/modules", "getModules", "What a running process reloads")
    async def modules(self, call: Call[None, None]) -> ModuleList:
        return ModuleList([*self._modules.list()])

    @_adm(
        "POST",
        "/adm/modules",
        "reloadModules",
        "Reload parts of the process by their names, or ALL",
        request={JSON: list[str]},
        example=[ALL],
        errors=_BODY,
        audited="reload",
        decoded=False,
    )
    async def reload(self, call: Call[bytes, None]) -> Reloads:
        names, known = _decode(call.body, _decode_names), {ALL, *(module.name for module in self._modules.list())}
        for name in names:
            if name not in known:
                raise InvalidRequest(f"{name[:60]!r} does not reload without a restart: {hint(name, sorted(known))}")
        call.event = CallEvent("modules", detail=", ".join(dict.fromkeys(names)))
        result = await self._modules.reload(names)
        for number, text in (await self._ask_others(call)).items():
            failed = msgspec.json.decode(text, type=Reloads).failed if text else {"ALL": "it does not respond"}
            result.failed |= {f"{name} of process {number}": why for name, why in failed.items()}
        if result.failed:
            call.event = call.event._replace(outcome="FAILURE", reason=f"failed: {', '.join(result.failed)}")
        return result

    @_adm(
        "DELETE",
        "/adm/shutdown",
        "shutDown",
        "End the process as SIGTERM does: it accepts no new work and finishes what is in flight",
        audited="shut down",
    )
    async def shut_down(self, call: Call[None, None]) -> ShutdownReport:
        call.event = CallEvent("process")
        self._shut_down()
        return ShutdownReport(int(clock.time() * 1000), self._config().audit.service_id, self._config().drain_seconds)


def _states() -> list[LoggerLevel]:
    return [LoggerLevel(name, _name_of(level)) for name, level in levels().items()]


def _name_of(level: int) -> str:
    return _NAMES.get(level) or logging.getLevelName(level)


def _decode(body: bytes, decode: Callable[[bytes], T]) -> T:
    """Return a body that is a list."""
    if not body:
        raise RequestBodyMissing()
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise InvalidRequest(f"the body is not valid for this endpoint: {str(cause)[:200]}") from cause
