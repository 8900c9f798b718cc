"""The HTTP trigger of a function: requests become events of its workers, and what the handler returns the responses."""

import itertools
from collections.abc import Awaitable, Callable
from typing import Final

from headrace import errors
from headrace.config.http import HttpConfig
from headrace.errors import DestinationUnavailable, HeadraceError, WorkerLost
from headrace.functions import protocol
from headrace.functions.destination import FunctionDestination
from headrace.functions.triggers.http_trigger import HttpTrigger
from headrace.functions.workers import FunctionService
from headrace.http.application import Router
from headrace.http.auth.principals import WRITE
from headrace.http.endpoint import OPEN, Endpoint, Route, Rule
from headrace.http.messages import HttpResponse, read_encoded_body, retry_after
from headrace.http.request import HttpRequest, RequestHead
from headrace.runtime import clock
from headrace.runtime.telemetry import tracing

_HEALTH: Final = "/__internal/health"
_CREDENTIALS: Final = (b"authorization", b"x-scope-token")
"""Credentials for Headrace; handlers do not get them if callers are authenticated."""
_MOST_WAITING_BYTES: Final = 67_108_864
"""Limit for the bodies of all requests in flight together."""
_NO_CONTENT: Final = (204, 304)


class FunctionRequests(Router):
    """Sends every request to one function, except those for its health."""

    always_open = ()

    def __init__(
        self, workers: FunctionService, trigger: HttpTrigger, destination: FunctionDestination, settings: HttpConfig
    ) -> None:
        super().__init__(())
        self.name = f"{workers.spec.name}.{trigger.name}"
        self._workers = workers
        self._destination = destination
        self._settings = settings
        self._wait_seconds = trigger.worker_wait_ms / 1000 if trigger.worker_wait_ms >= 0 else 10.0
        self._numbers = itertools.count()
        self._free = list[int]()
        """Numbers of completed requests, for reuse."""
        self._bytes = 0
        rule = Rule((WRITE,), "call", "function")
        endpoint = Endpoint("POST", f"function {self.name}", "callFunction", "Call a function", rule)
        health = Endpoint("GET", _HEALTH, "functionHealth", "Whether its workers are ready", OPEN)
        parameters = {"function": self.name}
        self._endpoint = Route(endpoint, self._call, parameters)
        self._open = Route(health, self._health, parameters)

    def may_be_open(self, path: str) -> bool:
        return path.startswith(_HEALTH)

    def find(self, head: RequestHead) -> Route:
        return self._open if self.may_be_open(head.path) else self._endpoint

    async def _health(self, request: HttpRequest) -> None:
        await request.response.send(HttpResponse(b"", 200 if self._workers.readiness().ready else 503, b"text/plain"))

    async def _call(self, request: HttpRequest) -> None:
        body = await read_encoded_body(request, self._settings)  # the handler unpacks its body
        if self._bytes and self._bytes + len(body) > _MOST_WAITING_BYTES:
            raise errors.ServerBusy(f"requests in flight have {self._bytes} bytes: send again after a pause")
        if self._workers.spec.event_timeout_seconds:
            request.is_streaming = True  # that ends the request, instead of the server
        hidden = _CREDENTIALS if request.caller.principal else ()
        target = request.head.target + (b"?" + request.head.query if request.head.query else b"")
        sent: protocol.Headers = [(":method", request.head.method.encode()), (":path", target)]
        sent += [(name.decode("latin-1"), value) for name, value in request.head.fields if name not in hidden]
        if tracing.tracer and request.span:
            sent = [*tracing.tracer.without(sent), *request.span.record_headers()]
        number = self._free.pop() if self._free else next(self._numbers)
        self._bytes += len(body)
        now, identity = round(clock.time() * 1000), request.correlation_id
        try:
            work = protocol.Work("", number, 0, [0], [now], [identity], [body], [sent])
            response = await self._answer(work, request.body.closed)
        finally:
            self._free.append(number)
            self._bytes -= len(body)
        await request.response.send(response)

    async def _answer(self, work: protocol.Work, gone: Callable[[], Awaitable[None]]) -> HttpResponse:
        """Return the handler's response, or an error without the worker's text, which is only for the log."""
        try:
            reply, output = await self._destination.answer(work, self._wait_seconds, gone)
        except WorkerLost as lost:
            is_late = lost.parameters["error"] == "timeout"
            why = "the event took longer than spec.eventTimeout" if is_late else "its worker ended"
            return _error(504 if is_late else 502, WorkerLost(f"{why}: the log has more, and its effects are unknown"))
        except DestinationUnavailable as cause:
            why = cause.description if "topic" in cause.parameters else "no worker is up or free: readiness has more"
            return _error(503, DestinationUnavailable(why))
        if output is None and not reply.reached:
            return _error(400, errors.InvalidRequest(f"the body does not fit the handler's type: {reply.reason}"))
        if output is None:
            return _error(500, errors.FunctionError(f"the handler failed with {reply.error}: the log has more"))
        (_, status), *named = output.headers
        has_content = int(status or 0) not in _NO_CONTENT
        headers = [(name.encode(), value or b"") for name, value in named]
        return HttpResponse(output.body if has_content else b"", int(status or 0), b"", headers)


def _error(status: int, error: HeadraceError) -> HttpResponse:
    again = retry_after(1 if status == 503 else None)
    return HttpResponse({**error.body(), "statusCode": status}, status, headers=again)
