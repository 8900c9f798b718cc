"""Producing without waiting for every replica: the records arrive, and the responses say what they are worth."""

from __future__ import annotations

import pytest

from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

OFFSETS = {1: [{"partition": 0, "offset": 0}, {"partition": 0, "offset": 1}], 0: [{"partition": 0, "offset": -1}] * 2}


@pytest.mark.parametrize("acks", [1, 0])
def test_responses_with_weak_acks_say_so(acks: int, site: Scenario, topic: MakeTopic, headrace: StartHeadrace) -> None:
    """The leader's word has an offset, nobody's has none; the log says what is given up."""
    weak = {"properties": {"enable.idempotence": False, "acks": acks}}
    process = headrace({**site.config, "producer": weak})
    body = site.ask(f"{process.url}/producers/{topic()}", {"records": [{"value": 1}, {"value": 2}]}).body
    assert (body["offsets"], body["acks"]) == (OFFSETS[acks], acks)
    assert f"producer.properties: acks is {acks}: an acknowledged record may be lost" in process.output
    assert "may reorder and duplicate records" in process.output
    assert process.terminate() == 0
