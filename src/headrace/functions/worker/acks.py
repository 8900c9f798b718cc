"""Explicit acknowledgements in the worker: sent for the handler, answered by the parent."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.functions import wire

if TYPE_CHECKING:
    import asyncio

_CLOSED = "the worker ends, and its connection to Headrace is closed"


class Acks:
    """The acknowledgements of one worker that the parent has not answered."""

    def __init__(self, send: Callable[[wire.ToParent], None]) -> None:
        """Prepare; `send` sends a message to the parent."""
        self.read: Callable[[], object] | None = None
        """Waits for bytes of the parent and takes them; None if an event loop does that while the handler waits."""
        self.closed = False
        """Whether the parent has closed the connection."""
        self._send = send
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._number = 0

    async def send(self, topic: str, partition: int, offset: int) -> str:
        """Acknowledge a record; return why that is not possible, empty if the parent has taken it.

        Raises:
            RuntimeError: Another thread than that of the handler called it.
        """
        import asyncio

        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("explicit_ack was called in another thread: call it in the thread of the handler")
        if self.closed:
            return _CLOSED
        self._number += 1
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[self._number] = answer
        self._send(wire.Ack(self._number, topic, partition, offset))
        while self.read and not answer.done():  # a plain handler: nothing else of the worker runs meanwhile
            self.read()
        return await answer

    def answered(self, message: wire.Acked) -> None:
        """Take an answer."""
        answer = self._waiting.pop(message.number, None)
        if answer and not answer.done():
            answer.set_result(message.problem)

    def close(self) -> None:
        """Answer everything: the parent has closed the connection."""
        self.closed = True
        for number in [*self._waiting]:
            self.answered(wire.Acked(number, _CLOSED))
