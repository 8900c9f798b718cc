"""A request that its connection serves by itself, in the shape in which the server knows one."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from headrace.security import Principal
from headrace.sidecar.produce import RequestIds
from headrace.sidecar.produce_answer import ProduceAnswer
from headrace.telemetry.correlation import new_correlation_id
from headrace.web.exchange import retry_after

if TYPE_CHECKING:
    from headrace.web.connection import Connection


class Exchange:
    """One request and its answer; to the server, one of its own."""

    __slots__ = (
        "chunks",
        "connection",
        "disconnected",
        "identity",
        "ids",
        "keep_alive",
        "more_body",
        "principal",
        "raw",
        "response_complete",
        "response_started",
        "scope",
        "started_at",
        "topic",
    )
    message_event: Final = asyncio.Event()  # by which the server wakes a task that waits for its request: nobody here

    def __init__(
        self,
        connection: Connection,
        topic: str,
        ids: RequestIds,
        principal: Principal | None,
        raw: bool = False,
    ) -> None:
        self.connection = connection
        self.scope: Any = connection.scope
        self.topic = topic
        self.identity = ids.correlation_id or new_correlation_id()
        self.ids = ids if ids.correlation_id else ids._replace(correlation_id=self.identity)
        self.raw = raw
        self.principal = principal
        self.chunks: list[bytes] = []
        self.more_body = self.keep_alive = True
        self.disconnected = self.response_started = self.response_complete = False
        self.started_at = time.perf_counter()

    def answer(self, answer: ProduceAnswer) -> None:
        """Write the whole answer at once."""
        connection = self.connection
        self.response_started = self.response_complete = True
        if self.disconnected or connection.transport.is_closing():
            return
        # In the order of the ordinary answer: the server's own headers, the answer's, and the ids.
        own = b"".join([b"%b: %b\r\n" % header for header in connection.server_state.default_headers])
        again = b"".join([b"%b: %b\r\n" % header for header in retry_after(answer.retry_after_seconds)])
        trace = b"x-traceability-id: %b\r\n" % self.ids.traceability_id if self.ids.traceability_id else b""
        connection.transport.write(
            b"%b%bcontent-type: application/json\r\ncontent-length: %d\r\n%bx-correlation-id: %b\r\n%b%b\r\n%b"
            % (
                STATUS_LINE[answer.status],
                own,
                len(answer.body),
                again,
                self.identity,
                trace,
                b"" if self.keep_alive else b"connection: close\r\n",
                answer.body,
            )
        )
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()
