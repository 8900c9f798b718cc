"""What the tests of pushing under faults share: a hostile backend, and a topic with processes of one group.

The backend's journal, the topics and the group's commits are the recording, nothing of what Headrace reports of itself.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.config.kafka import KafkaConfig
from headrace.config.producer_config import ProducerConfig
from headrace.errors import TopicNotFound
from headrace.kafka import Producer
from headrace.records import OutgoingRecord
from headrace_devkit.testing import (
    Fault,
    HeadraceProcess,
    PlannedResponse,
    Pushed,
    Received,
    RecordingBackend,
    check_pushed,
)
from headrace_devkit.testing.recording import GroupCommit, gather, group_commits, unique_records
from tests.faults.ledger import Background, Ledger

PARTITIONS = 4
SAME_MEMBER = {"properties": {"group.instance.id": "one"}}
"""Whoever is started again takes its own place in the group at once."""
SHORT_SESSION = {"properties": {"session.timeout.ms": 3000}}
"""For those who wait until a peer takes over; whoever only stands still for a moment must not lose its session."""


def luck(*what: object) -> float:
    """Return a number below 100, the same for the same things."""
    return zlib.crc32(repr(what).encode()) % 10_000 / 100


class Hostile:
    """Answers badly now and then; always in the same way to the same request, and never for ever."""

    def __init__(self, seed: int, delay_seconds: float = 0.002, poison: float = 2, flaky: float = 10) -> None:
        """Of a hundred records, `poison` always fail, and `flaky` the first time."""
        self._seed, self._poison, self._flaky = seed, poison, flaky
        self._delay_seconds = delay_seconds
        self._seen: Counter[str] = Counter()

    def __call__(self, request: Received) -> PlannedResponse:
        first = request.body[0]["value"]
        self._seen[first] += 1
        delay = self._delay_seconds * luck("delay", first) / 50
        match int(luck(self._seed, first, self._seen[first])):
            case 0:
                return PlannedResponse(cut_after_bytes=0)
            case 1:
                return PlannedResponse(cut_after_bytes=20)
            case 2:
                return PlannedResponse(body=b"<html>")
            case 3:
                return PlannedResponse(body=[])
            case 4:
                return PlannedResponse(503, body={})
            case 5:
                return PlannedResponse(delay_seconds=0.1, fails=self._fails)
            case 6:
                return PlannedResponse(drip_seconds=0.001, fails=self._fails)
        return PlannedResponse(delay_seconds=delay, fails=self._fails)

    def _fails(self, record: dict[str, Any]) -> bool:
        number = luck(self._seed, record["value"])
        return number < self._poison or (number < self._poison + self._flaky and record["attempt"] == 1)


class PushScenario(Ledger):
    """A topic, its dead letter topic, a backend with a journal, and Headrace processes of one group."""

    def __init__(self, cluster: Any, start: Any, folder: Path, **given: Any) -> None:
        """Create the topics; scenarios may share a backend and its journal."""
        super().__init__(cluster, folder)
        self._start = start
        self.partitions = given.get("partitions", PARTITIONS)
        self.topic = self.new_topic(self.partitions)
        # Stamped by the broker when it appends, so that it is known what was there before a commit.
        cluster.create_topic(f"{self.topic}.dlq", self.partitions, {"message.timestamp.type": "LogAppendTime"})
        self.group, self.journal = f"{self.topic}-group", folder / "journal"
        self.backend = given.get("backend") or RecordingBackend(journal=self.journal)
        self.written = self.dead_letters = 0
        self.faults: list[Fault] = []
        self.commits: Sequence[GroupCommit] = ()
        """All commits of the cluster, if scenarios share them."""
        self.properties: dict[str, Any] = {}
        """Properties of the clients of the processes."""
        self.settings: dict[str, Any] = {
            "ordering": "key",
            "batch": {"max_records": 20},
            "retry": {"attempts": 3, "first_delay_seconds": 0.05, "max_delay_seconds": 0.2},
        }

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of a process of the group."""
        return {**super().config, "reactive_consumers": {"push": self.consumer}}

    @property
    def consumer(self) -> dict[str, Any]:
        """Its reactive consumer."""
        backend = {"url": self.backend.url, "timeout_seconds": 600}
        place = {"topics": [self.topic], "group": self.group, "backend": backend}
        return {**place, "key_format": "string", "value_format": "string", **self.settings}

    def run(self, failpoints: str = "", *, wait: bool = True, servers: str = "", **env: str) -> HeadraceProcess:
        """Start a process of the group, with failpoints if any are named; it may reach the brokers another way."""
        config, kafka = self.config, {"properties": self.properties}
        config["kafka"] = {**config["kafka"], **kafka, **({"bootstrap_servers": servers} if servers else {})}
        process: HeadraceProcess = self._start(config, wait=wait, env={"HEADRACE_FAILPOINTS": failpoints, **env})
        return process

    def new(self, records: int) -> list[OutgoingRecord]:
        """Return this many unique records that nobody has written yet."""
        begin, self.written = self.written, self.written + records
        return list(itertools.islice(unique_records(self.topic, 1), begin, self.written))

    def fill(self, records: int) -> None:
        """Write unique records and wait until all are acknowledged."""
        self.write(self.topic, *self.new(records))

    def ends(self) -> list[int]:
        """Return the end of each partition; none while a broker does not know all of them."""
        try:
            offsets = asyncio.run(self.admin.topic_offsets(self.topic))
        except TopicNotFound:
            return []
        return [offsets[partition][1] for partition in sorted(offsets)]

    def crashed(self, process: HeadraceProcess, point: str) -> None:
        """Wait until a process has met its failpoint and record the fault; it began when the process said its last."""
        self.wait_until(lambda: process.exit_code is not None, f"the crash at {point}")
        assert (process.exit_code, f"failpoint {point}: crash" in process.output) == (-signal.SIGKILL, True), point
        self.backend.settle()
        self.faults.append(Fault(process.server.log.stat().st_mtime, time.time()))

    def raised(self, process: HeadraceProcess, point: str, begin: float) -> None:
        """Wait until a defect has shown, and for the end of the process, which may be its own decision."""
        self.wait_until(lambda: f"failpoint {point}: raise" in process.output, f"the defect at {point}")
        process.terminate()
        self.faults.append(Fault(begin, time.time()))

    @contextmanager
    def fault(self) -> Iterator[None]:
        """Until this ends, what no commit had ended when it began may be delivered again."""
        begin = time.time()
        yield
        self.backend.settle()
        self.faults.append(Fault(begin, time.time()))

    def wait_handled(self, records: int) -> None:
        """Wait until the backend has handled this many records."""
        self.wait_until(lambda: self.backend.accepted_records >= records, f"{records} records at the backend")

    def wait_more(self, records: int = 500) -> None:
        """Wait until the backend has handled this many more records than now."""
        self.wait_handled(self.backend.accepted_records + records)

    def wait_members(self, count: int) -> None:
        """Wait until the group has this many members."""
        self.wait_until(lambda: self.members(self.group) == count, f"{count} members of {self.group}")

    def wait_done(self) -> None:
        """Wait until the group has committed the end of every partition."""
        self.wait_committed_all(self.topic, self.group)

    def check_done(self) -> None:
        """Wait until the group has committed the end of every partition, and compare all with the ledger."""
        self.wait_done()
        assert not (wrong := self.check()), wrong

    def read_commits(self) -> Sequence[GroupCommit]:
        """Return all commits of the cluster."""
        return asyncio.run(group_commits(self.kafka, self.admin))

    def recording(self) -> list[Pushed]:
        """Return all that is known, partition by partition."""
        return asyncio.run(gather(self.kafka, self.admin, self.group, self.topic, self.journal, self.commits))

    def check(self, but: str = "") -> list[str]:
        """Return what the ledger has to say of every partition, but for sentences of one kind."""
        found = self.recording()
        self.dead_letters = sum(len(run.dead_letters) for run in found)
        assert sum(len(run.log) for run in found) == self.written
        said = [text for run in found for text in check_pushed(run, self.settings["ordering"], self.faults)]
        return [text for text in said if not (but and text.startswith(but))]


class Feeder(Background):
    """Writes unique records at a rate, in a thread, until it ends."""

    def __init__(self, scenario: PushScenario, per_second: int) -> None:
        super().__init__()
        self._scenario, self._per_second = scenario, per_second

    def _run(self, number: int) -> None:
        asyncio.run(self._feed())

    async def _feed(self) -> None:
        # It uses new partitions soon, and outlives an outage of brokers.
        properties = {"topic.metadata.refresh.interval.ms": 500}
        kafka = KafkaConfig(bootstrap_servers=self._scenario.kafka.bootstrap_servers, properties=properties)
        producer = Producer(kafka, ProducerConfig(properties={"delivery.timeout.ms": 200_000}))
        await producer.start()
        # A billion keys: the most frequent one has three of a hundred records, and they wait for each other.
        records = unique_records(self._scenario.topic, seed=7, keys=10**9)
        begin, first = time.monotonic(), self._scenario.written
        while not self._stopped.is_set():
            due = int((time.monotonic() - begin) * self._per_second) - self._scenario.written + first
            results = await producer.produce(list(itertools.islice(records, min(max(due, 1), 1000))))
            assert not [result for result in results if isinstance(result, Exception)]
            self._scenario.written += len(results)
            await asyncio.sleep(0.1)
        await producer.stop()
