"""Replays whose process is killed: nothing is lost, no more comes twice than was announced, no group is touched."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.kafka import Admin, Producer, read_records
from headrace.records import OutgoingRecord, TopicPartition
from headrace.testing import HeadraceProcess, RecordingBackend

PARTITIONS, RECORDS = 3, 600
BOUND = 40
"""Twice `flow.max_records`: so many records may come again after a kill."""
PATIENCE_SECONDS = 240.0
Start = Callable[..., HeadraceProcess]


class Scene:
    """A topic that a group has read, processes of one deployment, and a replay."""

    def __init__(self, cluster: Any, start: Start, folder: Path, to: str = "consumer", letters: bool = False) -> None:
        self.topic = f"replay-{uuid.uuid4().hex[:8]}"
        self.kafka = KafkaConfig(bootstrap_servers=cluster.bootstrap_servers)
        self.admin, self._start, self._letters = Admin(self.kafka), start, letters
        cluster.create_topic(self.topic, PARTITIONS, {})
        self.target = f"{self.topic}-copy" if to == "topic" else ""
        if self.target:
            cluster.create_topic(self.target, PARTITIONS, {})
        self.backend = RecordingBackend()
        self.backend.start()
        records = [OutgoingRecord(self.topic, b"k%d" % n, b"%d" % n, None, n % PARTITIONS) for n in range(RECORDS)]
        asyncio.run(self._write(records))

    async def _write(self, records: Sequence[OutgoingRecord]) -> None:
        producer = Producer(self.kafka, ProducerConfig())
        await producer.start()
        await producer.produce(records)
        await producer.stop()

    def run(self, failpoint: str = "", ready: bool = True) -> HeadraceProcess:
        """Start a process of the deployment."""
        consumer = {
            "topics": [self.topic],
            "group": f"{self.topic}-push",
            "backend": {"url": self.backend.url},
            "batch": {"max_records": 4},
            "flow": {"max_records": BOUND // 2},
            "ordering": "key",
            "key_format": "string",
            "value_format": "string",
        }
        config = {
            "kafka": {"bootstrap_servers": self.kafka.bootstrap_servers},
            "control": {"topic": f"_headrace-control-{self.topic}"},
            "reactive_consumers": {"push": consumer},
        }
        return self._start(config, wait=ready, env={"HEADRACE_FAILPOINTS": failpoint})

    def read_by_the_group(self) -> None:
        """Let the group read everything, and note what every group has committed."""
        process = self.run()
        wait_for(lambda: sum(self.committed().get(f"{self.topic}-push", {}).values()) == RECORDS, "the group")
        assert process.terminate() == 0
        self.before = self.committed()

    def committed(self) -> dict[str, Mapping[TopicPartition, int]]:
        """Return what the groups of this test have committed; other tests have groups too."""

        async def ask() -> dict[str, Mapping[TopicPartition, int]]:
            names = [group.name for group in await self.admin.list_groups() if self.topic in group.name]
            return {name: found for name in names if (found := await self.admin.committed(name))}

        return asyncio.run(ask())

    def begin(self, process: HeadraceProcess) -> str:
        to = {"topic": self.target} if self.target else {"consumer": "push"}
        began = ask(f"{process.url}/adm/replays", {"topic": self.topic, "to": to})
        return str(began["id"])

    def arrived(self, job: str) -> Counter[tuple[int, int]]:
        """Return how often each record came."""
        if self.target:
            return asyncio.run(self._copied())
        requests = [r for r in list(self.backend.requests) if r.headers.get("x-headrace-replay") == job]
        return Counter((entry["partition"], entry["offset"]) for request in requests for entry in request.body)

    async def _copied(self) -> Counter[tuple[int, int]]:
        offsets = await self.admin.topic_offsets(self.target)
        starts, ends = {p: o[0] for p, o in offsets.items()}, {p: o[1] for p, o in offsets.items()}
        found: Counter[tuple[int, int]] = Counter()
        async for batch in read_records(self.kafka, starts, ends):
            for record in batch:
                _, partition, offset = dict(record.headers)["headrace.replay.of"].decode().split(":")  # type: ignore[union-attr]
                found[int(partition), int(offset)] += 1
        return found

    def check(self, process: HeadraceProcess, job: str, kills: int) -> None:
        """Wait for the end, and say what is wrong by it."""
        url = f"{process.url}/adm/jobs/{job}"
        wait_for(lambda: ask(url)["state"] in ("done", "failed"), f"{job} to end")
        shown = ask(url)
        bound = 40_000 if self.target else BOUND
        assert (shown["state"], shown["spec"]["repeatsAtMost"]) == ("done", bound), shown
        arrived = self.arrived(job)
        assert len(arrived) == RECORDS, f"{RECORDS - len(arrived)} are lost"
        assert arrived.total() - RECORDS <= bound * kills, f"{arrived.total() - RECORDS} came again"
        assert shown["progress"]["counts"]["delivered"] == RECORDS
        assert self.committed() == self.before


def ask(url: str, body: Any = None) -> Any:
    """GET, or POST when there is a body; None while nobody answers."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def wait_for(met: Callable[[], Any], what: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if met():
                return
        except OSError:
            pass  # not up yet
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.1)


def die_and_go_on(scenes: Mapping[str, Scene]) -> None:
    """Let a process of each scene die at its point, side by side, and start another one that goes on."""
    for scene in scenes.values():
        scene.read_by_the_group()
    first = {point: scene.run(point) for point, scene in scenes.items()}
    jobs = {point: scene.begin(first[point]) for point, scene in scenes.items()}
    for point, process in first.items():
        wait_for(lambda process=process: process.exit_code is not None, f"the crash at {point}")  # type: ignore[misc]
    second = {point: scene.run(ready=False) for point, scene in scenes.items()}
    for point, scene in scenes.items():
        second[point].wait_ready()
        scene.check(second[point], jobs[point], 1)
        scene.backend.stop()


@pytest.mark.timeout(900)
@pytest.mark.long
@pytest.mark.parametrize("to", ["consumer", "topic"])
def test_a_replay_goes_on_wherever_its_process_dies(kafka: Any, headrace: Start, tmp_path: Path, to: str) -> None:
    """At every point of a replay; it goes on when it is started again."""
    points = [
        "delivery.before=70",
        "delivery.after=50",
        "replay.read=20",
        "replay.save=3",
        "replay.saved=6",
        "ended.after=60",
    ]
    if to == "topic":  # by 500 records, so everything happens but a few times
        points = ["delivery.after=1", "replay.read=2", "replay.save=1", "replay.saved=1", "ended.after=2"]
    points = [point.replace("=", "=crash@") for point in points]
    die_and_go_on({point: Scene(kafka, headrace, tmp_path, to) for point in points})


@pytest.mark.timeout(500)
def test_another_process_takes_a_replay_over(kafka: Any, headrace: Start, tmp_path: Path) -> None:
    """It was there all the time; the one that was asked dies between a delivery and the word that it ended."""
    scene = Scene(kafka, headrace, tmp_path)
    scene.read_by_the_group()
    peer, asked = scene.run(), scene.run("delivery.after=crash@50")
    job = scene.begin(asked)
    wait_for(lambda: asked.exit_code is not None, "the crash")
    scene.check(peer, job, 1)
    assert f"job {job} runs here" in peer.output
    scene.backend.stop()


@pytest.mark.timeout(1800)
@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_a_replay_is_killed_four_times_at_random(kafka: Any, headrace: Start, tmp_path: Path, seed: int) -> None:
    """With kill -9, when so many records have come as a die says; it ends, and every group is as it was."""
    scene = Scene(kafka, headrace, tmp_path)
    scene.read_by_the_group()
    dice = random.Random(seed)
    process = scene.run()
    job = scene.begin(process)
    for kill in range(4):
        enough = (kill * RECORDS + dice.randrange(1, RECORDS)) // 4
        wait_for(lambda enough=enough: len(scene.arrived(job)) >= enough, f"{enough} records")  # type: ignore[misc]
        process.kill()
        process = scene.run()
    scene.check(process, job, 4)
    scene.backend.stop()
