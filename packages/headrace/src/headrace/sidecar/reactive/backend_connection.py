"""One connection to a backend: it sends a request and accepts only a complete response to it.

HTTP/1.1 does not say which request a response belongs to. So bytes that arrive while no request is in flight close the
connection. On a kept connection, a response that is early or has bytes behind it may belong to an earlier request.
The request is then sent again on a new connection.

Source: RFC 9112.
"""

import asyncio
import fcntl
import termios
from collections.abc import Callable, Generator, Mapping
from contextvars import Context
from typing import Any, Final, NamedTuple, cast

import httptools

MAX_HEAD_BYTES: Final = 65_536
MAX_INTERIMS: Final = 10
_BODILESS: Final = (204, 304)
_USUAL_BYTES: Final = 4096
_SAME_EXCHANGE_SECONDS: Final = 1.0
"""Bytes this soon after a response are a second response; later ones are how some servers end an idle connection."""
_UNASKED: Final = "it sent bytes that belong to no request: send one response per request"
_UNREAD_BYTES: Final = bytearray(1025)
"""Takes the number of bytes that wait; the system writes the first four. With one as large as this CPython keeps its
lock. Each time that it released the lock, the thread of the consumer would poll for a few records."""
_NOTHING: Final = bytes(4)


class BackendResponse(NamedTuple):
    """A complete response."""

    status: int
    headers: Mapping[str, str]
    """Values by lower-case name; of a repeated name, all of them with commas between."""
    body: bytes


class Broken(Exception):
    """No complete response arrived; the text says why.

    `closed` is set when the server closed a connection that had a request. `resend` is set if the request should be
    sent again on a new connection: no byte of a response had arrived when the connection was closed, or what arrived
    may be a response to an earlier request.
    """

    def __init__(self, why: str, *, resend: bool = False, closed: bool = False) -> None:
        super().__init__(why)
        self.resend = resend
        self.closed = closed


class PendingResponse:
    """The response to a request in flight, awaited by one task.

    The end of a future wakes its task in the next turn of the loop. With one record per request, these turns cost a
    quarter of the throughput. So this one takes the next step of the task at once.
    A task awaits what has `_asyncio_future_blocking` and these methods of a future.
    """

    __slots__ = ("_asyncio_future_blocking", "_connection", "_context", "_wake", "outcome")

    def __init__(self, connection: "Connection") -> None:
        """Wait for the response on a connection."""
        self._connection = connection
        self._asyncio_future_blocking = False
        self.outcome: BackendResponse | BaseException | None = None
        """What the task gets or is raised in it; None before the end."""
        self._wake: Callable[[PendingResponse], object] | None = None
        """Takes the next step of the task that awaits, in its context."""

    def __await__(self) -> Generator[Any, None, BackendResponse]:
        if self.outcome is None:
            self._asyncio_future_blocking = True
            yield self
        if isinstance(self.outcome, BackendResponse):
            return self.outcome
        return self.result()

    def result(self) -> BackendResponse:
        """Return the response, or raise why there is none."""
        if isinstance(self.outcome, BackendResponse):
            return self.outcome
        raise self.outcome or asyncio.InvalidStateError("the response has not arrived")

    def end(self, response: BackendResponse) -> None:
        """Take the next step of the task at once; called by the loop only, because two tasks cannot run at once."""
        if self.outcome is None:
            self.outcome = response
            if self._wake:
                self._context.run(self._wake, self)

    def fail(self, cause: BaseException) -> None:
        """Raise in the task, in the next turn of the loop; ignored after the end."""
        if self.outcome is None:
            self.outcome = cause
            if self._wake:
                self._connection.loop.call_soon(self._wake, self, context=self._context)
                self._wake = None  # a task refers to an error that it has caught, and the error to this

    def cancel(self, msg: object = None) -> bool:
        """Cancel the wait; the task continues in the next turn of the loop. False if the response has arrived."""
        if self.outcome is not None:
            return False
        self.fail(asyncio.CancelledError(*([msg] if msg else [])))
        self._connection.cancel(self)
        return True

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._connection.loop

    def add_done_callback(self, wake: "Callable[[PendingResponse], object]", *, context: Context) -> None:
        self._wake = wake
        self._context: Context = context


class Connection(asyncio.Protocol):
    """A connection that serves one request at a time and may be kept for the next one."""

    def __init__(self, max_body_bytes: int, repeated: Callable[[], None] | None = None) -> None:
        """Reject responses with a larger body than `max_body_bytes`.

        `repeated` is called when the server sends more than one response to a request.
        """
        self.reusable = False
        """Whether the last response was complete and left the connection fit for another request."""
        self.idle_since = 0.0
        """When the last response was complete, on the loop's clock; 0 before the first one."""
        self.refusal = ""
        """Why it takes no request any more: bytes arrived that belong to no request, or it is closed."""
        self._max_body_bytes = max_body_bytes
        self._repeated = repeated
        self.loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: PendingResponse | None = None
        """Gets the response of the request in flight."""
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport
        self._socket = -1
        """Its number; -1 without a socket of the system."""
        self._usual = b"", BackendResponse(0, {}, b"")
        """The bytes of the last small response, and what they mean at the start of a response."""
        self._begin()

    def _begin(self) -> None:
        """Forget the last response; an idle connection holds none but the usual one."""
        self._until_close = self._keep = False
        self._status = self._interims = self._head_bytes = self._bare_bytes = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._response: BackendResponse | None = None

    def send(self, request: bytes, end: float, *, at_once: bool = False) -> PendingResponse:
        """Send a request; its end is a response, or `Broken`, until `end` of the clock.

        If not `at_once`, it is sent in the next turn of the loop, and bytes that have arrived by then are of an earlier
        request. So a request waits for that turn in any case if bytes have arrived that the loop has not read yet.
        """
        waiter = PendingResponse(self)
        if at_once and not self._has_unread:
            self._write(request, end, waiter)
        else:
            self.loop.call_soon(self._write, request, end, waiter)
        return waiter

    @property
    def _has_unread(self) -> bool:
        """Whether bytes wait to be read by the loop, or the connection closes, so that its socket may be gone."""
        if self._socket < 0:
            return False
        if self._transport.is_closing():
            return True
        fcntl.ioctl(self._socket, termios.FIONREAD, _UNREAD_BYTES)
        return _UNREAD_BYTES[:4] != _NOTHING

    def _write(self, request: bytes, end: float, waiter: PendingResponse) -> None:
        if waiter.outcome:  # cancelled; the connection has had nothing of it
            return
        self.reusable = False
        self._end = end
        self._waiter = waiter
        if self.refusal:  # with TLS, a write to a closed connection would raise nothing
            self._fail(self.refusal, resend=True)
            return
        # The timer of an earlier request is kept, and set again when it is due: a timer per request is expensive.
        if self._timer is None or self._timer.when() > end:
            self._set_timer()
        try:
            self._transport.write(request)
        except RuntimeError as cause:  # uvloop's error for a transport that is closed
            self._fail(f"it closed the connection without a response ({cause})", resend=True)

    def cancel(self, waiter: PendingResponse) -> None:
        """Close, if a request in flight is not awaited any more."""
        if self._waiter is waiter:
            self.abort()

    def abort(self) -> None:
        """Close at once; a request in flight ends with `Broken`, later."""
        self.reusable = False
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if connected := transport.get_extra_info("socket"):
            self._socket = connected.fileno()

    def data_received(self, data: bytes) -> None:
        if self._waiter is None:
            self._spoil(is_response=self.loop.time() - self.idle_since < _SAME_EXCHANGE_SECONDS)
            return
        is_first = not (self._status or self._bare_bytes)
        if is_first and data == self._usual[0]:
            self._finish(self._usual[1], keep=True)  # the parser would find the same
            return
        self._bare_bytes += len(data)
        problem = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as cause:
            problem = str(cause.__context__)
        except httptools.HttpParserUpgrade:
            problem = "it switched to another protocol"
        except httptools.HttpParserError as cause:
            problem = f"its response is not HTTP/1.1 ({cause})"
        if self._response and problem:  # more bytes than one response
            self._spoil(is_response=True)
            if self.idle_since:
                self._fail(_UNASKED, resend=True)
            else:
                self._finish(self._response, keep=False)
        elif self._response:
            if self._keep and is_first and len(data) <= _USUAL_BYTES:
                self._usual = data, self._response
            self._finish(self._response, self._keep)
        elif problem:
            self._fail(problem)
        elif self._bare_bytes > MAX_HEAD_BYTES:
            self._fail(f"the head of its response is larger than {MAX_HEAD_BYTES} bytes")

    def eof_received(self) -> None:
        self.reusable = False
        if self._until_close:
            self._finish(BackendResponse(self._status, self._headers, bytes(self._body)), keep=False)

    def connection_lost(self, cause: Exception | None) -> None:
        self.reusable = False
        self.refusal = self.refusal or "it closed the connection without a response"
        if self._timer:
            self._timer.cancel()
        if self._waiter:
            is_silent = not (self._status or self._bare_bytes)
            when = "without a response" if is_silent else "before its response was complete"
            self._fail(
                f"it closed the connection {when}{f' ({cause})' if cause else ''}", resend=is_silent, closed=True
            )
        del self._parser  # it refers to this connection, too

    def on_message_begin(self) -> None:
        if self._response:
            raise Broken("a second response to one request")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise Broken(f"the head of its response is larger than {MAX_HEAD_BYTES} bytes")
        if not self._status:  # trailers after the body are dropped
            key, text = name.decode("latin-1").lower(), value.decode("latin-1")
            self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._interims += 1
            if status < 100 or self._interims > MAX_INTERIMS:
                raise Broken(f"it sent more than {MAX_INTERIMS} interim responses, or one with a status below 100")
            return
        self._status = status
        headers = self._headers
        self._keep = self._parser.should_keep_alive()
        framed = headers.get("transfer-encoding", "").lower()
        packed = headers.get("content-encoding", "").lower()
        if framed not in ("", "chunked") or packed not in ("", "identity"):
            raise Broken(f"its response is compressed ({packed or framed}), which the request does not accept")
        if int(headers.get("content-length", "0")) > self._max_body_bytes:
            raise self._too_large()
        self._until_close = not framed and "content-length" not in headers and status not in _BODILESS

    def on_body(self, data: bytes) -> None:
        self._bare_bytes = 0
        self._body += data
        if len(self._body) > self._max_body_bytes:
            raise self._too_large()

    def on_message_complete(self) -> None:
        if self._status:
            self._response = BackendResponse(self._status, self._headers, bytes(self._body))
        else:
            self._headers.clear()

    def _too_large(self) -> Broken:
        return Broken(f"its response is larger than {self._max_body_bytes} bytes; shorten it")

    def _finish(self, response: BackendResponse, keep: bool) -> None:
        waiter = self._waiter
        if waiter is None:
            return
        early = self._transport.get_write_buffer_size()
        if early and (self.idle_since or response.status < 300):
            why = "it responded before it had the whole request; read all of it first"
            self._fail(why, resend=self.idle_since > 0)
            return
        self._waiter = None
        if self._status:
            self._begin()
        # A server that responds before it has the whole request does not read the rest as its body.
        self.reusable = keep and not early
        self.idle_since = self.loop.time()
        waiter.end(response)

    def _spoil(self, *, is_response: bool) -> None:
        """Close: bytes arrived that belong to no request."""
        self.refusal = _UNASKED
        self.abort()
        if is_response and self._repeated:
            self._repeated()

    def _fail(self, why: str, *, resend: bool = False, closed: bool = False) -> None:
        if waiter := self._waiter:
            self._waiter = None
            self.abort()
            waiter.fail(Broken(why, resend=resend, closed=closed))

    def _set_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self.loop.call_at(self._end, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._waiter:
            return
        if self.loop.time() < self._end:
            self._set_timer()
        else:
            got = "the response was not complete" if self._status or self._bare_bytes else "no response arrived"
            self._fail(f"{got} in time (timeout_seconds)")
