"""Tests that are coroutine functions on a stage which somebody else sets up and clears."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def staged(
    stage: Callable[..., None], *, fixtures: tuple[str, ...] = (), **given: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test as `stage(*fixtures, test, **given)`: the stage makes what stands before the `/` of the test."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        asked = inspect.signature(test).parameters.values()
        names = [*fixtures, *(one.name for one in asked if one.kind is not one.POSITIONAL_ONLY)]

        @functools.wraps(test)
        def whole(**found: Any) -> None:
            used = [found.pop(name) for name in fixtures]
            stage(*used, functools.partial(test, **found), **given)

        del whole.__wrapped__  # pytest would see the parameters of the test
        whole.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        return whole

    return decorate
