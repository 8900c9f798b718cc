"""Functions whose workers are threads: tests here start no process."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from tests.function_workers import Running, running_function, threads, write_function

__all__ = ["threads", "write_function"]


@pytest.fixture
def running() -> Callable[..., AbstractAsyncContextManager[Running]]:
    """A factory of started functions, stopped at the end of the block."""
    return running_function
