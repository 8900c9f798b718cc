"""Order by key, the offset map and gaps, while processes are killed and records removed under them."""

from __future__ import annotations

import re

import confluent_kafka
import pytest

from headrace.delivery.offset_map import decode
from headrace.testing import Answer, Commit
from tests.faults.push_scene import SAME_MEMBER, PushScene

STUCK = "k1"


def unfinished(scene: PushScene) -> int:
    """Return how many records a new owner would get again, as the group's commits say."""
    count = 0
    for run in scene.evidence():
        last = run.commits[-1] if run.commits else Commit(0, 0)
        ended = decode(last.metadata, last.offset)
        count += sum(r.offset >= last.offset and not (ended and ended.has(r.offset)) for r in run.log)
    return count


@pytest.mark.timeout(600)
def test_order_by_key_holds_and_only_the_unfinished_comes_again(scene: PushScene) -> None:
    """One key fails all the time, kill -9 hits while others are under way, and at last while only that key is open."""
    scene.backend.answer = Answer(delay_seconds=0.01, fails=lambda record: record["key"] == STUCK)
    retry = {"attempts": 1000, "first_delay_seconds": 0.1, "max_delay_seconds": 0.5}
    scene.settings.update(max_in_flight=8, batch={"max_records": 5}, retry=retry, consumer=SAME_MEMBER)
    scene.fill(1000)
    stuck = sum(record.key == STUCK.encode() for record in scene.records(scene.topic))
    for wanted in (300, 1000 - stuck):
        process = scene.run()
        scene.wait_handled(wanted)
        if wanted > 300:
            scene.wait_until(lambda: unfinished(scene) == stuck, "the offset map")
        with scene.fault():
            process.kill()
    scene.backend.answer = Answer()
    process = scene.run()
    scene.wait_done()
    assert scene.check() == []
    assert process.terminate() == 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize("scene", [{"partitions": 1}], ids=["one-partition"], indirect=True)
def test_records_are_removed_before_they_are_read(scene: PushScene) -> None:
    """Headrace stands still and names what is missing; told to continue, it counts it and goes on (row B11)."""
    scene.fill(100)
    process = scene.run()
    scene.wait_done()
    assert process.terminate() == 0
    scene.fill(100)
    for removed in scene.client.delete_records([confluent_kafka.TopicPartition(scene.topic, 0, 110)]).values():
        removed.result(60)
    standing = scene.run(wait=False)
    missing = r"offsets 100 to 109 \(10\) are no longer in the log"
    scene.wait_until(lambda: re.search(missing, standing.output), "the gap")
    standing.terminate()
    assert scene.backend.accepted_records == 100
    scene.settings["on_gap"] = "continue"
    process = scene.run()
    scene.wait_done()
    assert (
        'headrace_gap_offsets_total{consumer="push",kind="reactive"} 10.0' in scene.ask(f"{process.url}/metrics").body
    )
    assert scene.backend.accepted_records == 190
    assert process.terminate() == 0
