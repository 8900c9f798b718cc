"""Has push queries evaluated by a process of the engine's own, and ends that process when one cannot be interrupted."""

import asyncio
import logging
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final

from headrace.errors import QueriesUnavailable
from headrace.framing import ProtocolBroken
from headrace.runtime import ChildProcess, Service
from headrace_queries.engine.evaluator import EVALUATION_SECONDS
from headrace_queries.engine_protocol import (
    Evaluate,
    Evaluated,
    EvaluationBatch,
    Messages,
    RequestFailed,
    ToParent,
    decode_to_parent,
    encode_message,
)

log = logging.getLogger(__name__)

_GRACE_SECONDS: Final = 3.0
"""An evaluation that has not ended this long after its interrupt is ended with its process."""
_START_SECONDS: Final = 30.0
OUTLIVED: Final = "the statement could not be interrupted, or ended its process: make it cheaper"


class Evaluations(Service):
    """Evaluates batches one after the other, in one process, which is started when it is needed."""

    def __init__(self, name: str, memory_bytes: int) -> None:
        super().__init__(f"evaluations of {name}")
        self._memory_bytes = memory_bytes
        self._turn = asyncio.Lock()
        self._child: ChildProcess | None = None
        self._messages: Messages[ToParent]
        self._writer: asyncio.StreamWriter

    async def start(self) -> None:
        """Start nothing: the first batch does."""

    async def evaluate(
        self, batch: EvaluationBatch, requests: Sequence[Evaluate], is_pending: Callable[[Evaluate], bool]
    ) -> AsyncGenerator[tuple[Evaluate, Evaluated | RequestFailed | None]]:
        """Yield each request that is still pending with its response; None if it could not be interrupted.

        Raises:
            QueriesUnavailable: The process does not start.
            StatementRejected: The batch is too long.
        """
        left = [*requests]
        async with self._turn:
            try:
                while left:
                    if self._child is None or not self._child.running:
                        await self._start()
                    left = [request for request in left if is_pending(request)]  # clients leave meanwhile
                    self._writer.write(encode_message(batch))
                    for request in left:
                        self._writer.write(encode_message(request))
                    while left and self._child:
                        response = await self._response()
                        yield left.pop(0), response
            finally:
                if left:
                    self._end()  # the responses that are left would be mistaken for those of other requests

    async def _start(self) -> None:
        own_end, other_end = socket.socketpair()
        try:
            command = [sys.executable, "-P", "-m", "headrace_queries.engine.evaluator", str(other_end.fileno())]
            child = await ChildProcess.start(
                self, self.name, [*command, str(self._memory_bytes)], lambda code: None, pass_fds=(other_end.fileno(),)
            )
        except OSError as cause:
            own_end.close()
            raise QueriesUnavailable(f"the process that evaluates push queries does not start: {cause}") from cause
        finally:
            other_end.close()
        reader, self._writer = await asyncio.open_unix_connection(sock=own_end)
        self._messages = Messages(reader, decode_to_parent)
        self._child = child
        try:
            async with asyncio.timeout(_START_SECONDS):
                await anext(self._messages)
        except (TimeoutError, StopAsyncIteration, ProtocolBroken) as cause:
            self._end()
            text = "the process that evaluates push queries does not start: see the log above"
            raise QueriesUnavailable(text) from cause

    async def _response(self) -> Evaluated | RequestFailed | None:
        """Return the next response; None, without the process, if it does not come."""
        try:
            async with asyncio.timeout(EVALUATION_SECONDS + _GRACE_SECONDS):
                response = await anext(self._messages)
        except (TimeoutError, StopAsyncIteration, ProtocolBroken) as cause:
            log.warning(
                "%s: a push query ended the process that evaluates it (%r); dropping the query", self.name, cause
            )
            self._end()
            return None
        assert isinstance(response, Evaluated | RequestFailed)
        return response

    def _end(self) -> None:
        if self._child:
            self._child.kill()
            self._writer.close()
            self._child = None

    async def stop(self) -> None:
        child = self._child
        self._end()
        if child:
            await child.process.wait()
        await super().stop()
