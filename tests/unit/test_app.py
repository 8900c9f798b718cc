"""What the assembly puts together, without starting it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.app import App
from headrace.config.model import HeadraceConfig
from headrace.lifecycle import SystemClock

PUSH = {"a": {"topics": ["t"], "group": "g", "backend": {"url": "http://localhost:1"}}}


@pytest.mark.parametrize(("settings", "names"), [({}, 1), ({"reactive_consumers": PUSH}, 2)])
def test_dead_letters_have_a_producer_of_their_own(settings: dict[str, Any], names: int) -> None:
    """It takes larger records than requests may send; where nothing is consumed it is not there."""

    async def producers() -> set[str]:
        app = App(HeadraceConfig.model_validate(settings), SystemClock())
        assert app.producer in app.services
        assert app.inner_producer in app.services
        return {app.producer.name, app.inner_producer.name}

    assert len(asyncio.run(producers())) == names
