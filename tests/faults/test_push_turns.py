"""Two processes of one group are ended and started again in turn while records are pushed; the ledger judges."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from headrace.config.producer import ProducerConfig
from headrace.kafka import Producer
from headrace.testing.evidence import unique_records
from tests.faults.push_scene import SHORT_SESSION, Hostile, PushScene


class Feeder:
    """Writes unique records at a rate, in a thread."""

    def __init__(self, scene: PushScene, per_second: int) -> None:
        self._scene, self._per_second = scene, per_second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    def __enter__(self) -> Feeder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)

    async def _run(self) -> None:
        producer = Producer(self._scene.kafka, ProducerConfig())
        await producer.start()
        # A billion keys: the most frequent one has three of a hundred records, and they wait for each other.
        records = unique_records(self._scene.topic, seed=7, keys=10**9)
        begin = time.monotonic()
        while not self._stop.is_set():
            due = int((time.monotonic() - begin) * self._per_second) - self._scene.written
            results = await producer.produce(list(itertools.islice(records, max(due, 1))))
            assert not [result for result in results if isinstance(result, Exception)]
            self._scene.written += len(results)
            await asyncio.sleep(0.1)
        await producer.stop()


def take_turns(scene: PushScene, changes: int, pause: Callable[[], None]) -> None:
    """Two processes of one group; again and again one of them is ended, by SIGTERM or SIGKILL, and started again.

    The backend is, too, each third time.
    """
    processes = [scene.run(), scene.run()]
    chance = random.Random(11)
    with Feeder(scene, per_second=2000):
        for change in range(changes):
            pause()
            with scene.fault():
                one = processes[change % 2]
                if chance.random() < 0.5:
                    one.kill()
                else:
                    assert one.terminate() == 0
                if change % 3 == 2:
                    scene.backend.stop()
                    scene.backend.start()
                one.start()
                one.wait_ready()
                scene.wait_for(lambda: scene.members() == 2, "both to be members")
        pause()
    scene.wait_done()
    assert scene.check() == []
    assert [process.terminate() for process in processes] == [0, 0]


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("ordering", "membership"),
    [
        ("key", SHORT_SESSION),
        pytest.param("partition", {**SHORT_SESSION, "assignors": ["range"]}, marks=pytest.mark.long),
        pytest.param("none", {"group_protocol": "consumer"}, marks=pytest.mark.long),
    ],
    ids=["cooperative", "eager", "kip-848"],
)
def test_two_processes_take_turns(scene: PushScene, ordering: str, membership: dict[str, Any]) -> None:
    """Three changes at 2,000 records a second: nothing lost or skipped, order kept, no commit too early or back."""
    scene.settings.update(ordering=ordering, consumer=membership)
    scene.backend.answer = Hostile(seed=3, delay_seconds=0, poison=0.2, flaky=1)
    take_turns(scene, 3, lambda: scene.wait_handled(scene.backend.accepted_records + 3000))


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_two_processes_take_turns_for_ten_minutes(scene: PushScene) -> None:
    """The same for ten minutes, with a change every 20 seconds."""
    scene.settings["consumer"] = SHORT_SESSION
    scene.backend.answer = Hostile(seed=4, delay_seconds=0, poison=0.2, flaky=1)
    take_turns(scene, 28, lambda: time.sleep(20))
