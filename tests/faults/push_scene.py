"""What the tests of pushing under faults share: a hostile backend, and a topic with processes of one group.

The backend's journal, the topics and the group's commits are the evidence, nothing of what Headrace reports of itself.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.delivery.dead_letter import origin_of
from headrace.kafka import Admin, Producer
from headrace.records import OutgoingRecord, Record, TopicPartition
from headrace.testing import Answer, Fault, HeadraceProcess, Pushed, Received, RecordingBackend, check_pushed
from headrace.testing.evidence import gather, read_journal, unique_records

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


class PushScene:
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


def dead_letter_attempts(record: Record) -> int:
    """Return how often a dead letter was delivered before."""
    origin = origin_of(record.headers)
    assert origin
    return origin.attempts
