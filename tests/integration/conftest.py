"""The fixture of tests on running processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.testing.scene import Scene


@pytest.fixture
def site(kafka: Any, tmp_path: Path) -> Scene:
    """The broker and the running process as a user sees them."""
    return Scene(kafka.bootstrap_servers, tmp_path)
