"""Records are pushed while our own processes crash and stop and the backend misbehaves; the ledger judges.

The backend's journal, the topics and the group's commits are the evidence, nothing of what Headrace says of itself.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import re
import signal
import sys
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.delivery.dead_letter import origin_of
from headrace.kafka import Admin, Producer
from headrace.records import OutgoingRecord, Record, TopicPartition
from headrace.testing import Answer, Fault, HeadraceProcess, Pushed, Received, RecordingBackend, check_pushed
from headrace.testing.evidence import gather, read_journal, unique_records

SRC = Path(__file__).parents[2] / "src" / "headrace"
DELEGATED = ("redrive.", "replay.", "seek.")
"""Points on ways that a record takes only when somebody asks for it; they have tests of their own."""
POINTS = sorted(
    name
    for file in SRC.rglob("*.py")
    for name in re.findall(r"\breach\(\"([a-z.-]+)\"\)", file.read_text())
    if not name.startswith(DELEGATED)
)
AT_ONCE = 6
PARTITIONS = 4
SAME_MEMBER = {"instance_id": "one"}
"""Whoever is started again takes its own place in the group at once."""
SHORT_SESSION = {"session_timeout_seconds": 3}
"""For those who wait until a peer takes over; whoever only stands still for a moment must not lose its session."""


def luck(*what: object) -> float:
    """Return a number below 100, the same for the same things."""
    return zlib.crc32(repr(what).encode()) % 10_000 / 100


class Hostile:
    """Answers badly now and then; always in the same way to the same request, and never for ever."""

    def __init__(self, seed: int, delay_seconds: float = 0.002, poison: float = 2, flaky: float = 10) -> None:
        """So many of a hundred records always fail, and so many the first time."""
        self._seed, self._poison, self._flaky = seed, poison, flaky
        self._delay_seconds = delay_seconds
        self._seen: Counter[str] = Counter()

    def __call__(self, request: Received) -> Answer:
        first = request.body[0]["value"]
        self._seen[first] += 1
        delay = self._delay_seconds * luck("delay", first) / 50
        match int(luck(self._seed, first, self._seen[first])):
            case 0:
                return Answer(cut_after_bytes=0)
            case 1:
                return Answer(cut_after_bytes=20)
            case 2:
                return Answer(body=b"<html>")
            case 3:
                return Answer(body=[])
            case 4:
                return Answer(503, body={})
            case 5:
                return Answer(delay_seconds=0.1, fails=self._fails)
            case 6:
                return Answer(drip_seconds=0.001, fails=self._fails)
        return Answer(delay_seconds=delay, fails=self._fails)

    def _fails(self, record: dict[str, Any]) -> bool:
        number = luck(self._seed, record["value"])
        return number < self._poison or (number < self._poison + self._flaky and record["attempt"] == 1)


def write(kafka: KafkaConfig, records: list[OutgoingRecord]) -> None:
    """Write records and wait until all are acknowledged."""

    async def produce() -> None:
        producer = Producer(kafka, ProducerConfig())
        await producer.start()
        results = await producer.produce(records)
        await producer.stop()
        assert not [result for result in results if isinstance(result, Exception)]

    asyncio.run(produce())


class Scene:
    """A topic, its dead letter topic, a backend with a journal, and Headrace processes of one group."""

    def __init__(self, cluster: Any, start: Callable[..., HeadraceProcess], folder: Path, **given: Any) -> None:
        name = f"push-{uuid.uuid4().hex[:8]}"
        self.cluster, self.topic, self.group, self._start = cluster, name, f"{name}-push", start
        self.journal = folder / "journal"
        self.backend = given.get("backend") or RecordingBackend(journal=self.journal)
        self.kafka = KafkaConfig(bootstrap_servers=cluster.bootstrap_servers)
        self.admin = Admin(self.kafka)
        self.written = self.dead_letters = 0
        self.faults: list[Fault] = []
        self.settings: dict[str, Any] = {
            "ordering": "key",
            "batch": {"max_records": 20},
            "retry": {"attempts": 3, "first_delay_seconds": 0.05, "max_delay_seconds": 0.2},
        }
        partitions = given.get("partitions", PARTITIONS)
        cluster.create_topic(name, partitions, {})
        # Stamped by the broker when it appends, so that it is known what was there before a commit.
        cluster.create_topic(f"{name}.dlq", partitions, {"message.timestamp.type": "LogAppendTime"})

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of a process of the group."""
        return {
            "kafka": {"bootstrap_servers": self.cluster.bootstrap_servers},
            "reactive_consumers": {"push": self.consumer},
        }

    @property
    def consumer(self) -> dict[str, Any]:
        """Its reactive consumer."""
        backend = {"url": self.backend.url, "timeout_seconds": 600}
        place = {"topics": [self.topic], "group": self.group, "backend": backend}
        return {**place, "key_format": "string", "value_format": "string", **self.settings}

    def run(self, failpoints: str = "", *, wait: bool = True, **env: str) -> HeadraceProcess:
        """Start a process of the group, with failpoints if any are named."""
        return self._start(self.config, wait=wait, env={"HEADRACE_FAILPOINTS": failpoints, **env})

    def new(self, records: int) -> list[OutgoingRecord]:
        """Return so many unique records that nobody has written yet."""
        begin, self.written = self.written, self.written + records
        return list(itertools.islice(unique_records(self.topic, 1), begin, self.written))

    def write(self, records: int) -> None:
        """Write unique records and wait until all are acknowledged."""
        write(self.kafka, self.new(records))

    def crashed(self, process: HeadraceProcess, point: str) -> None:
        """Wait until a process has met its failpoint and note the fault; it began when the process said its last."""
        self.wait_for(lambda: process.exit_code is not None, f"the crash at {point}")
        assert (process.exit_code, f"failpoint {point}: crash" in process.output) == (-signal.SIGKILL, True), point
        self.faults.append(Fault(process.server.log.stat().st_mtime, time.time()))

    def raised(self, process: HeadraceProcess, point: str, begin: float) -> None:
        """Wait until a defect has shown, and for the end of the process, which may be its own decision."""
        self.wait_for(lambda: f"failpoint {point}: raise" in process.output, f"the defect at {point}")
        process.terminate()
        self.faults.append(Fault(begin, time.time()))

    @contextmanager
    def fault(self) -> Iterator[None]:
        """Until this ends, what no commit had ended when it began may be delivered again."""
        begin = time.time()
        yield
        self.faults.append(Fault(begin, time.time()))

    def wait_for(self, condition: Callable[[], Any], what: str, limit_seconds: float = 200.0) -> None:
        """Wait for a condition."""
        end = time.monotonic() + limit_seconds
        while not condition():
            assert time.monotonic() < end, f"waited {limit_seconds:.0f} s in vain for {what}"
            time.sleep(0.02)

    def wait_handled(self, records: int) -> None:
        """Wait until the backend has handled so many records."""
        self.wait_for(lambda: self.backend.accepted_records >= records, f"{records} records at the backend")

    def wait_done(self) -> None:
        """Wait until the group has committed the end of every partition."""

        async def left() -> int:
            offsets, committed = await self.admin.topic_offsets(self.topic), await self.admin.committed(self.group)
            return sum(end - committed.get(partition, 0) for partition, (_, end) in offsets.items())

        self.wait_for(lambda: asyncio.run(left()) == 0, "the commits to reach the end")

    def committed(self) -> dict[TopicPartition, int]:
        """Return what the group has committed."""
        return asyncio.run(self.admin.committed(self.group))

    def members(self) -> int:
        """Return how many members the group has."""
        groups = asyncio.run(self.admin.list_groups())
        return next((group.members for group in groups if group.name == self.group), 0)

    def attempts(self) -> int:
        """Return how many deliveries of single records the backend has noted."""
        return sum(len(attempts) for attempts in read_journal(self.journal).values())

    def evidence(self) -> list[Pushed]:
        """Return all that is known, partition by partition."""
        return asyncio.run(gather(self.kafka, self.admin, self.group, self.topic, self.journal))

    def check(self) -> list[str]:
        """Return what the ledger has to say of every partition."""
        found = self.evidence()
        self.dead_letters = sum(len(run.dead_letters) for run in found)
        assert sum(len(run.log) for run in found) == self.written
        ordering = self.settings["ordering"]
        return [text for run in found for text in check_pushed(run, ordering, self.faults)]


def letter_attempts(letter: Record) -> int:
    """Return how often a dead letter was delivered before."""
    origin = origin_of(letter.headers)
    assert origin
    return origin.attempts


@pytest.fixture
def scene(kafka: Any, topic: Any, headrace: Any, tmp_path: Path) -> Iterator[Scene]:
    """A topic, a backend with a journal, and what starts processes of the group."""
    made = Scene(kafka, headrace, tmp_path)
    made.backend.start()
    yield made
    made.backend.stop()


@pytest.mark.timeout(500)
def test_headrace_is_killed_while_it_pushes_to_a_hostile_backend(scene: Scene) -> None:
    """Three times kill -9 (row A1): nothing lost or skipped, order by key, no repeat of what a commit had ended."""
    scene.settings["consumer"] = SAME_MEMBER
    scene.backend.answer = Hostile(seed=1)
    process = scene.run()
    for _ in range(3):
        had = scene.backend.accepted_records
        scene.write(600)
        scene.wait_handled(had + 250)
        with scene.fault():
            process.kill()
            process = scene.run()
    scene.wait_done()
    assert scene.check() == []
    assert process.terminate() == 0


COMMITS_WHAT_WAS_HANDED_OUT = """
from headrace.delivery.pump import Pump
from headrace.records import Committed

real = Pump.on_records

def on_records(self, partition, epoch, records):
    real(self, partition, epoch, records)
    self.source.commit({partition: Committed(records[-1].offset + 1)})

Pump.on_records = on_records
"""
LETS_GO_OF_KEYS_TOO_EARLY = """
from headrace.delivery.lane import Lane

real = Lane.take

def take(self):
    batch = real(self)
    self.ended(batch.records)
    return batch

Lane.take = take
"""


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("mutant", "kind"),
    [(COMMITS_WHAT_WAS_HANDED_OUT, "ahead"), (LETS_GO_OF_KEYS_TOO_EARLY, "order")],
    ids=["commits-what-was-handed-out", "lets-go-of-keys-too-early"],
)
def test_the_ledger_catches_a_headrace_that_is_broken(scene: Scene, tmp_path: Path, mutant: str, kind: str) -> None:
    """A process that was changed for it pushes, and what the ledger reads of broker and backend gives it away."""
    (tmp_path / "sitecustomize.py").write_text(mutant)
    scene.backend.answer = Answer(delay_seconds=600)
    scene.write(100)
    process = scene.run(PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    deeds: dict[str, Callable[[], Any]] = {"ahead": scene.committed, "order": lambda: scene.attempts() == 100}
    scene.wait_for(deeds[kind], "the mutant's deed")
    scene.backend.answer = Answer()
    scene.backend.release()
    scene.wait_done()
    scene.wait_handled(100)
    assert {text.partition(":")[0] for text in scene.check()} >= {kind}
    process.kill()


def fail_at(scene: Scene, point: str, action: str) -> Callable[[], None]:
    """Start a process that is to fail at a point; return what leads it there and waits for its end."""
    begin = time.time()
    process = scene.run(f"{point}={action}", wait=False)

    def lead() -> None:
        if point.startswith(("revoke", "drain")):
            scene.wait_for(scene.committed, "a commit, so there is something to revoke")
            process.server.signal(signal.SIGTERM)
        elif point.startswith("lost"):
            scene.wait_for(scene.committed, "a commit, so there is something to lose")
            process.server.signal(signal.SIGSTOP)
            scene.wait_for(lambda: scene.members() == 0, "the broker to give the member up")
            process.server.signal(signal.SIGCONT)
        if action == "crash":
            scene.crashed(process, point)
        else:
            scene.raised(process, point, begin)

    return lead


@pytest.mark.timeout(500)
@pytest.mark.parametrize("action", ["crash", pytest.param("raise", marks=pytest.mark.long)])
def test_a_crash_at_any_point_costs_repeats_only(kafka: Any, headrace: Any, tmp_path: Path, action: str) -> None:
    """Every failpoint is hit once (rows A8, A9), or raises; a process that comes later finishes the work of all."""
    backend = RecordingBackend(journal=tmp_path / "journal")
    refused: set[str] = set()

    def answer(request: Received) -> Answer:
        """Refuse the first request of a topic; of every topic one record fails always."""
        topic = request.body[0]["topic"]
        if topic not in refused:
            refused.add(topic)
            return Answer(503, body={})
        return Answer(fails=lambda record: record["offset"] == 3)

    backend.answer = answer
    backend.start()
    scenes: dict[str, Scene] = {}
    for point in POINTS:
        scenes[point] = Scene(kafka, headrace, tmp_path, backend=backend, partitions=1)
        scenes[point].settings.update(batch={"max_records": 4}, ordering="partition", consumer=SHORT_SESSION)
        scenes[point].settings["retry"] = {"attempts": 2, "first_delay_seconds": 0.05, "max_delay_seconds": 0.1}
    write(
        KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), [r for scene in scenes.values() for r in scene.new(12)]
    )
    for first in range(0, len(POINTS), AT_ONCE):
        for lead in [fail_at(scenes[point], point, action) for point in POINTS[first : first + AT_ONCE]]:
            lead()
    consumers = {f"push{number}": scene.consumer for number, scene in enumerate(scenes.values())}
    last = headrace({**scenes[POINTS[0]].config, "reactive_consumers": consumers})
    for point, scene in scenes.items():
        scene.wait_done()
        assert scene.check() == [], point
        assert scene.dead_letters in ((2,) if (point, action) == ("dead_letter.after", "crash") else (1, 2)), point
    assert last.terminate() == 0
    backend.stop()


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "point",
    [
        "commit.sent",
        pytest.param("commit.before", marks=pytest.mark.long),
        pytest.param("delivery.after", marks=pytest.mark.long),
    ],
)
def test_a_frozen_process_comes_back_as_nobody(scene: Scene, point: str) -> None:
    """It stands still beyond its session and a peer takes over (row A7); what it then still says counts for nothing."""
    scene.settings["consumer"] = SHORT_SESSION
    scene.backend.answer = Hostile(seed=2)
    scene.write(400)
    frozen = scene.run(f"{point}=stop", wait=False)
    scene.wait_for(lambda: f"failpoint {point}: stop" in frozen.output, "the stop")
    begin = frozen.server.log.stat().st_mtime
    scene.wait_for(lambda: scene.members() == 0, "the broker to give the member up")
    peer = scene.run()
    scene.wait_done()
    frozen.server.signal(signal.SIGCONT)
    scene.wait_for(lambda: scene.members() == 2, "both to be members")
    scene.write(400)
    scene.wait_done()
    scene.faults.append(Fault(begin, time.time()))
    assert scene.check() == []
    assert (frozen.terminate(), peer.terminate()) == (0, 0)


@pytest.mark.timeout(500)
def test_a_backend_that_fails_costs_attempts_and_nothing_else(scene: Scene) -> None:
    """It answers 500 to all, then to a fifth (row E1): every record ends, after five attempts as a dead letter."""
    outage, seen = iter(range(15)), Counter[str]()

    def answer(request: Received) -> Answer:
        first = request.body[0]["value"]
        seen[first] += 1
        down = next(outage, None) is not None or luck(first, seen[first]) < 20
        return Answer(500) if down else Answer(fails=lambda record: luck("never", record["value"]) < 1)

    scene.backend.answer = answer
    scene.settings["retry"]["attempts"] = 5
    scene.write(1000)
    process = scene.run()
    scene.wait_done()
    assert scene.check() == []
    assert {letter_attempts(letter) for run in scene.evidence() for letter in run.dead_letters} == {5}
    assert process.terminate() == 0


@pytest.mark.timeout(500)
def test_a_backend_that_is_away_costs_nothing(scene: Scene) -> None:
    """Connections are refused, then it is back (row E2): no dead letters, and every record is delivered once."""
    scene.backend.stop()
    scene.settings["retry"]["attempts"] = 1
    scene.write(10_000)
    process = scene.run("delivery.refused=delay:0@5")
    scene.wait_for(lambda: "failpoint delivery.refused" in process.output, "five refusals")
    scene.backend.start()
    scene.wait_done()
    assert scene.check() == []
    assert (scene.dead_letters, scene.backend.accepted_records) == (0, 10_000)
    assert process.terminate() == 0


@pytest.mark.timeout(500)
def test_without_order_a_crash_repeats_only_what_was_open(scene: Scene) -> None:
    """A hundred single records at a time, each as slow as it likes (row E8): what commits and maps have stays ended."""
    scene.settings["consumer"] = SAME_MEMBER
    scene.backend.answer = lambda request: Answer(delay_seconds=luck(request.body[0]["value"]) / 200)
    scene.settings.update(ordering="none", batch={"max_records": 1}, max_in_flight=100)
    scene.write(800)
    process = scene.run()
    scene.wait_handled(200)
    with scene.fault():
        process.kill()
        process = scene.run()
    scene.wait_done()
    assert scene.check() == []
    assert process.terminate() == 0


@pytest.mark.timeout(500)
def test_a_key_that_stands_still_holds_nobody_else(scene: Scene) -> None:
    """One key is never answered (row E9): all others end meanwhile, and then it does, in its order."""
    slow = "k1"
    scene.backend.answer = lambda request: Answer(delay_seconds=600 if request.body[0]["key"] == slow else 0)
    scene.settings.update(batch={"max_records": 1})
    scene.write(1000)
    held = sum(record.key == slow.encode() for record in itertools.islice(unique_records("", 1), 1000))
    process = scene.run()
    scene.wait_handled(1000 - held)
    scene.backend.answer = Answer()
    scene.backend.release()
    scene.wait_done()
    assert scene.check() == []
    assert scene.backend.accepted_records == 1000
    assert process.terminate() == 0


WORKER_DIES = """
import os, pathlib, signal

def handler(context, event):
    if event.offset in (20, 60, 90):
        mark = pathlib.Path(__file__).with_name(f"died-{event.shard_id}-{event.offset}")
        if not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return event.body
"""
FUNCTION = """
metadata: {{name: copy}}
spec:
  handler: copy_event:handler
  triggers:
    source:
      kind: kafka-cluster
      numWorkers: 2
      attributes: {{topics: [{source}], consumerGroup: {source}-copy, outputTopic: {target}}}
"""


@pytest.mark.timeout(500)
def test_a_worker_that_dies_while_handling_moves_no_partition(
    scene: Scene, topic: Callable[..., str], headrace: Any, tmp_path: Path, bed: Any
) -> None:
    """Killed at given records (row A4): another worker takes them, nothing is skipped, the group notices nothing."""
    target = topic(PARTITIONS)
    scene.write(600)
    (tmp_path / "copy_event.py").write_text(WORKER_DIES)
    (tmp_path / "function.yaml").write_text(FUNCTION.format(source=scene.topic, target=target))
    process = headrace({"kafka": scene.config["kafka"], "functions": [str(tmp_path / "function.yaml")]})
    ledger = bed.Ledger(scene.kafka.bootstrap_servers)
    records = ledger.records(scene.topic)
    wanted = {record.value for record in records}
    scene.wait_for(lambda: {record.value for record in ledger.records(target)} == wanted, "every copy")
    scene.wait_for(lambda: ledger.lag(f"{scene.topic}-copy") == 0, "lag 0")
    assert len(list(tmp_path.glob("died-*"))) == sum(record.offset in (20, 60, 90) for record in records) > 3
    assert ledger.records(f"{scene.topic}.dlq") == []
    assert (process.output.count(": assigned "), process.output.count(": revoked ")) == (1, 0)
    assert process.terminate() == 0


class Feeder:
    """Writes unique records at a rate, in a thread."""

    def __init__(self, scene: Scene, per_second: int) -> None:
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


def take_turns(scene: Scene, changes: int, pause: Callable[[], None]) -> None:
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
def test_two_processes_take_turns(scene: Scene, ordering: str, membership: dict[str, Any]) -> None:
    """Three changes at 2,000 records a second: nothing lost or skipped, order kept, no commit too early or back."""
    scene.settings.update(ordering=ordering, consumer=membership)
    scene.backend.answer = Hostile(seed=3, delay_seconds=0, poison=0.2, flaky=1)
    take_turns(scene, 3, lambda: scene.wait_handled(scene.backend.accepted_records + 3000))


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_two_processes_take_turns_for_ten_minutes(scene: Scene) -> None:
    """The same for ten minutes, with a change every 20 seconds."""
    scene.settings["consumer"] = SHORT_SESSION
    scene.backend.answer = Hostile(seed=4, delay_seconds=0, poison=0.2, flaky=1)
    take_turns(scene, 28, lambda: time.sleep(20))
