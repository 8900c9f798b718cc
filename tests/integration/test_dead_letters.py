"""Dead letters on a real broker: seen, redriven, and none lost when a redrive is killed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.control.dead_letters import group_of
from headrace.delivery.dead_letter import DeadLetterTopic
from headrace.delivery.protocols import DeadLetter, Outcome, Verdict
from headrace.kafka import Admin, Producer, read_records
from headrace.records import OutgoingRecord, Record, TopicPartition

COMMAND = [sys.executable, "-m", "headrace.cli.main"]


@pytest.fixture
def settings(kafka: Any) -> KafkaConfig:
    return KafkaConfig(bootstrap_servers=kafka.bootstrap_servers, request_timeout_seconds=60)


@pytest.fixture
def env(kafka: Any) -> Mapping[str, str]:
    return {**os.environ, "KAFKA": kafka.bootstrap_servers}


@pytest.fixture
def headrace(env: Mapping[str, str], tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*COMMAND, *words], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=240)
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
        return done

    return run


async def read_all(settings: KafkaConfig, topic: str) -> list[Record]:
    offsets = await Admin(settings).topic_offsets(topic)
    starts, ends = {p: o[0] for p, o in offsets.items()}, {p: o[1] for p, o in offsets.items()}
    return [record async for batch in read_records(settings, starts, ends) for record in batch]


async def write_letters(settings: KafkaConfig, topic: str, count: int) -> None:
    """Write `count` records to the topic, and each as a dead letter, as a reactive consumer would."""
    producer = Producer(settings, ProducerConfig())
    await producer.start()
    own = [("trace", b"\x00\xff"), ("trace", None)]
    await producer.produce(
        [OutgoingRecord(topic, f"k{n}".encode(), f"v{n}\xff".encode("latin-1"), own) for n in range(count)]
    )
    letters = [
        DeadLetter(record, "billing", 5, Outcome(Verdict.DEAD_LETTER, "HTTP 400", "no such order"), 1.0, 2.0)
        for record in await read_all(settings, topic)
    ]
    await DeadLetterTopic("{topic}.dlq", producer.produce, Admin(settings).ensure_topic_like).write(letters)
    await producer.stop()


def test_letters_are_listed_shown_and_redriven_byte_for_byte(headrace: Any, topic: Any, settings: KafkaConfig) -> None:
    """The whole way: numbers, one letter, a dry run, the redrive, and nothing left; records come back as they were."""
    name = topic(3)
    dlq = f"{name}.dlq"
    asyncio.run(write_letters(settings, name, 40))
    (row,) = [row for row in json.loads(headrace("dlq", "list", "--output", "json").stdout) if row["topic"] == dlq]
    assert row == {"topic": dlq, "total": 40, "left": 40, "errors": {"HTTP 400": 40}, "foreign": 0}
    (shown,) = json.loads(headrace("dlq", "show", dlq, "--max", "1", "--output", "json").stdout)
    assert (shown["error"], shown["reason"], shown["group"], shown["attempts"]) == (
        "HTTP 400",
        "no such order",
        "billing",
        5,
    )
    assert f"40 letters of {dlq} would go back: 40 to {name}" in headrace("dlq", "redrive", dlq, "--dry-run").stdout
    assert len(asyncio.run(read_all(settings, name))) == 40
    said = headrace("dlq", "redrive", dlq).stdout
    assert said == f"40 letters of {dlq} back and acknowledged: 40 to {name}\n"

    records = asyncio.run(read_all(settings, name))
    first = {(r.partition, r.offset): r for r in records if not any(h[0].startswith("headrace.") for h in r.headers)}
    again = [r for r in records if (r.partition, r.offset) not in first]
    assert len(first) == len(again) == 40
    for record in again:
        headers = dict(record.headers)
        _, partition, offset = (headers["headrace.redrive.of"] or b"").decode().rsplit(":", 2)
        origin = first[int(partition), int(offset)]
        assert (record.key, record.value, record.partition) == (origin.key, origin.value, origin.partition)
        assert record.headers[:2] == [("trace", b"\x00\xff"), ("trace", None)]
        assert headers["headrace.redrive.count"] == b"1"
        assert len(record.headers) == 4

    assert headrace("dlq", "redrive", dlq).stdout == f"nothing left to redrive in {dlq}\n"
    lag = json.loads(headrace("groups", "lag", group_of(dlq), "--output", "json").stdout)
    assert sum(entry["lag"] for entry in lag) == 0
    assert json.loads(headrace("dlq", "list", dlq, "--output", "json").stdout)[0]["left"] == 0


def test_places_that_are_not_there_and_topics_that_are_none(headrace: Any, topic: Any, settings: KafkaConfig) -> None:
    """Offsets beyond the log, missing partitions and ordinary topics are refused with what is there."""
    name = topic()
    asyncio.run(write_letters(settings, name, 3))
    dlq = f"{name}.dlq"
    assert "it holds 0 to 2" in headrace("dlq", "show", dlq, "--partition", "0", "--offset", "3", code=1).stderr
    assert "no partition 9: it has 0 to 0" in headrace("dlq", "show", dlq, "--partition", "9", code=1).stderr
    assert "--offset needs --partition" in headrace("dlq", "show", dlq, "--offset", "0", code=2).stderr
    for command in ("list", "show", "redrive"):
        assert "is no dead letter" in headrace("dlq", command, name, code=1).stderr
    assert len(asyncio.run(read_all(settings, name))) == 3


def test_a_killed_redrive_loses_nothing_and_goes_on(env: Any, headrace: Any, topic: Any, settings: KafkaConfig) -> None:
    """Killed twice on its way, the third run ends it: each letter is back at least once, few twice."""
    name = topic(2)
    dlq = f"{name}.dlq"
    asyncio.run(write_letters(settings, name, 300))
    for target in (40, 120):
        with subprocess.Popen([*COMMAND, "dlq", "redrive", dlq, "--rate", "50"], env=env) as redriving:
            deadline = time.monotonic() + 150
            while asyncio.run(count(settings, name)) < 300 + target:
                assert time.monotonic() < deadline
            redriving.kill()
        assert asyncio.run(unredriven_below_commit(settings, name, dlq)) == []
    headrace("dlq", "redrive", dlq)
    times = Counter(record.value for record in asyncio.run(read_all(settings, name)))
    assert len(times) == 300
    assert min(times.values()) >= 2
    assert sum(times.values()) <= 600 + 2 * 50


async def count(settings: KafkaConfig, topic: str) -> int:
    return sum(end for _, end in (await Admin(settings).topic_offsets(topic)).values())


async def unredriven_below_commit(settings: KafkaConfig, topic: str, dlq: str) -> list[TopicPartition]:
    """Return the places of letters below the committed position whose record did not come back."""
    committed = await Admin(settings).committed(group_of(dlq))
    times = Counter(record.value for record in await read_all(settings, topic))
    return [
        letter.topic_partition
        for letter in await read_all(settings, dlq)
        if letter.offset < committed.get(letter.topic_partition, 0) and times[letter.value] < 2
    ]
