"""Dead letters while their own topic is in trouble."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.records import OutgoingRecord
from headrace.testing import Answer
from tests.faults.push_scene import PushScene


@pytest.mark.heavy
@pytest.mark.timeout(400)
def test_a_dead_letter_topic_below_its_minimum_of_replicas_holds_its_partition(
    kafka_three: Any, scene: PushScene
) -> None:
    """The log says so before the write has failed, nothing is passed over, and it goes on when the replica is back."""
    scene.settings["dead_letter"] = {"topic": (dead := scene.new_topic(1, **{"min.insync.replicas": "3"}))}
    process = scene.run()
    scene.backend.answer = Answer(status=422)
    kafka_three.kill(3)
    scene.write(scene.topic, OutgoingRecord(scene.topic, b"k", b"v", None, 0))
    said = f"{scene.topic}-0 waits, dead letters=1 from offset 0 on are not acknowledged yet"
    scene.wait_until(lambda: said in process.output, "the log")
    assert scene.behind(scene.topic, scene.group) == 1
    kafka_three.restart(3)
    kafka_three.wait_in_sync()
    scene.wait_done()
    assert [record.value for record in scene.records(dead)] == [b"v"]
    assert process.terminate() == 0
