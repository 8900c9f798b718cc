"""Partitions are sought and paused and records skipped while processes die and rebalance under load; the ledger judges.

Everything is asked for over HTTP, of a process that may have the partition or not, and may die of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.api import Api
from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.errors import HeadraceError
from headrace.kafka import Admin, Producer
from headrace.records import OutgoingRecord, TopicPartition
from headrace.testing import (
    Answer,
    Fault,
    HeadraceProcess,
    Operation,
    PauseSpan,
    RecordingBackend,
    Seek,
    Skip,
    check_pushed,
)
from headrace.testing.evidence import gather

CONSUMER = "/adm/reactive-consumers/push"
PATIENCE_SECONDS = 200.0


class Feeder(threading.Thread):
    """Writes unique records to every partition in turn, until it is told to stop."""

    def __init__(self, kafka: KafkaConfig, topic: str, partitions: int, per_round: int) -> None:
        super().__init__()
        self.written = [0] * partitions
        self._kafka, self._topic, self._per_round = kafka, topic, per_round
        self._stop_asked = threading.Event()

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        producer = Producer(self._kafka, ProducerConfig())
        await producer.start()
        numbers = itertools.count()
        while not self._stop_asked.is_set():
            for partition in range(len(self.written)):
                batch = [
                    OutgoingRecord(self._topic, b"k%d" % (n % 97), b"%d" % n, None, partition)
                    for n in itertools.islice(numbers, self._per_round)
                ]
                assert not [result for result in await producer.produce(batch) if isinstance(result, Exception)]
                self.written[partition] += len(batch)
            await asyncio.sleep(0.1)
        await producer.stop()

    def stop(self) -> None:
        """Write no more."""
        self._stop_asked.set()
        self.join(120)


class Scene:
    """A topic, a backend with a journal, and processes of one deployment that push to it."""

    def __init__(self, cluster: Any, start: Callable[..., HeadraceProcess], folder: Path) -> None:
        self.topic, self._start = f"steer-{uuid.uuid4().hex[:8]}", start
        self.group, self.journal = f"{self.topic}-push", folder / "journal"
        self.backend = RecordingBackend(journal=self.journal)
        self.backend.answer = Answer(delay_seconds=0.02)
        self.kafka = KafkaConfig(bootstrap_servers=cluster.bootstrap_servers)
        self.admin = Admin(self.kafka)
        self.cluster = cluster
        self.partitions = 0
        self.faults: list[Fault] = []
        self.operations: dict[int, list[Operation]] = {}

    def create(self, partitions: int) -> None:
        """Create the topics."""
        self.partitions = partitions
        self.operations = {number: [] for number in range(partitions)}
        self.cluster.create_topic(self.topic, partitions, {})
        self.cluster.create_topic(f"{self.topic}.dlq", partitions, {"message.timestamp.type": "LogAppendTime"})

    def run(self, failpoints: str = "", *, wait: bool = True) -> HeadraceProcess:
        """Start a process of the deployment."""
        consumer = {
            "topics": [self.topic],
            "group": self.group,
            "backend": {"url": self.backend.url, "timeout_seconds": 600},
            "key_format": "string",
            "value_format": "string",
            "ordering": "key",
            "batch": {"max_records": 10},
            "max_in_flight": 8,
            "consumer": {"session_timeout_seconds": 3},
        }
        config = {
            "kafka": {"bootstrap_servers": self.kafka.bootstrap_servers},
            "control": {"topic": f"_headrace-control-{self.topic}"},
            "reactive_consumers": {"push": consumer},
        }
        return self._start(config, wait=wait, env={"HEADRACE_FAILPOINTS": failpoints})

    def write(self, records: int, keys: int = 7) -> None:
        """Write so many records of so many keys to each partition."""

        async def produce() -> None:
            producer = Producer(self.kafka, ProducerConfig())
            await producer.start()
            batch = [
                OutgoingRecord(self.topic, b"k%d" % (n % keys), b"%d-%d" % (p, n), None, p)
                for n in range(records)
                for p in range(self.partitions)
            ]
            assert not [result for result in await producer.produce(batch) if isinstance(result, Exception)]
            await producer.stop()

        asyncio.run(produce())

    @contextlib.contextmanager
    def fault(self) -> Iterator[None]:
        """Until this ends, what no commit had ended when it began may be delivered again."""
        begin = time.time()
        yield
        self.faults.append(Fault(begin, time.time()))

    def wait_handled(self, more: int) -> None:
        """Wait until the backend has handled so many more records than now."""
        wanted = self.backend.accepted_records + more
        wait_for(lambda: self.backend.accepted_records >= wanted, f"{more} more records at the backend")

    def committed(self) -> dict[TopicPartition, int]:
        """Return what the group has committed."""
        return asyncio.run(self.admin.committed(self.group))

    def members(self) -> int:
        """Return how many members the group has."""
        groups = asyncio.run(self.admin.list_groups())
        return next((group.members for group in groups if group.name == self.group), 0)

    def wait_done(self) -> None:
        """Wait until the group has committed the end of every partition."""

        async def left() -> int:
            offsets, committed = await self.admin.topic_offsets(self.topic), await self.admin.committed(self.group)
            return sum(abs(end - committed.get(partition, 0)) for partition, (_, end) in offsets.items())

        wait_for(lambda: asyncio.run(left()) == 0, "the commits to reach the end")

    def check(self) -> None:
        """Ask the ledger."""
        runs = asyncio.run(gather(self.kafka, self.admin, self.group, self.topic, self.journal))
        assert [run.log[0].partition for run in runs] == list(range(self.partitions))
        for run in runs:
            found = check_pushed(run, "key", self.faults, self.operations[run.log[0].partition])
            assert found == [], f"partition {run.log[0].partition}"


def wait_for(condition: Callable[[], Any], what: str) -> None:
    """Wait for a condition."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def ask(process: HeadraceProcess, action: str, **body: Any) -> None:
    """Ask a process for something; it may die before it answers, and need not do it at once."""
    with contextlib.suppress(HeadraceError, OSError):
        Api(process.url).request("POST", f"{CONSUMER}/{action}?waitSeconds=0", body)


def details(process: HeadraceProcess) -> dict[str, Any]:
    """Return what a process says of its consumer; nothing while it cannot be asked."""
    try:
        return Api(process.url).request("GET", CONSUMER)
    except (HeadraceError, OSError):
        return {"commands": [{}], "partitions": [], "paused": None}


def wait_obeyed(process: HeadraceProcess) -> None:
    """Wait until no command waits for a process any more."""
    wait_for(lambda: not details(process)["commands"], "every command to be done")


@pytest.fixture
def scene(kafka: Any, headrace: Any, tmp_path: Path) -> Iterator[Scene]:
    """A backend, and what starts processes; the topics are still to be created."""
    made = Scene(kafka, headrace, tmp_path)
    made.backend.start()
    yield made
    made.backend.stop()


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "point",
    [
        pytest.param("seek.before", marks=pytest.mark.long),
        pytest.param("seek.committed", marks=pytest.mark.long),
        "seek.after",
    ],
)
def test_a_process_dies_of_a_seek(scene: Scene, point: str) -> None:
    """Before the new offset is committed, before it begins there, or before it says so: the next process goes on."""
    scene.create(1)
    process = scene.run(f"{point}=crash")
    scene.write(300)
    scene.wait_handled(120)
    begin = time.time()
    with scene.fault():
        ask(process, "seek", partitions=[0], offset=30)
        wait_for(lambda: process.exit_code is not None, f"the crash at {point}")
        assert process.exit_code == -signal.SIGKILL
        if point != "seek.before":
            assert scene.committed() == {TopicPartition(scene.topic, 0): 30}
        process = scene.run()
        wait_obeyed(process)
        scene.operations[0].append(Seek(begin, time.time(), 30))
    scene.wait_done()
    scene.check()
    assert process.terminate() == 0


@pytest.mark.timeout(500)
def test_a_skip_outlives_the_process_that_did_it(scene: Scene) -> None:
    """One record hangs and all others wait behind it; whoever skips it dies before it can commit that."""
    scene.create(1)
    scene.backend.answer = lambda request: Answer(delay_seconds=600 if request.body[0]["offset"] == 0 else 0.01)
    scene.write(60, keys=1)  # first, because the end of an empty partition would be committed
    process = scene.run("commit.before=crash")
    wait_for(lambda: scene.journal.exists() and scene.journal.stat().st_size, "the record that hangs")
    begin = time.time()
    with scene.fault():
        ask(process, "skip", partition=0, offset=0, reason="the handler hangs on it")
        wait_for(lambda: process.exit_code is not None, "the crash at the first commit")
        assert process.exit_code == -signal.SIGKILL
        process = scene.run()
        scene.operations[0].append(Skip(begin, time.time(), 0))
    scene.wait_done()
    scene.check()
    assert process.terminate() == 0


@pytest.mark.long
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("changes", [3, pytest.param(20, marks=pytest.mark.long)])
def test_steering_while_two_processes_take_turns(scene: Scene, changes: int) -> None:
    """Each change one process dies while a partition is sought, another is paused, and a record of that is skipped."""
    scene.create(4)
    feeder = Feeder(scene.kafka, scene.topic, 4, per_round=20)
    processes = [scene.run(), scene.run()]
    wait_for(lambda: scene.members() == 2, "both to be members")
    feeder.start()
    for change in range(changes):
        one, other = processes[change % 2], processes[1 - change % 2]
        scene.wait_handled(1500)
        sought, paused = change % 4, (change + 1) % 4
        ask(other, "pause", partitions=[paused], reason="test")
        wait_for(lambda: stands(paused, [one, other]), "the pause")  # noqa: B023 called here
        paused_at, coming = time.time(), feeder.written[paused]
        wait_for(lambda: feeder.written[paused] > coming, "a record that nobody has had")  # noqa: B023 called here
        begin = time.time()
        with scene.fault():
            place = scene.committed().get(TopicPartition(scene.topic, sought), 0)
            target = min(max(0, place - 100) if change % 2 else place + 30, feeder.written[sought])
            ask(other, "seek", partitions=[sought], offset=target)
            ask(other, "skip", partition=paused, offset=coming, reason="test")
            one.kill()
            one.start()
            one.wait_ready()
            wait_for(lambda: scene.members() == 2, "both to be members")
            wait_obeyed(other)
            scene.operations[sought].append(Seek(begin, time.time(), target))
            scene.operations[paused].append(Skip(begin, time.time(), coming))
        scene.operations[paused].append(PauseSpan(paused_at, time.time()))
        ask(other, "resume", partitions=[paused])
    feeder.stop()
    scene.wait_done()
    scene.check()
    assert [process.terminate() for process in processes] == [0, 0]


def stands(number: int, processes: list[HeadraceProcess]) -> bool:
    """Return whether a partition is paused, and nothing of it is in flight in any process."""
    found = [one for process in processes for one in details(process)["partitions"] if one["partition"] == number]
    return len(found) == len(processes) and all(one["paused"] and not one["inFlight"] for one in found)
