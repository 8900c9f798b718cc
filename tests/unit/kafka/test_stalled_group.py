"""A group that does not assign partitions for long says since when, and what it waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.config.consumers import FlowControl
from headrace.config.kafka import KafkaConfig
from headrace.errors import HeadraceError, KafkaTimeout
from headrace.kafka import Consumer
from headrace_devkit.testing import ManualClock

MEMBER = SimpleNamespace(client_id="billing (pid 7 on b)", host="/10.0.0.2")
SINCE = "1970-01-12T13:46:40Z"


class Cluster:
    """An administrative client whose coordinator describes one group, or fails to."""

    config = KafkaConfig(bootstrap_servers="localhost:1")
    reachability = SimpleNamespace(failed=lambda error: None, answered=lambda: None)

    def __init__(self, found: str | HeadraceError) -> None:
        self.found = found

    async def request(self, doing: str, call: Any, *rights: Any) -> Any:
        if isinstance(self.found, HeadraceError):
            raise self.found
        state, kind = SimpleNamespace(name=self.found), SimpleNamespace(name="CLASSIC")
        return SimpleNamespace(state=state, type=kind, partition_assignor="", coordinator=None, members=[MEMBER])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            "PREPARING_REBALANCING",
            f"group g has been rebalancing since {SINCE}; it waits for its members: billing (pid 7 on b) at 10.0.0.2",
        ),
        ("STABLE", ""),
        (KafkaTimeout("no coordinator"), f"group g: no partitions assigned since {SINCE}: no coordinator"),
    ],
)
async def test_a_stalled_group_says_what_it_waits_for_after_a_minute(found: Any, said: str) -> None:
    """Not before, and not when the group waits for nobody."""
    clock, admin, silent = ManualClock(), Cluster(found), SimpleNamespace()
    consumer = Consumer(
        admin,
        name="c",
        group="g",
        topics=["t"],
        listener=silent,
        flow=FlowControl(),
        clock=clock,  # type: ignore[arg-type]
    )
    await consumer.start()
    try:
        await clock.advance(50)
        assert consumer.readiness().reason == "group g: not joined yet"
        await clock.advance(20)
        await clock.settle()
        assert consumer.readiness().reason == "; ".join(filter(None, ["group g: not joined yet", said]))
    finally:
        await consumer.stop()
