"""Requests to a Headrace service, their responses, and when a request is sent again.

It does no input or output. Each operation is a generator that yields requests and pauses, and is resumed with
responses. So the synchronous and the asynchronous client share all of it.
"""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable, Collection, Generator, Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from headrace.errors import HeadraceError, catalogue
from headrace.extras import not_installed

T = TypeVar("T")

_RESPONSE_SECONDS: Final = 60.0
_LONGEST_PAUSE_SECONDS: Final = 30.0
_REPEATABLE_STATUS: Final = (409, 429, 503)
"""With `retriable` in the body: the service rejected the whole request, and did nothing."""
_OTHER_SERVER: Final = "it is another server, or a proxy in front of Headrace"


class RetryPolicy(NamedTuple):
    """How often and how fast a request is sent again; pauses double, and vary by half."""

    attempts: int = 8
    first_seconds: float = 0.1
    longest_seconds: float = 5.0


class ClientRequest(NamedTuple):
    """One request."""

    method: str
    path: str
    body: Any = None
    headers: Mapping[str, str] = {}
    repeatable: bool = True
    """Whether it may be sent again after its response was lost, because sending it twice is the same as once."""
    response_seconds: float = _RESPONSE_SECONDS
    """The longest silence of the server."""
    connect_seconds: float | None = None
    """The longest wait for a connection, if it is another."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The request as httpx takes it."""
        kind = {} if self.body is None else {"Content-Type": "application/json"}
        return {
            "method": self.method,
            "url": self.path,
            "content": None if self.body is None else msgspec.json.encode(self.body),
            "headers": {**kind, **self.headers},
            "timeout": (self.connect_seconds or self.response_seconds, *[self.response_seconds] * 3),
        }


class HttpReply(NamedTuple):
    """The response to a request."""

    status: int
    body: bytes
    headers: Mapping[str, str]
    url: str = "the server"


class ResponseLost(Exception):
    """A connection failed; its cause is the error of httpx. Never raised to callers."""

    def __init__(self, cause: Exception, *, sent: bool) -> None:
        """Keep the cause; `sent` is whether the request may have arrived."""
        super().__init__(str(cause))
        self.cause = cause
        self.sent = sent


Work = Generator[ClientRequest | float, HttpReply, T]
"""An operation: yields requests, and pauses in seconds."""


class ClientRecord(msgspec.Struct, frozen=True, rename="camel"):
    """A record as the service decoded it.

    If it could not be decoded, `error` and `error_code` say why, and `raw_key` and `raw_value` are its bytes.
    """

    topic: str
    partition: int
    offset: int
    timestamp: int
    """Milliseconds since the epoch."""
    key: Any = None
    value: Any = None
    assignment: str = ""
    """Opaque name of the assignment in which it was read; sent with its offset."""
    headers: dict[str, str | None] = {}
    header_list: list[dict[str, str | None]] = []
    """All headers in order, values in base64, if `headers` cannot represent them exactly."""
    raw_key: bytes | None = None
    raw_value: bytes | None = None
    error_code: str = ""
    error: str = ""


class NewRecord(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """A record to write. A value of None is a tombstone."""

    value: Any = msgspec.UNSET
    key: Any = msgspec.UNSET
    headers: dict[str, str] | None = None
    partition: int | None = None
    timestamp: int = 0
    """Milliseconds since the epoch; 0 is the time of writing."""


class _ErrorBody(msgspec.Struct):
    code: str
    description: str
    metadata: dict[str, Any] = {}


def error_of(reply: HttpReply) -> HeadraceError:
    """Return the error in a response, as the class in `headrace.errors` with its code; empty if it has none."""
    try:
        body = msgspec.json.decode(reply.body, type=_ErrorBody)
    except (ValueError, RecursionError):
        text = f"{reply.url.partition('?')[0]} answers {reply.status} without an error of Headrace"
        target = reply.headers.get("location")
        body = _ErrorBody(
            "", f"{text}: " + (f"it redirects to {target}, use that address" if target else _OTHER_SERVER)
        )
    kinds = {kind.code: kind for kind in catalogue()}
    error = kinds.get(body.code, HeadraceError)(body.description)
    error.parameters = {"retriable": reply.status in (429, 503), **body.metadata}
    facts: Any = error  # override those of its class with those of this response
    facts.status = reply.status
    facts.code = body.code
    facts.retriable = error.parameters["retriable"]
    pause = reply.headers.get("retry-after", "")
    facts.retry_after_seconds = int(pause) if pause.isdigit() else None
    return error


def exchange(
    policy: RetryPolicy, request: ClientRequest, recover: Callable[[], Work[None]] | None = None
) -> Work[bytes]:
    """Send a request until it succeeds, and return the body.

    It is sent again if it never arrived, or if the service rejected it as retriable. If its response was lost, it is
    sent again if it is repeatable, or after `recover`.

    Raises:
        HeadraceError: The service rejected the last attempt.
        httpx.TransportError: The last attempt got no response.
    """
    for attempt in range(1, policy.attempts + 1):
        seconds = pause_of(policy, attempt)
        lost = False
        try:
            reply = yield request
        except ResponseLost as failure:
            lost = failure.sent and not request.repeatable
            if attempt == policy.attempts or (lost and recover is None):
                raise failure.cause from None
        else:
            if reply.status < 300:
                return reply.body
            error = error_of(reply)
            again = error.retriable and (reply.status in _REPEATABLE_STATUS or request.repeatable)
            if attempt == policy.attempts or not again:
                raise error
            seconds = max(seconds, min(error.retry_after_seconds or 0, _LONGEST_PAUSE_SECONDS))
        yield seconds
        if lost and recover:
            yield from recover()
    raise AssertionError("a policy has at least one attempt")


def accepted(reply: HttpReply, expected: Collection[int] = ()) -> HttpReply:
    """Return a response that is a success, or an error with an expected status.

    Raises:
        HeadraceError: It is another error, or a redirect.
    """
    if reply.status >= 300 and reply.status not in expected:
        raise error_of(reply)
    return reply


def send_once(request: ClientRequest, expected: Collection[int]) -> Work[HttpReply]:
    """Send a request once, and return its response; raises as `accepted`, or the error of httpx."""
    try:
        return accepted((yield request), expected)
    except ResponseLost as failure:
        raise failure.cause from None


def load_httpx() -> Any:
    """Return the module httpx.

    Raises:
        EnvironmentProblem: It is not installed.
    """
    try:
        return importlib.import_module("httpx")
    except ImportError as cause:
        raise not_installed("the HTTP client", cause.name or "httpx", "client") from cause


def pause_of(policy: RetryPolicy, attempt: int) -> float:
    """Return the seconds to wait after an attempt, counted from 1."""
    longest = min(policy.longest_seconds, policy.first_seconds * 2.0 ** min(attempt - 1, 30))
    return longest * random.uniform(0.5, 1)
