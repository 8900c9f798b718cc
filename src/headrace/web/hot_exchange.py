"""A request that its connection serves by itself, in the shape in which the server knows one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from headrace.security import Principal
from headrace.sidecar.produce_answer import ProduceAnswer
from headrace.web.exchange import retry_after

if TYPE_CHECKING:
    from headrace.web.connection import Connection


class _Nobody:
    """Stands where the server wakes a task that waits for its request."""

    def set(self) -> None:
        """Wake nobody."""


class Exchange:
    """One request and its answer; to the server, one of its own."""

    __slots__ = (
        "chunks",
        "connection",
        "disconnected",
        "headers",
        "ids",
        "keep_alive",
        "more_body",
        "principal",
        "response_complete",
        "response_started",
        "scope",
        "started_at",
        "topic",
    )
    message_event: Final = _Nobody()

    def __init__(
        self,
        connection: Connection,
        topic: str,
        headers: dict[bytes, bytes],
        ids: list[tuple[bytes, bytes]],
        principal: Principal | None,
    ) -> None:
        self.connection = connection
        self.scope: Any = connection.scope
        self.topic = topic
        self.headers = headers
        self.ids = ids
        self.principal = principal
        self.chunks: list[bytes] = []
        self.more_body = self.keep_alive = True
        self.disconnected = self.response_started = self.response_complete = False
        self.started_at = time.perf_counter()

    def answer(self, answer: ProduceAnswer) -> None:
        """Write the whole answer at once."""
        connection = self.connection
        self.response_started = self.response_complete = True
        if self.disconnected:
            return
        lines = [STATUS_LINE[answer.status]]
        for name, value in connection.server_state.default_headers:
            lines += [name, b": ", value, b"\r\n"]
        lines.append(b"content-type: application/json\r\ncontent-length: %d\r\n" % len(answer.body))
        for name, value in [*retry_after(answer.retry_after_seconds), *self.ids]:
            lines += [name, b": ", value, b"\r\n"]
        lines.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        lines.append(answer.body)
        connection.transport.write(b"".join(lines))
        if not self.keep_alive:
            connection.transport.close()
        connection.on_response_complete()
