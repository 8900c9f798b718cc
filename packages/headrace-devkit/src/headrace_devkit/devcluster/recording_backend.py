"""A backend for reactive consumers that records requests and gives scripted answers, good or bad ones."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import msgspec

from headrace.errors import EnvironmentProblem
from headrace.runtime import LoopThread

if TYPE_CHECKING:
    from aiohttp import web


_DROP_BYTES = 50


class Received(NamedTuple):
    """One request the backend got."""

    path: str
    headers: Mapping[str, str]
    """Names in lower case."""
    body: Any
    """Parsed JSON; an array of records from a reactive consumer."""
    time: float
    """Seconds of the monotonic clock when it had come in."""


@dataclass(frozen=True)
class PlannedResponse:
    """How to answer one request."""

    status: int = 200
    delay_seconds: float = 0.0
    fails: Callable[[dict[str, Any]], bool] = lambda record: False
    """Whether a record of the batch is answered as not processed."""
    stacktrace: str = ""
    """The text of those failures, if any."""
    body: Any = None
    """JSON to answer in place of the results, or bytes as they are, if not None."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers, such as `Retry-After` or `Location`."""
    cut_after_bytes: int | None = None
    """Close the connection after this many bytes of the body; 0 before the status line, None not at all."""
    drip_seconds: float = 0.0
    """Pause before each 50 bytes of the body."""

    @property
    def is_whole(self) -> bool:
        """Whether the response has results; without them the caller knows of no record that it was processed."""
        return self.body is None and self.cut_after_bytes is None and self.status < 300


class RecordingBackend:
    """An HTTP server on loopback, on a thread of its own, speaking the batch-result protocol.

    Every request is answered by the next of `script`, or when that is empty by `response`, which may be a function of
    the request. Without either, everything is processed.
    """

    def __init__(self, port: int = 0, journal: Path | None = None) -> None:
        """Prepare it.

        Args:
            port: 0 takes a free one, and `stop` and `start` keep it.
            journal: A file that every attempt is written to before it is answered
                (`headrace_devkit.testing.recording`); `requests` and `accepted` then stay empty, so that memory
                does not grow.
        """
        self.requests: list[Received] = []
        """Every request, in order of arrival."""
        self.accepted: list[dict[str, Any]] = []
        """Every record answered as processed, in order; one delivered twice is in it twice."""
        self.response: PlannedResponse | Callable[[Received], PlannedResponse] = PlannedResponse()
        self.script: deque[PlannedResponse] = deque()
        self.accepted_records = 0
        """How many records were answered as processed."""
        self._numbers = itertools.count()
        self._journal_file = journal
        self._journal: IO[bytes] | None = None
        self._port = port
        self._thread: LoopThread | None = None
        self._runner: web.AppRunner | None = None
        self._hurry: asyncio.Future[None]

    @property
    def url(self) -> str:
        """Where records are posted."""
        return f"http://127.0.0.1:{self._port}/kafka/records"

    @property
    def records(self) -> list[dict[str, Any]]:
        """Every record of every request, in order of arrival, failed and repeated ones too."""
        return [record for request in self.requests for record in request.body]

    def start(self) -> None:
        """Listen."""
        self._journal = self._journal_file.open("ab", buffering=0) if self._journal_file else None
        self._thread = LoopThread("recording-backend")
        self._thread.call(self._listen(), limit_seconds=60)

    def stop(self) -> None:
        """Close every connection and listen no more."""
        if self._thread and self._runner:
            self._thread.call(self._close(self._runner), limit_seconds=60)
            self._thread.stop()
        if self._journal:
            self._journal.close()
        self._thread = self._runner = self._journal = None

    def wait_for(self, met: Callable[[RecordingBackend], bool], limit_seconds: float = 120.0) -> None:
        """Wait until a condition holds.

        Raises:
            EnvironmentProblem: The time is up; the text has the requests until then.
        """
        end = time.monotonic() + limit_seconds
        while not met(self):
            if time.monotonic() > end:
                had = f"{len(self.requests)} requests, {self.accepted_records} records accepted"
                raise EnvironmentProblem(f"The backend waited {limit_seconds:.0f} s and gave up; it had {had}.")
            time.sleep(0.01)

    def settle(self) -> None:
        """Return when the journal has every request that has arrived by now, as that of a process that was killed."""
        if self._thread:
            self._thread.call(self._settle(), limit_seconds=60)

    async def _settle(self) -> None:
        for _ in range(20):  # turns of the loop: accept a connection, read it, begin to answer
            await asyncio.sleep(0)

    async def _listen(self) -> None:
        # Imported here: the pytest plugin is loaded in every test run where Headrace is installed.
        from aiohttp import web

        application = web.Application(client_max_size=64 * 1024 * 1024)
        application.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self._port = self._runner.addresses[0][1]
        self._hurry = asyncio.get_running_loop().create_future()

    def release(self) -> None:
        """Send all delayed answers at once."""
        assert self._thread, "not started"
        self._thread.call(self._release(), limit_seconds=60)

    async def _release(self) -> None:
        self._hurry.set_result(None)
        self._hurry = asyncio.get_running_loop().create_future()

    async def _close(self, runner: web.AppRunner) -> None:
        self._hurry.set_result(None)  # ends long delays
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        body = msgspec.json.decode(raw) if raw else None
        received = Received(request.path, headers, body, time.monotonic())
        number = next(self._numbers)
        if self._journal:
            self._note(number, records=[[r["deliveryId"], r.get("key"), r.get("value")] for r in body or ()])
        else:
            self.requests.append(received)
        response = self._response_to(received)
        if response.delay_seconds:
            await asyncio.wait({self._hurry}, timeout=response.delay_seconds)
        results = self._results(received, response)
        self._note(number, ended=[i for i, result in enumerate(results) if result["processed"]])
        body = results if response.body is None else response.body
        return await self._send(request, response, body if isinstance(body, bytes) else msgspec.json.encode(body))

    def _note(self, number: int, **what: list[Any]) -> None:
        if self._journal:
            self._journal.write(msgspec.json.encode({"request": number, "at": time.time(), **what}) + b"\n")

    async def _send(self, request: web.Request, response: PlannedResponse, body: bytes) -> web.StreamResponse:
        from aiohttp import web

        headers = {"Content-Type": "application/json", **response.headers}
        if response.cut_after_bytes is None and not response.drip_seconds:
            return web.Response(status=response.status, body=body, headers=headers)
        stream = web.StreamResponse(status=response.status, headers={**headers, "Content-Length": str(len(body))})
        if response.cut_after_bytes != 0:
            await stream.prepare(request)
        body = body[: response.cut_after_bytes]
        for index in range(0, len(body), _DROP_BYTES):
            if response.drip_seconds:
                await asyncio.wait({self._hurry}, timeout=response.drip_seconds)
            await stream.write(body[index : index + _DROP_BYTES])
        if response.cut_after_bytes is not None and request.transport:
            request.transport.abort()
        return stream

    def _response_to(self, received: Received) -> PlannedResponse:
        if self.script:
            return self.script.popleft()
        return self.response if isinstance(self.response, PlannedResponse) else self.response(received)

    def _results(self, received: Received, response: PlannedResponse) -> list[dict[str, Any]]:
        results = []
        for record in received.body if isinstance(received.body, list) else []:
            processed = response.is_whole and not response.fails(record)
            if processed:
                self.accepted_records += 1
                if not self._journal:
                    self.accepted.append(record)
            trace = {} if processed or not response.stacktrace else {"stacktrace": response.stacktrace}
            results.append({"record": record, "processed": processed, **trace})
        return results
