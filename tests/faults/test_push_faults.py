"""Records are pushed while our own processes crash and stop and the backend misbehaves; the ledger judges.

The backend's journal, the topics and the group's commits are the recording, nothing of what Headrace says of itself.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_devkit.testing import Cluster, Fault, PlannedResponse, Received, RecordingBackend, StartHeadrace
from tests.faults.push_scenario import SAME_MEMBER, SHORT_SESSION, Feeder, Hostile, PushScenario

PACKAGES = Path(__file__).parents[2] / "packages"
BY_OTHERS = ("redrive.", "replay.", "seek.", "batch.")
"""Points on ways that a record takes only when somebody asks for it; they have tests of their own."""
POINTS = sorted(
    name
    for file in PACKAGES.glob("*/src/**/*.py")
    for name in re.findall(r"\breach\(\"([a-z.-]+)\"\)", file.read_text())
    if not name.startswith(BY_OTHERS)
)
AT_ONCE = 6
pytestmark = pytest.mark.timeout(500)


def test_headrace_is_killed_while_it_pushes_to_a_hostile_backend(scenario: PushScenario) -> None:
    """Three times kill -9: nothing lost or skipped, order by key, no repeat of what a commit had ended."""
    scenario.settings["consumer"] = SAME_MEMBER
    scenario.backend.response = Hostile(seed=1)
    process = scenario.run()
    for _ in range(3):
        had = scenario.backend.accepted_records
        scenario.fill(600)
        scenario.wait_handled(had + 250)
        with scenario.fault():
            process.kill()
            process = scenario.run()
    scenario.check_done()
    assert process.terminate() == 0


def fail_at(scenario: PushScenario, point: str, action: str) -> Callable[[], None]:
    """Start a process that is to fail at a point; return what leads it there and waits for its end."""
    begin = time.time()
    process = scenario.run(f"{point}={action}", wait=False)

    def lead() -> None:
        if point.startswith(("revoke", "drain")):
            scenario.wait_until(lambda: scenario.committed(scenario.group), "a commit, so there is something to revoke")
            process.server.signal(signal.SIGTERM)
        elif point.startswith("lost"):
            scenario.wait_until(lambda: scenario.committed(scenario.group), "a commit, so there is something to lose")
            process.server.signal(signal.SIGSTOP)
            scenario.wait_members(0)
            process.server.signal(signal.SIGCONT)
        if action == "crash":
            scenario.crashed(process, point)
        else:
            scenario.raised(process, point, begin)

    return lead


@pytest.mark.parametrize("action", ["crash", pytest.param("raise", marks=pytest.mark.long)])
def test_a_crash_at_any_point_costs_repeats_only(
    kafka: Cluster, headrace: StartHeadrace, tmp_path: Path, action: str
) -> None:
    """Every failpoint is hit once, or raises; a process that comes later finishes the work of all."""
    backend = RecordingBackend(journal=tmp_path / "journal")
    refused: set[str] = set()

    def answer(request: Received) -> PlannedResponse:
        """Refuse the first request of a topic; of every topic one record fails always."""
        topic = request.body[0]["topic"]
        if topic not in refused:
            refused.add(topic)
            return PlannedResponse(503, body={})
        return PlannedResponse(fails=lambda record: record["offset"] == 3)

    backend.response = answer
    backend.start()
    scenarios: dict[str, PushScenario] = {}
    for point in POINTS:
        scenarios[point] = PushScenario(kafka, headrace, tmp_path, backend=backend, partitions=1)
        scenarios[point].settings.update(batch={"max_records": 4}, ordering="partition", consumer=SHORT_SESSION)
        scenarios[point].settings["retry"] = {"attempts": 2, "first_delay_seconds": 0.05, "max_delay_seconds": 0.1}
    scenarios[POINTS[0]].write("", *(record for scenario in scenarios.values() for record in scenario.new(12)))
    for first in range(0, len(POINTS), AT_ONCE):
        for lead in [fail_at(scenarios[point], point, action) for point in POINTS[first : first + AT_ONCE]]:
            lead()
    # The last process has so many consumers that one may stand still for longer than a short session.
    consumers = {f"push{n}": {**scenario.consumer, "consumer": {}} for n, scenario in enumerate(scenarios.values())}
    last = headrace({**scenarios[POINTS[0]].config, "reactive_consumers": consumers})
    for scenario in scenarios.values():
        scenario.wait_done()
    commits = scenarios[POINTS[0]].read_commits()
    for point, scenario in scenarios.items():
        scenario.commits = commits
        assert scenario.check() == [], point
        assert scenario.dead_letters in ((2,) if (point, action) == ("dead_letter.after", "crash") else (1, 2)), point
    assert last.terminate() == 0
    backend.stop()


@pytest.mark.parametrize(
    "point",
    [
        "commit.sent",
        pytest.param("commit.before", marks=pytest.mark.long),
        pytest.param("delivery.after", marks=pytest.mark.long),
    ],
)
def test_a_frozen_process_comes_back_without_its_partitions(scenario: PushScenario, point: str) -> None:
    """It stands still beyond its session and a peer takes over; what it then still says counts for nothing."""
    scenario.settings["consumer"] = SHORT_SESSION
    scenario.backend.response = Hostile(seed=2)
    scenario.fill(400)
    frozen = scenario.run(f"{point}=stop", wait=False)
    scenario.wait_until(lambda: f"failpoint {point}: stop" in frozen.output, "the stop")
    begin = frozen.server.log.stat().st_mtime
    scenario.wait_members(0)
    peer = scenario.run()
    scenario.wait_done()
    frozen.server.signal(signal.SIGCONT)
    scenario.wait_members(2)
    scenario.fill(400)
    scenario.wait_done()
    scenario.faults.append(Fault(begin, time.time()))
    assert scenario.check() == []
    assert (frozen.terminate(), peer.terminate()) == (0, 0)


def test_a_process_frozen_while_its_join_is_pending_comes_back_without_its_partitions(scenario: PushScenario) -> None:
    """Its join is answered while it stands still, its member expires, and a peer moves the offsets on.

    So its first request refers to a member that is gone. Its client joins again, and must not commit for what it had.
    """
    scenario.settings["consumer"] = {"properties": {"session.timeout.ms": 9000, "heartbeat.interval.ms": 300}}
    scenario.backend.response = Hostile(seed=3)
    with Feeder(scenario, per_second=100):
        frozen, absent = scenario.run(), scenario.run()
        scenario.wait_members(2)
        scenario.wait_more(200)
        begin = time.time()
        absent.server.signal(signal.SIGSTOP)  # so the group waits until it joins, or expires
        peer = scenario.run(wait=False)
        scenario.wait_until(lambda: scenario.state(scenario.group) == "preparing_rebalancing", "the rebalance")
        joined_by = time.monotonic() + 1.5
        scenario.wait_until(lambda: time.monotonic() > joined_by, "some heartbeats, which bring the join")
        assert scenario.state(scenario.group) == "preparing_rebalancing"
        frozen.server.signal(signal.SIGSTOP)
        scenario.wait_members(1)
        scenario.wait_more(300)
        for process in (frozen, absent):
            process.server.signal(signal.SIGCONT)
        scenario.wait_members(3)
        scenario.wait_more(300)
    scenario.wait_done()
    scenario.faults.append(Fault(begin, time.time()))
    assert scenario.check() == []
    assert ": lost " in frozen.output
    assert [process.terminate() for process in (frozen, absent, peer)] == [0, 0, 0]
