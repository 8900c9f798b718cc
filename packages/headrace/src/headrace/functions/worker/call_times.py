"""Measures chosen calls of a handler: those whose spans the parent exports."""

from collections.abc import Callable, Coroutine, Sequence
from time import time_ns
from types import CoroutineType
from typing import Any


class CallTimes:
    """A handler that notes when some of its calls began and ended."""

    def __init__(self, handler: Callable[..., Any], indexes: Sequence[int], at_work: Callable[[], int]) -> None:
        """Prepare; `at_work` returns the index of the record that the present call begins with."""
        self._handler = handler
        self._numbers = {index: 2 * number for number, index in enumerate(indexes)}
        self._at_work = at_work
        self.times = [0] * (2 * len(indexes))
        """Begin and end of each call, in nanoseconds since the epoch; 0 for one that was not made."""

    def __call__(self, context: Any, event: Any) -> Any:
        number = self._numbers.get(self._at_work())
        if number is None:
            return self._handler(context, event)
        self.times[number] = time_ns()
        try:
            response = self._handler(context, event)
        finally:
            self.times[number + 1] = time_ns()
        return self._awaited(response, number) if type(response) is CoroutineType else response

    async def _awaited(self, response: Coroutine[Any, Any, Any], number: int) -> Any:
        try:
            return await response
        finally:
            self.times[number + 1] = time_ns()
