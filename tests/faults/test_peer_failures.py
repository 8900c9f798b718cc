"""What other products lost, as public threads describe it, on a real broker; the ledger judges.

`headrace_devkit/simulation/peer_scenarios.py` has the same scenarios by seed.
"""

from __future__ import annotations

from collections import Counter

import pytest

from headrace_devkit.testing import HeadraceProcess, PlannedResponse, Received
from tests.faults.push_scenario import PushScenario

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
FIRST, SECOND = "first", "second"
NEVER = PlannedResponse(delay_seconds=600)


class Requests:
    """How many requests the backend got from each of two members, whose URLs differ."""

    def __init__(self, scenario: PushScenario) -> None:
        self._scenario, self.counts = scenario, Counter[str]()

    def start(self, member: str, **env: str) -> HeadraceProcess:
        url = f"{self._scenario.backend.url}/{member}"
        return self._scenario.run(HEADRACE__REACTIVE_CONSUMERS__PUSH__BACKEND__URL=url, **env)

    def note(self, request: Received) -> str:
        """Count a request and return its member."""
        member = request.path.rpartition("/")[2]
        self.counts[member] += 1
        return member

    def wait_more(self, member: str, requests: int) -> None:
        """Wait for more requests of a member than now."""
        wanted = self.counts[member] + requests
        self._scenario.wait_until(lambda: self.counts[member] >= wanted, f"{requests} requests of the {member} member")


@pytest.mark.parametrize("scenario", [{"partitions": 3}], indirect=True)
def test_a_slow_record_is_never_at_two_members(scenario: PushScenario) -> None:
    """dapr/components-contrib#4577: a second member comes and goes by SIGTERM, and no record is delivered twice."""
    requests = Requests(scenario)

    def answer(request: Received) -> PlannedResponse:
        requests.note(request)
        return PlannedResponse(delay_seconds=2)

    scenario.backend.response = answer
    scenario.settings.update(ordering="partition", batch={"max_records": 1})
    first, second = requests.start(FIRST), requests.start(SECOND)
    for _ in range(4):
        scenario.fill(18)
        scenario.wait_members(2)
        requests.wait_more(FIRST, 2)
        requests.wait_more(SECOND, 2)
        assert second.terminate() == 0
        scenario.wait_members(1)
        second.start()
        second.wait_ready()
    scenario.check_done()
    assert scenario.backend.accepted_records == scenario.written
    assert (first.terminate(), second.terminate()) == (0, 0)


@pytest.mark.parametrize("scenario", [{"partitions": 2}], indirect=True)
def test_a_partition_resumes_after_a_drain(scenario: PushScenario) -> None:
    """nuclio/nuclio#4180: requests hang beyond the drain; the next owner delivers, and so does the first one later."""
    requests = Requests(scenario)

    def answer(request: Received) -> PlannedResponse:
        requests.note(request)
        return NEVER if hangs else PlannedResponse()

    hangs = True
    scenario.backend.response = answer
    scenario.settings.update(ordering="partition", batch={"max_records": 5})
    scenario.fill(200)
    with scenario.fault():
        first = requests.start(FIRST, HEADRACE__DRAIN_SECONDS="2")
        scenario.wait_until(lambda: requests.counts[FIRST] == 2, "a request of each partition")
        second = requests.start(SECOND, HEADRACE__DRAIN_SECONDS="2")
        scenario.wait_until(lambda: requests.counts[SECOND] == 1, "the drained partition at its next owner")
    hangs = False
    scenario.backend.release()
    scenario.wait_done()
    hangs, had = True, Counter(requests.counts)
    scenario.fill(200)
    with scenario.fault():
        each = had + Counter([FIRST, SECOND])
        scenario.wait_until(lambda: requests.counts == each, "a request of each member")
        second.terminate()
        scenario.wait_until(lambda: requests.counts[FIRST] == each[FIRST] + 1, "the drained partition at the first one")
    hangs = False
    scenario.backend.release()
    scenario.check_done()
    assert first.terminate() == 0
