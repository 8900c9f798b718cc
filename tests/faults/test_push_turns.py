"""Two processes of one group are ended and started again in turn while records are pushed; the ledger judges."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.faults.push_scenario import SHORT_SESSION, Feeder, Hostile, PushScenario


def check_turns(scenario: PushScenario, changes: int, per_second: int, pause: Callable[[], None]) -> None:
    """Two processes of one group; again and again one of them is ended, by SIGTERM or SIGKILL, and started again.

    The backend is, too, each third time.
    """
    processes = [scenario.run(), scenario.run()]
    chance = random.Random(11)
    with Feeder(scenario, per_second):
        for change in range(changes):
            pause()
            with scenario.fault():
                one = processes[change % 2]
                if chance.random() < 0.5:
                    one.kill()
                else:
                    assert one.terminate() == 0
                if change % 3 == 2:
                    scenario.backend.stop()
                    scenario.backend.start()
                one.start()
                one.wait_ready()
                scenario.wait_members(2)
        pause()
    scenario.check_done()
    assert [process.terminate() for process in processes] == [0, 0]


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("ordering", "membership"),
    [
        ("key", SHORT_SESSION),
        ("partition", {"properties": {**SHORT_SESSION["properties"], "partition.assignment.strategy": "range"}}),
        ("none", {"properties": {"group.protocol": "consumer"}}),
    ],
    ids=["cooperative", "eager", "kip-848"],
)
def test_two_processes_take_turns(scenario: PushScenario, ordering: str, membership: dict[str, Any]) -> None:
    """Changes at up to 2,000 records a second: nothing lost or skipped, order kept, no commit too early or back."""
    scenario.settings.update(ordering=ordering, consumer=membership)
    scenario.backend.response = Hostile(seed=3, delay_seconds=0, poison=0.2, flaky=1)
    check_turns(scenario, 3, 2000, lambda: scenario.wait_more(1000))
