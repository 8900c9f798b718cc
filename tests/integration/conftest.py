"""The fixture of tests on running processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from headrace.testing.scene import Scene
from tests.function_workers import Running, running_function, write_function

__all__ = ["write_function"]


@pytest.fixture
def site(kafka: Any, tmp_path: Path) -> Scene:
    """The broker and the running process as a user sees them."""
    return Scene(kafka.bootstrap_servers, tmp_path)


@pytest.fixture
def running() -> Callable[..., AbstractAsyncContextManager[Running]]:
    """A factory of started functions whose workers are processes, stopped at the end of the block."""
    return running_function
