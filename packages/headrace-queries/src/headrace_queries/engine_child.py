"""One process of the engine as this process sees it: its start, its requests, its end, and what ends it."""

import asyncio
import contextlib
import functools
import itertools
import logging
import pickle
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from headrace.errors import Forbidden, HeadraceError, QueriesUnavailable, StatementRejected
from headrace.framing import ProtocolBroken
from headrace.runtime import ChildProcess, Clock, Deadline, RestartPauses, Service
from headrace.runtime.memory import memory_bytes
from headrace_queries.engine_protocol import (
    Ask,
    Cancel,
    EngineSetup,
    Filter,
    Lookup,
    Messages,
    Rebuild,
    RequestFailed,
    Statuses,
    Subscribe,
    TableStatus,
    ToEngine,
    ToParent,
    decode_to_parent,
    encode_message,
)
from headrace_queries.query_sections import QuerySections

log = logging.getLogger(__name__)

GRACE_SECONDS: Final = 5.0
"""A request that has no response this long after its time limit gets an error."""
_WATCH_SECONDS: Final = 0.25
_SILENT_SECONDS: Final = 30.0
"""An engine that sends its states twice a second, and none for this time, is ended."""
_TALKS_SECONDS: Final = 2.0
"""One that has sent something within this time is at work, so that a request without a response is stuck."""
_EXTRA_BYTES: Final = 256 << 20
_STEADY_SECONDS: Final = 10.0
_READY_PAUSE_SECONDS: Final = 2.0
"""Longest pause after an engine that was ready: short, because statements end it more often than its files do."""
_LONGEST_PAUSE_SECONDS: Final = 60.0
_ENDED: Final = "the process that runs statements has ended meanwhile, and is restarted: send the request again"
_STARTING: Final = "starting: the process that runs statements is not ready yet; send the request again"
_Request = Ask | Lookup | Rebuild | Subscribe | Filter
_numbers = itertools.count(1)
_ERRORS: Final[Mapping[str, type[HeadraceError]]] = {
    "invalid": StatementRejected,
    "timeout": StatementRejected,
    "memory": StatementRejected,
    "forbidden": Forbidden,
    "unavailable": QueriesUnavailable,
}


class EngineChild(Service):
    """Runs one engine process, and restarts it from its files when it ends."""

    def __init__(
        self,
        config: QuerySections,
        clock: Clock,
        *,
        statements: bool,
        on_message: Callable[[ToParent], None],
        on_end: Callable[[], None],
    ) -> None:
        """Prepare.

        Args:
            statements: Whether it is the one that runs statements of callers.
            on_message: Called with each message that is not the response to a request.
            on_end: Called when a process has ended.
        """
        super().__init__("engine of statements" if statements else "engine of tables")
        # Settings.
        self._config = config
        self._clock = clock
        self._statements = statements
        self._on_message = on_message
        self._on_end = on_end
        # The present process.
        self.tables: dict[str, TableStatus] = {}
        self.problem = "starting"
        """Why it is not ready; empty if it is."""
        self._process: ChildProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._heard_at = 0.0
        self._end_reason = ""
        self._responses: dict[int, asyncio.Future[ToParent]] = {}

    @property
    def in_flight(self) -> int:
        """Number of requests without a response."""
        return len(self._responses)

    @property
    def is_ending(self) -> bool:
        """Whether this process has ended the present one."""
        return bool(self._end_reason)

    @staticmethod
    def next_number() -> int:
        """Return the number of the next request."""
        return next(_numbers)

    def begin(self, message: _Request, limit_seconds: float) -> asyncio.Future[Any]:
        """Send a request, and return what gets its response or error; cancelling that of a statement interrupts it.

        An engine that is starting is not waited for. A look-up or a standing query is stuck if it has no response from
        an engine that is at work otherwise: then the engine is ended. No other request ends it.

        Raises:
            QueriesUnavailable: The engine is not ready.
        """
        if self.problem:
            raise QueriesUnavailable(_STARTING)
        self.send(message)
        loop = asyncio.get_running_loop()
        response = self._responses[message.number] = loop.create_future()
        limit = limit_seconds + GRACE_SECONDS
        timer = loop.call_later(limit, self._expire, message, limit)
        response.add_done_callback(functools.partial(self._ended, message, timer))
        return response

    def _expire(self, message: _Request, limit: float) -> None:
        """Fail a request that has had no response within its limit."""
        response = self._responses[message.number]
        if response.done():
            return
        talks = self._clock.monotonic() - self._heard_at < _TALKS_SECONDS
        if talks and isinstance(message, Lookup | Filter):
            self.end(f"a request had no response within {limit:g} s")
        response.set_exception(QueriesUnavailable("the engine did not respond in time: send the request again"))

    def _ended(self, message: _Request, timer: asyncio.TimerHandle, response: asyncio.Future[Any]) -> None:
        timer.cancel()
        del self._responses[message.number]
        if response.cancelled() and isinstance(message, Ask):
            with contextlib.suppress(QueriesUnavailable):
                self.send(Cancel(message.number))

    def send(self, message: ToEngine) -> None:
        """Send a message.

        Raises:
            QueriesUnavailable: The engine does not run.
            StatementRejected: The message is too long.
        """
        if self._writer is None or self._writer.is_closing():
            raise QueriesUnavailable(_STARTING)
        self._writer.write(encode_message(message))

    def end(self, reason: str) -> None:
        """End the present process; another one is started."""
        if self._process:
            self._end_reason = reason
            self._process.kill()

    async def run(self) -> None:
        pauses = RestartPauses(self._clock, 0.1, _LONGEST_PAUSE_SECONDS, _STEADY_SECONDS)

        async def live() -> None:
            reason, was_ready = await self._live()
            pauses.longest_seconds = _READY_PAUSE_SECONDS if was_ready else _LONGEST_PAUSE_SECONDS
            if not was_ready:
                pauses.started()  # however long it took to start, it was not steady
            raise QueriesUnavailable(reason)

        def ended(cause: Exception, pause: float) -> None:
            self.problem = f"the engine ended ({cause}); will restart in {pause:.1f} s"
            log.error("%s: %s", self.name, self.problem)

        await pauses.keep(live, ended, QueriesUnavailable)

    async def _live(self) -> tuple[str, bool]:
        """Run one process until it ends, and return why, and whether it was ready."""
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        own_end, engine_end = socket.socketpair()
        try:
            child = await ChildProcess.start(
                self,
                self.name,
                [sys.executable, "-P", "-m", "headrace_queries.engine", str(engine_end.fileno()), *self._role],
                ended.set_result,
                pass_fds=(engine_end.fileno(),),
            )
        finally:
            engine_end.close()
        reader, writer = await asyncio.open_unix_connection(sock=own_end)
        messages = Messages(reader, decode_to_parent)
        self._writer = writer
        self._process = child
        self._end_reason = ""
        watch = self.spawn(self._watch(child), "watch of the engine")
        try:
            self.send(EngineSetup(pickle.dumps(self._config), self._statements))
            try:
                async for message in messages:
                    self._take(message)
            except ProtocolBroken as cause:
                self.end(f"it does not follow the protocol: {cause}")
            was_ready = not self.problem
            self._fail_all()
            await child.stop(Deadline(self._clock, GRACE_SECONDS))  # it may still write why it ends
            code = await ended
            reason = f"signal {-code}" if code < 0 else f"exit code {code}; see the log above"
            return self._end_reason or reason, was_ready
        finally:
            watch.cancel()
            writer.close()
            self._fail_all()
            self._process = None

    @property
    def _role(self) -> list[str]:
        """Words for people who look at the list of processes."""
        return ["statements"] if self._statements else []

    def _take(self, message: ToParent) -> None:
        self._heard_at = self._clock.monotonic()
        if isinstance(message, Statuses):
            self.tables = {table.name: table for table in message.tables}
            self.problem = ""
        number = getattr(message, "number", None)
        if (response := self._responses.get(number)) and not response.done():  # type: ignore[arg-type]
            if isinstance(message, RequestFailed):
                response.set_exception(_ERRORS[message.kind](message.reason))
            else:
                response.set_result(message)
        else:
            self._on_message(message)

    async def _watch(self, child: ChildProcess) -> None:
        """End the engine if it uses too much memory, or is silent although it was ready."""
        most_bytes = 2 * self._config.sql.memory_bytes + _EXTRA_BYTES
        while True:
            await self._clock.sleep(_WATCH_SECONDS)
            if (size := memory_bytes(child.pid)) > most_bytes:
                self.end(f"it used {size >> 20} MiB, and {most_bytes >> 20} are allowed (sql.memory_bytes)")
            if not self.problem and self._clock.monotonic() - self._heard_at > _SILENT_SECONDS:
                self.end(f"it was silent for {_SILENT_SECONDS:g} s")

    def _fail_all(self) -> None:
        if self._writer is None:
            return
        self._writer = None
        self.problem = self.problem or "the engine ended"
        self.tables = {}
        self._on_end()
        for response in self._responses.values():
            if not response.done():
                response.set_exception(QueriesUnavailable(_ENDED, interrupted=True))

    async def stop(self) -> None:
        process, writer = self._process, self._writer
        if writer:
            writer.close()  # the engine ends with its connection
        await super().stop()
        if process and process.running:
            process.kill()
