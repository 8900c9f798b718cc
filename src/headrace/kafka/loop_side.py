"""How a consumer's thread speaks to the loop: calls in their order, and questions, of which it waits for one kind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from headrace.lifecycle import LoopBridge, Service

T = TypeVar("T")


class LoopSide:
    """The loop, as the thread of a service sees it. If a call fails the service dies, and nothing more is called."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._bridge: LoopBridge[Callable[[], None]] | None = None

    def open(self) -> None:
        """Take the running loop; call on it, before anything else."""
        self._bridge = LoopBridge(asyncio.get_running_loop(), self._run_all)

    def post(self, call: Callable[..., Any], *arguments: Any) -> None:
        """Call something on the loop, behind everything posted before; returns at once."""
        assert self._bridge is not None
        self._bridge.post(lambda: call(*arguments))

    def run(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        """Run work as a task of the service, behind everything posted before; returns at once."""

        async def task() -> None:
            await work()

        self.post(lambda: self._service.spawn(task(), name))

    def wait_for(self, work: Callable[[], Awaitable[T]], name: str, seconds: float) -> T | None:
        """Return what the work returns; None if it takes longer, has failed, or the service is dead already."""
        if self._service.death is not None:
            return None
        answer: list[T] = []
        done = threading.Event()

        async def task() -> None:
            try:
                answer.append(await work())
            finally:
                done.set()

        self.run(task, name)
        return answer[0] if done.wait(seconds) and answer else None

    def _run_all(self, calls: list[Callable[[], None]]) -> None:
        for call in calls:
            # After a call that failed the listener has missed something, so nothing that follows may be believed.
            if self._service.death is not None:
                return
            try:
                call()
            except Exception as cause:  # noqa: BLE001 boundary: the service dies and is named, nothing is committed
                self._service.die(cause)
