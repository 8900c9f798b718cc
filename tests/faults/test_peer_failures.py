"""What other products lost, as public threads describe it, on a real broker; the ledger judges.

`headrace_devkit/simulation/peer_scenarios.py` has the same scenarios by seed.
"""

from __future__ import annotations

from collections import Counter

import pytest

from headrace_devkit.testing import HeadraceProcess, PlannedResponse, Received
from tests.faults.push_scenario import SHORT_SESSION, Feeder, Hostile, PushScenario

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


@pytest.mark.parametrize("scenario", [{"partitions": 1}], indirect=True)
def test_a_record_that_fails_does_not_bounce(scenario: PushScenario) -> None:
    """dapr/components-contrib#4580: members come and go; all together deliver it as often as it has attempts."""
    requests, deliveries = Requests(scenario), list[int]()

    def answer(request: Received) -> PlannedResponse:
        requests.note(request)
        deliveries.append(request.body[0]["attempt"])
        return PlannedResponse(500)

    scenario.backend.response = answer
    retry = {"attempts": 20, "first_delay_seconds": 3, "max_delay_seconds": 3}
    scenario.settings.update(ordering="partition", retry=retry)
    scenario.fill(1)
    owner, other = FIRST, SECOND
    running = {FIRST: requests.start(FIRST)}
    for _ in range(3):
        requests.wait_more(owner, 1)
        running[other] = requests.start(other)
        scenario.wait_members(2)
        assert running.pop(owner).terminate() == 0
        owner, other = other, owner
    scenario.check_done()
    assert deliveries == [*range(1, 21)]
    assert scenario.dead_letters == 1
    assert min(requests.counts[FIRST], requests.counts[SECOND]) >= 2
    assert running[owner].terminate() == 0


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


def test_failures_do_not_cross_a_commit(scenario: PushScenario) -> None:
    """spring-projects/spring-kafka#4504, #4505: a third of the records fails at first, and processes are killed."""
    scenario.backend.response = Hostile(seed=5, delay_seconds=0.2, poison=0, flaky=33)
    retry = {"attempts": 5, "first_delay_seconds": 0.2, "max_delay_seconds": 2}
    own = {"ordering": "none", "max_in_flight": 64, "batch": {"max_records": 1}, "retry": retry}
    scenario.settings.update(own, consumer=SHORT_SESSION)
    processes = [scenario.run(), scenario.run()]
    with Feeder(scenario, per_second=100):
        for turn in range(6):
            scenario.wait_members(2)
            scenario.wait_more(250)
            with scenario.fault():
                process = processes[turn % 2]
                process.kill()
                process.start()
                process.wait_ready()
        scenario.wait_more(250)
    scenario.check_done()
    assert [process.terminate() for process in processes] == [0, 0]
