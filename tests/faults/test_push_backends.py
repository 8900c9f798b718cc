"""Records are pushed while the backend fails, is away, or never answers; the ledger judges."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from headrace.delivery.dead_letter import origin_of
from headrace.testing import Answer, Received
from headrace.testing.recording import unique_records
from tests.faults.push_scene import SAME_MEMBER, PushScene, luck


@pytest.mark.timeout(500)
def test_a_backend_that_fails_costs_attempts_and_nothing_else(scene: PushScene) -> None:
    """It answers 500 to all, then to a fifth (row E1): every record ends, after five attempts as a dead letter."""
    outage, seen = iter(range(15)), Counter[str]()

    def answer(request: Received) -> Answer:
        first = request.body[0]["value"]
        seen[first] += 1
        down = next(outage, None) is not None or luck(first, seen[first]) < 20
        return Answer(500) if down else Answer(fails=lambda record: luck("never", record["value"]) < 1)

    scene.backend.answer = answer
    scene.settings["retry"]["attempts"] = 5
    scene.fill(1000)
    process = scene.run()
    scene.wait_done()
    assert scene.check() == []
    origins = [origin_of(record.headers) for run in scene.evidence() for record in run.dead_letters]
    assert {origin and origin.attempts for origin in origins} == {5}
    assert process.terminate() == 0


@pytest.mark.timeout(500)
def test_a_backend_that_is_away_costs_nothing(scene: PushScene) -> None:
    """Connections are refused, then it is back (row E2): no dead letters, and every record is delivered once."""
    scene.backend.stop()
    scene.settings["retry"]["attempts"] = 1
    scene.fill(2000)
    process = scene.run("delivery.refused=delay:0@5")
    scene.wait_until(lambda: "failpoint delivery.refused" in process.output, "five refusals")
    scene.backend.start()
    scene.wait_done()
    assert scene.check() == []
    assert (scene.dead_letters, scene.backend.accepted_records) == (0, 2000)
    assert process.terminate() == 0


@pytest.mark.timeout(500)
def test_without_order_a_crash_repeats_only_what_was_open(scene: PushScene) -> None:
    """A hundred single records at a time, each as slow as it likes (row E8): what commits and maps have stays ended."""
    scene.settings["consumer"] = SAME_MEMBER
    scene.backend.answer = lambda request: Answer(delay_seconds=luck(request.body[0]["value"]) / 200)
    scene.settings.update(ordering="none", batch={"max_records": 1}, max_in_flight=100)
    scene.fill(800)
    process = scene.run()
    scene.wait_handled(200)
    with scene.fault():
        process.kill()
        process = scene.run()
    scene.wait_done()
    assert scene.check() == []
    assert process.terminate() == 0


@pytest.mark.timeout(500)
def test_a_key_that_stands_still_holds_nobody_else(scene: PushScene) -> None:
    """One key is never answered (row E9): all others end meanwhile, and then it does, in its order."""
    slow = "k1"
    scene.backend.answer = lambda request: Answer(delay_seconds=600 if request.body[0]["key"] == slow else 0)
    scene.settings.update(batch={"max_records": 1})
    scene.fill(1000)
    held = sum(record.key == slow.encode() for record in itertools.islice(unique_records("", 1), 1000))
    process = scene.run()
    scene.wait_handled(1000 - held)
    scene.backend.answer = Answer()
    scene.backend.release()
    scene.wait_done()
    assert scene.check() == []
    assert scene.backend.accepted_records == 1000
    assert process.terminate() == 0
