"""State machines whose rules run in an event loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from hypothesis.stateful import RuleBasedStateMachine, invariant

from headrace.delivery.pump import Pump


def in_loop(act: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a rule of a coroutine of a `LoopMachine`."""

    @functools.wraps(act)
    def run(self: LoopMachine, **given: Any) -> None:
        self.runner.run(act(self, **given))

    return run


class LoopMachine(RuleBasedStateMachine):
    """Drives a model, which lists what went `wrong`. At the end `heal` lets everything work again."""

    model: Any

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()

    def pumps(self) -> Sequence[Pump]:
        return [self.model.pump]

    @invariant()
    def nothing_went_wrong(self) -> None:
        if hasattr(self, "model"):
            assert self.model.wrong == []
            assert [pump.death for pump in self.pumps() if pump.death] == []

    async def heal(self) -> None:
        raise NotImplementedError

    def check_end(self) -> None:
        raise NotImplementedError

    def teardown(self) -> None:
        try:
            if hasattr(self, "model"):
                self.runner.run(self.heal())
                self.nothing_went_wrong()
                self.check_end()
        finally:
            self.runner.close()
