"""Redrives that are killed, or sleep while another takes over: nothing lost, and nothing repeated beyond the bound."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.control.redrive import REPEATS_AT_MOST
from headrace.delivery.dead_letter import headers_of
from headrace.delivery.protocols import DeadLetter, Reply
from headrace.kafka import Admin, Producer, read_records
from headrace.records import OutgoingRecord, Record, TopicPartition

COMMAND = [sys.executable, "-m", "headrace.cli.main", "dlq", "redrive"]
EXACT = ("--exactly-once",)
KILLS = 20


class Bed:
    """A topic, its dead letters, and a group with a position in both."""

    def __init__(self, kafka: Any, letters: int) -> None:
        self.settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers, request_timeout_seconds=60)
        self.admin = Admin(self.settings)
        self.topic = f"redrive-{uuid.uuid4().hex[:8]}"
        self.dlq = f"{self.topic}.dlq"
        self.letters = letters
        asyncio.run(self._fill())
        self.offsets = asyncio.run(self._offsets())

    def start(self, *words: str, failpoints: str = "") -> subprocess.Popen[str]:
        env = {**os.environ, "KAFKA": self.settings.bootstrap_servers}
        if failpoints:
            env["HEADRACE_FAILPOINTS"] = failpoints
        command = [*COMMAND, self.dlq, "--wait", "200", *words]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def run(self, *words: str, failpoints: str = "") -> int:
        with self.start(*words, failpoints=failpoints) as process:
            output, _ = process.communicate(timeout=300)
            assert "Traceback" not in output, output
        return process.returncode

    def written(self) -> int:
        """Return how many records the topic has, those of open and aborted transactions and markers included."""
        places = [TopicPartition(self.topic, number) for number in range(2)]
        return sum(asyncio.run(self.admin.written_offsets(places)).values())

    def check(self, repeats: int) -> None:
        """Every letter is back, so many are repeated at most, and no group stands elsewhere than before."""
        times = asyncio.run(self._times())
        assert set(times) == set(range(self.letters))
        assert sum(times.values()) - self.letters <= repeats
        assert asyncio.run(self._offsets()) == self.offsets

    async def _fill(self) -> None:
        producer = Producer(self.settings, ProducerConfig())
        await producer.start()
        for name in (self.topic, self.dlq):
            await self.admin.create_topic(name, 2)
        for first in range(0, self.letters, 1000):
            await producer.produce([self._letter(n) for n in range(first, min(first + 1000, self.letters))])
        await producer.stop()
        group = {TopicPartition(name, 0): number for number, name in enumerate((self.topic, self.dlq))}
        await self.admin.alter_group_offsets(f"{self.topic}-group", group)

    def _letter(self, number: int) -> OutgoingRecord:
        origin = Record(self.topic, number % 2, number, 1, None, b"%d" % number)
        letter = DeadLetter(origin, "group", 5, Reply("E", "no", permanent=True), 1.0, 2.0)
        return OutgoingRecord(self.dlq, None, origin.value, headers_of(letter), number % 2)

    async def _times(self) -> Counter[int]:
        offsets = await self.admin.topic_offsets(self.topic)
        starts, ends = {p: o[0] for p, o in offsets.items()}, {p: o[1] for p, o in offsets.items()}
        return Counter(
            [int(record.value or b"") async for batch in read_records(self.settings, starts, ends) for record in batch]
        )

    async def _offsets(self) -> dict[str, dict[TopicPartition, int]]:
        """Return where every group stands in the two topics."""
        found = {}
        for group in await self.admin.list_groups():
            committed = await self.admin.committed(group.name)
            found[group.name] = {p: o for p, o in committed.items() if p.topic in (self.topic, self.dlq)}
        return {group: offsets for group, offsets in found.items() if offsets}


def killed(bed: Bed, point: str, *words: str) -> None:
    """Kill a run when it comes to a point for the second time; the next one ends."""
    assert bed.run(*words, failpoints=f"{point}=crash@2") == -signal.SIGKILL
    assert bed.run(*words) == 0
    bed.check(0 if words == EXACT else REPEATS_AT_MOST)


def overtaken(bed: Bed) -> None:
    """Stop a run with an open transaction until another has ended, then let it wake up."""
    with bed.start(*EXACT, "--rate", "1000", failpoints="redrive.transaction.submitted=stop@2") as sleeper:
        assert sleeper.stdout
        assert "failpoint" in sleeper.stdout.readline()
        assert bed.run(*EXACT) == 0
        sleeper.send_signal(signal.SIGCONT)
        said, _ = sleeper.communicate(timeout=300)
    assert sleeper.returncode == 1, said
    assert "another process may have taken over" in said
    bed.check(0)


SCENARIOS: dict[str, Callable[[Any], None]] = {
    "sent": lambda kafka: killed(Bed(kafka, 6000), "redrive.sent"),
    "marked": lambda kafka: killed(Bed(kafka, 6000), "redrive.marked"),
    "submitted": lambda kafka: killed(Bed(kafka, 30_000), "redrive.transaction.submitted", *EXACT),
    "in a transaction": lambda kafka: killed(Bed(kafka, 30_000), "redrive.transaction.sent", *EXACT),
    "overtaken": lambda kafka: overtaken(Bed(kafka, 4000)),
}
ALWAYS = ("sent", "submitted")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "scenario", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in SCENARIOS]
)
def test_what_is_killed_or_overtaken_goes_on_where_it_was(kafka: Any, scenario: str) -> None:
    """Killed with records sent and not marked, marked, and in a transaction; and asleep while another takes over."""
    SCENARIOS[scenario](kafka)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("words", [(), EXACT], ids=["plain", "exactly-once"])
def test_killed_at_random_points(kafka: Any, words: tuple[str, ...]) -> None:
    """Twenty kills, each at some moment after the run has begun to send; then it ends."""
    bed = Bed(kafka, 200_000)
    chance = random.Random(7)
    for _ in range(KILLS):
        before = bed.written()
        with bed.start("--rate", "2000", *words) as process:
            while process.poll() is None and bed.written() == before:
                time.sleep(0.05)
            time.sleep(chance.uniform(0, 2))
            process.kill()
    assert bed.run(*words) == 0
    bed.check(0 if words else REPEATS_AT_MOST * KILLS)
