"""Records are pushed while the backend fails, is away, or never answers; the ledger judges."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from headrace.delivery.dead_letter import origin_of
from headrace_devkit.testing import PlannedResponse, Received
from headrace_devkit.testing.recording import unique_records
from tests.faults.push_scenario import SAME_MEMBER, PushScenario, luck

pytestmark = pytest.mark.timeout(500)


def test_a_backend_that_fails_costs_attempts_and_nothing_else(scenario: PushScenario) -> None:
    """It answers 500 to all, then to a fifth: every record ends, after five attempts as a dead letter."""
    outage, seen = iter(range(15)), Counter[str]()

    def answer(request: Received) -> PlannedResponse:
        first = request.body[0]["value"]
        seen[first] += 1
        down = next(outage, None) is not None or luck(first, seen[first]) < 20
        return (
            PlannedResponse(500) if down else PlannedResponse(fails=lambda record: luck("never", record["value"]) < 1)
        )

    scenario.backend.response = answer
    scenario.settings["retry"]["attempts"] = 5
    scenario.fill(1000)
    process = scenario.run()
    scenario.check_done()
    origins = [origin_of(record.headers) for run in scenario.recording() for record in run.dead_letters]
    assert {origin and origin.attempts for origin in origins} == {5}
    assert process.terminate() == 0


def test_a_backend_that_is_away_costs_nothing(scenario: PushScenario) -> None:
    """Connections are refused, then it is back: no dead letters, and every record is delivered once."""
    scenario.backend.stop()
    scenario.settings["retry"]["attempts"] = 1
    scenario.fill(2000)
    process = scenario.run("delivery.refused=delay:0@5")
    scenario.wait_until(lambda: "failpoint delivery.refused" in process.output, "five refusals")
    scenario.backend.start()
    scenario.check_done()
    assert (scenario.dead_letters, scenario.backend.accepted_records) == (0, 2000)
    assert process.terminate() == 0


@pytest.mark.parametrize("scenario", [{"partitions": 1}], indirect=True)
def test_a_member_that_comes_and_goes_does_not_repeat_a_poison_record(scenario: PushScenario) -> None:
    """The attempts go with the partition: each process delivers the record some times, and all together six times."""
    deliveries = []

    def answer(request: Received) -> PlannedResponse:
        poison = next((record for record in request.body if record["value"] == first), None)
        if poison:
            deliveries.append(poison["attempt"])
        return PlannedResponse(fails=lambda record: record["value"] == first)

    pauses = {"attempts": 6, "first_delay_seconds": 1, "max_delay_seconds": 1}
    scenario.settings.update(ordering="partition", retry=pauses, consumer=SAME_MEMBER)
    scenario.backend.response = answer
    records = scenario.new(50)
    first = records[0].value.decode() if records[0].value else ""
    scenario.write(scenario.topic, *records)
    for already in (0, 2, 4):
        process = scenario.run()
        scenario.wait_until(lambda already=already: len(deliveries) >= already + 2, "two more deliveries")  # type: ignore[misc]
        if already < 4:
            assert process.terminate() == 0
    scenario.check_done()
    assert deliveries == [1, 2, 3, 4, 5, 6]
    assert scenario.dead_letters == 1
    assert process.terminate() == 0


@pytest.mark.long
def test_without_order_a_crash_repeats_only_what_was_open(scenario: PushScenario) -> None:
    """A hundred single records at a time, each as slow as it likes: what commits and maps have stays ended."""
    scenario.settings["consumer"] = SAME_MEMBER
    scenario.backend.response = lambda request: PlannedResponse(delay_seconds=luck(request.body[0]["value"]) / 200)
    scenario.settings.update(ordering="none", batch={"max_records": 1}, max_in_flight=100)
    scenario.fill(800)
    process = scenario.run()
    scenario.wait_handled(200)
    with scenario.fault():
        process.kill()
        process = scenario.run()
    scenario.check_done()
    assert process.terminate() == 0


def test_a_key_that_hangs_holds_no_other_key(scenario: PushScenario) -> None:
    """One key is never answered: all others end meanwhile, and then it does, in its order."""
    slow = "k1"
    scenario.backend.response = lambda request: PlannedResponse(
        delay_seconds=600 if request.body[0]["key"] == slow else 0
    )
    scenario.settings.update(batch={"max_records": 1})
    scenario.fill(1000)
    held = sum(record.key == slow.encode() for record in itertools.islice(unique_records("", 1), 1000))
    process = scenario.run()
    scenario.wait_handled(1000 - held)
    scenario.backend.response = PlannedResponse()
    scenario.backend.release()
    scenario.check_done()
    assert scenario.backend.accepted_records == 1000
    assert process.terminate() == 0
