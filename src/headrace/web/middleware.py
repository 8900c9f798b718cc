"""What every request passes: ids, the one place where errors become answers, and the gate that closes when draining."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.errors import Draining, HeadraceError, InternalError, MethodNotAllowed, PathNotFound
from headrace.lifecycle import Deadline
from headrace.telemetry.audit import Audit
from headrace.telemetry.correlation import correlation_id, new_correlation_id
from headrace.telemetry.metrics import Metrics
from headrace.web.connection import ALWAYS_OPEN
from headrace.web.exchange import ClientGone, answer_error, headers_of

log = logging.getLogger(__name__)

CORRELATION: Final = b"x-correlation-id"
TRACEABILITY: Final = b"x-traceability-id"
TRACE_PARENT: Final = b"traceparent"
_DENIED: Final = (401, 403)
_ID: Final = re.compile(rb"[\x21-\x7e]{1,200}")
_PRODUCING: Final = ("/producers/", "/transactions")


def given_id(headers: dict[bytes, bytes], name: bytes) -> bytes | None:
    """Return an id that the client sent, if it is one: 1 to 200 visible ASCII characters."""
    value = headers.get(name)
    return value if value and _ID.fullmatch(value) else None


class Edge:
    """Gives every answer its ids, counts it, and turns every error into the one error body."""

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        label_of: Callable[[Scope], str],
        check: Callable[[Scope, dict[bytes, bytes]], None],
        audit: Audit | None = None,
    ) -> None:
        """Wrap an app; `label_of` names a request's route for the metrics, `check` raises where the head is not fit."""
        self._app = app
        self._check = check
        self._metrics = metrics
        self._label_of = label_of
        self._audit = audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_at = time.perf_counter()
        headers = headers_of(scope)
        identity = given_id(headers, CORRELATION) or new_correlation_id()
        correlation_id.set(identity.decode())
        ids = [(CORRELATION, identity)]
        if trace := given_id(headers, TRACEABILITY):
            ids.append((TRACEABILITY, trace))
        status = 0

        async def send_with_ids(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *ids]
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, receive, send_with_ids)
        except ClientGone:
            log.debug("the client went away before its request was complete")
        except Exception as cause:  # boundary: what the user sees is one error body, never a stack trace
            error = error_of(scope, cause)
            if self._audit and not status:
                self._note(self._audit, scope, error)
            if status:
                raise  # the answer has begun; the server ends the connection
            await answer_error(receive, send_with_ids, error)
        finally:
            if status:
                self._metrics.request(self._label_of(scope), status, time.perf_counter() - started_at)

    def _note(self, audit: Audit, scope: Scope, error: HeadraceError) -> None:
        """Note in the audit who was denied what, and which produce request was not sent."""
        path = scope["path"]
        if error.status in _DENIED:
            client = scope.get("client")
            audit.refused(f"{scope['method']} {path}", client[0] if client else "", error)
        elif scope["method"] == "POST" and path.startswith(_PRODUCING):
            topic = str(error.parameters.get("topic") or path.removeprefix(_PRODUCING[0]))
            audit.not_sent("" if topic == path else topic, error)


def error_of(scope: Scope, cause: Exception) -> HeadraceError:
    """Return what the caller is told of an exception; what is a defect of ours is logged."""
    if isinstance(cause, HeadraceError):
        return cause
    if isinstance(cause, HTTPException):  # the router's own
        path = scope["path"][:200]
        if cause.status_code == 405:
            allow = ", ".join(sorted((cause.headers or {}).get("Allow", "").split(", ")))
            return MethodNotAllowed(f"{scope['method']} {path}: this path takes {allow}", allow=allow)
        return PathNotFound(f"{scope['method']} {path}: no endpoint has this path; GET /health/liveness is one")
    log.error("defect while serving %s %s", scope["method"], scope["path"][:200], exc_info=cause)
    return InternalError(
        "a defect of Headrace: the log has more under this answer's X-Correlation-Id; please report it. "
        "Whether records of the request were written is unknown"
    )


class Gate:
    """Refuses new work while draining, and knows when all work has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._working = 0
        self._idle = asyncio.Event()
        self.draining = False
        self.on_drain: Callable[[], None] = lambda: None
        """Told when draining begins, for work that has no end of its own."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith(ALWAYS_OPEN):
            await self._app(scope, receive, send)
            return
        if self.draining:
            raise Draining()
        self._working += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self.leave()

    def enter(self) -> bool:
        """Count work that begins now and ends with `leave`; False if none is taken."""
        if self.draining:
            return False
        self._working += 1
        return True

    def leave(self) -> None:
        """Count work that has ended."""
        self._working -= 1
        if not self._working:
            self._idle.set()

    async def drain(self, deadline: Deadline) -> None:
        """Take no new work and wait, at most until the deadline, until what was taken has been answered."""
        self.draining = True
        self.on_drain()
        if self._working:
            self._idle.clear()
            await asyncio.wait_for(self._idle.wait(), deadline.remaining_seconds)
