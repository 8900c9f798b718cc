"""What the assembly puts together, without starting it."""

from __future__ import annotations

import asyncio

import pytest

from headrace.app import App
from headrace.config.model import HeadraceConfig
from headrace.config.producer import ProducerConfig
from headrace.lifecycle import SystemClock


@pytest.mark.parametrize(("settings", "names"), [({}, 1), ({"idempotence": False, "acks": 1}, 2)])
def test_dead_letters_have_a_producer_of_their_own_where_that_of_requests_is_weak(
    settings: dict[str, object], names: int
) -> None:
    """One client does where it waits for all replicas anyway."""

    async def producers() -> set[str]:
        app = App(HeadraceConfig(producer=ProducerConfig.model_validate(settings)), SystemClock())
        assert app.producer in app.services
        assert app.inner_producer in app.services
        return {app.producer.name, app.inner_producer.name}

    assert len(asyncio.run(producers())) == names
