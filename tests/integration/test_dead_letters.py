"""Dead letters on a real broker: redriven, moved and dropped, all or selected ones."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from headrace.config.kafka import KafkaConfig
from headrace.config.producer import ProducerConfig
from headrace.delivery.dead_letter import DeadLetterTopic
from headrace.delivery.protocols import DeadLetter, Reply
from headrace.kafka import Admin, Producer, read_records
from headrace.records import OutgoingRecord, Record
from headrace.testing.scene import Scene
from headrace.testing.secured import command_environment, kafka_section, kafka_settings

COMMAND = [sys.executable, "-m", "headrace.cli.main"]


@pytest.fixture
def settings(kafka: Any) -> KafkaConfig:
    return kafka_settings(kafka.bootstrap_servers, request_timeout_seconds=60)


@pytest.fixture
def env(kafka: Any, tmp_path: Path) -> Mapping[str, str]:
    return command_environment(kafka.bootstrap_servers, tmp_path)


@pytest.fixture
def headrace(site: Scene) -> Callable[..., subprocess.CompletedProcess[str]]:
    return site.cli


async def read_all(settings: KafkaConfig, topic: str) -> list[Record]:
    offsets = await Admin(settings).topic_offsets(topic)
    starts, ends = {p: o[0] for p, o in offsets.items()}, {p: o[1] for p, o in offsets.items()}
    return [record async for batch in read_records(settings, starts, ends) for record in batch]


async def write_letters(settings: KafkaConfig, topic: str, count: int, errors: Sequence[str] = ("HTTP 400",)) -> None:
    """Write `count` records to the topic, and each as a dead letter, as a reactive consumer would."""
    producer = Producer(settings, ProducerConfig())
    await producer.start()
    own = [("trace", b"\x00\xff"), ("trace", None)]
    await producer.produce(
        [OutgoingRecord(topic, f"k{n}".encode(), f"v{n}\xff".encode("latin-1"), own) for n in range(count)]
    )
    letters = [
        DeadLetter(record, "billing", 5, Reply(errors[n % len(errors)], "no", permanent=True), 1.0, 2.0)
        for n, record in enumerate(sorted(await read_all(settings, topic), key=lambda r: r.value or b""))
    ]
    await DeadLetterTopic("{topic}.dlq", producer.produce, Admin(settings).ensure_topic_like).write(letters)
    await producer.stop()


def values(settings: KafkaConfig, topic: str) -> list[bytes]:
    return sorted(record.value or b"" for record in asyncio.run(read_all(settings, topic)))


def left(headrace: Any, dlq: str) -> int:
    return int(json.loads(headrace("dlq", "list", dlq, "--output", "json").stdout)[0]["left"])


def test_letters_are_counted_and_redriven_byte_for_byte(headrace: Any, topic: Any, settings: KafkaConfig) -> None:
    """The whole way: numbers, a dry run, the redrive, and nothing left; records come back as they were."""
    name = topic(3)
    dlq = f"{name}.dlq"
    asyncio.run(write_letters(settings, name, 40))
    assert left(headrace, dlq) == 40
    said = headrace("dlq", "redrive", dlq, "--dry-run").stdout
    assert said.startswith(f"40 dead letters of {dlq} would go back: 40 to {name}\n")
    assert "  error  HTTP 400" in said
    assert len(asyncio.run(read_all(settings, name))) == 40
    said = headrace("dlq", "redrive", dlq).stdout
    assert said == f"40 dead letters of {dlq} back and acknowledged: 40 to {name}\n"

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
    assert left(headrace, dlq) == 0


def test_a_filtered_redrive_leaves_exactly_the_rest(
    headrace: Any, topic: Any, kafka: Any, settings: KafkaConfig
) -> None:
    """By error first and exactly once, then all: each once; what matches nothing is an error; made anew, all is new."""
    name = topic(2)
    dlq = f"{name}.dlq"
    asyncio.run(write_letters(settings, name, 40, errors=("HTTP 400", "KeyError", "KeyError", "KeyError")))
    words = ["dlq", "redrive", dlq, "--error", "HTTP 400", "--origin", name, "--since", "1h"]
    assert "10 dead letters" in headrace(*words, "--exactly-once").stdout
    assert f"nothing matches: {dlq} has 30 dead letters left" in headrace(*words, "--dry-run", code=1).stderr
    done = json.loads(headrace("dlq", "redrive", dlq, "--output", "json").stdout)
    assert (done["records"], done["targets"], done["errors"]) == (30, {name: 30}, {"KeyError": 30})
    assert values(settings, name) == sorted([*values(settings, dlq)] * 2)

    asyncio.run(anew(kafka, settings, dlq))
    asyncio.run(write_letters(settings, name, 1))  # each of the records there is a letter now
    assert left(headrace, dlq) == 81
    assert json.loads(headrace("dlq", "redrive", dlq, "--output", "json").stdout)["records"] == 81


async def anew(kafka: Any, settings: KafkaConfig, topic: str) -> None:
    """Delete a topic; whoever writes letters makes it."""
    client = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for future in client.delete_topics([topic]).values():
        await asyncio.to_thread(future.result, 60)
    while await Admin(settings).has_topic(topic):
        continue


def test_letters_go_elsewhere(headrace: Any, topic: Any, kafka: Any, settings: KafkaConfig, tmp_path: Path) -> None:
    """To a tier of a consumer, into quarantine and out of it again, or nowhere."""
    name = topic(2)
    dlq, tier = f"{name}.dlq", "billing.retry.60s"
    asyncio.run(write_letters(settings, name, 7))
    asyncio.run(Admin(settings).create_topic(tier))
    file = tmp_path / "headrace.yaml"
    reactive = {
        "topics": [name],
        "group": "billing",
        "backend": {"url": "http://127.0.0.1:1"},
        "retry": {"tiers": [60]},
    }
    file.write_text(
        json.dumps({"kafka": kafka_section(kafka.bootstrap_servers), "reactive_consumers": {"bills": reactive}})
    )
    to_tier = ["--to-tier", "60", "--consumer", "bills", "-c", str(file)]
    assert f"1 to {tier}" in headrace("dlq", "redrive", dlq, "--key", "k1", *to_tier).stdout
    (waiting,) = [
        r for r in asyncio.run(read_all(settings, tier)) if dict(r.headers)["headrace.retry.topic"] == name.encode()
    ]
    assert waiting.value == b"v1\xff"
    moved = headrace("dlq", "quarantine", dlq, "--key", "k2", "--key", "k3", "--reason", "later").stdout
    assert "2 dead letters" in moved
    assert "4 dead letters" in headrace("dlq", "drop", dlq, "--reason", "test data").stdout
    assert left(headrace, dlq) == 0
    assert len(values(settings, name)) == 7
    assert f"2 to {name}" in headrace("dlq", "redrive", f"{dlq}.quarantine", "--exactly-once").stdout
    assert sorted(values(settings, name)) == sorted([*values(settings, dlq), b"v2\xff", b"v3\xff"])


def test_a_forged_origin_is_left(headrace: Any, topic: Any, kafka: Any, settings: KafkaConfig, tmp_path: Path) -> None:
    """A dead letter that names a topic which its consumer does not read, with and without a configuration."""
    name, other = topic(), topic()
    dlq = f"{name}.dlq"
    asyncio.run(write_letters(settings, name, 2))

    async def forge() -> None:
        producer = Producer(settings, ProducerConfig())
        await producer.start()
        letters = await read_all(settings, dlq)
        headers = [(n, other.encode() if n == "headrace.dlq.topic" else v) for n, v in letters[0].headers]
        await producer.produce([OutgoingRecord(dlq, b"forged", b"!", headers)])
        await producer.stop()

    asyncio.run(forge())
    dry = headrace("dlq", "redrive", dlq, "--dry-run", code=1)
    assert f"2 dead letters of {dlq} would go back: 2 to {name}" in dry.stdout
    assert f"not sent: 1 dead letter: they name {other} as their origin" in dry.stderr
    consumer = {"topics": [name], "group": "billing", "backend": {"url": "http://127.0.0.1:1"}}
    (tmp_path / "headrace.yaml").write_text(
        json.dumps({"kafka": kafka_section(kafka.bootstrap_servers), "reactive_consumers": {"bills": consumer}})
    )
    done = headrace("dlq", "redrive", dlq, code=1)
    assert f"they name {other} as their origin, which their group billing does not read" in done.stderr
    assert (left(headrace, dlq), values(settings, other)) == (1, [])
    headrace("dlq", "drop", dlq, "--reason", "forged")
    assert left(headrace, dlq) == 0


def test_what_is_no_window_or_no_dead_letter_topic_is_refused(headrace: Any, topic: Any, settings: KafkaConfig) -> None:
    """Each says what is wrong, and nothing is sent."""
    name = topic()
    asyncio.run(write_letters(settings, name, 3))
    dlq = f"{name}.dlq"
    redrive = ("dlq", "redrive", dlq)
    first = ("--partition", "0", "--offsets")
    assert "it holds 0 to 2" in headrace(*redrive, *first, "3", code=1).stderr
    assert "neither a time" in headrace(*redrive, "--since", "soon", code=2).stderr
    assert "is no dead letter" in headrace("dlq", "drop", name, "--reason", "x", code=1).stderr
    assert "does not exist" in headrace("dlq", "redrive", f"{name}.gone", code=1).stderr
    assert len(asyncio.run(read_all(settings, name))) == 3
    assert left(headrace, dlq) == 3


def test_a_letter_too_large_for_its_target_stays(headrace: Any, topic: Any, settings: KafkaConfig) -> None:
    """The others go, it is named and is left, in either mode, and the exit code says so."""
    name = topic(1, **{"max.message.bytes": "3000"})
    dlq = f"{name}.dlq"
    asyncio.run(write_letters(settings, name, 20))
    asyncio.run(write_one_large(settings, name, dlq))
    for mode in ([], ["--exactly-once"]):
        done = headrace("dlq", "redrive", dlq, *mode, code=1)
        assert f"not sent: {dlq}-0 offset 20" in done.stderr
        assert len(values(settings, name)) == 40
        assert left(headrace, dlq) == 1


async def write_one_large(settings: KafkaConfig, topic: str, dlq: str) -> None:
    producer = Producer(settings, ProducerConfig())
    await producer.start()
    letter = (await read_all(settings, dlq))[0]
    await producer.produce([OutgoingRecord(dlq, b"large", bytes(10_000), letter.headers, 0)])
    await producer.stop()


def test_one_run_at_a_time(env: Any, headrace: Any, topic: Any, settings: KafkaConfig) -> None:
    """While one is in the middle of its work others are refused and told who it is, and do nothing."""
    name = topic()
    dlq = f"{name}.dlq"
    asyncio.run(write_letters(settings, name, 5))
    slow = {**env, "HEADRACE_FAILPOINTS": "redrive.sent=delay:90"}
    with subprocess.Popen(
        [*COMMAND, "dlq", "redrive", dlq], cwd=env["PWD"], env=slow, stderr=subprocess.PIPE, text=True
    ) as first:
        assert first.stderr
        assert "failpoint redrive.sent" in first.stderr.readline()
        for words in (["drop", dlq, "--reason", "x"], ["redrive", dlq, "--wait", "0.5"]):
            assert f"(pid {first.pid} on " in headrace("dlq", *words, code=1).stderr
        first.kill()
    assert values(settings, name) == sorted(values(settings, dlq) * 2)


def test_interrupted_by_ctrl_c_nothing_is_half_done(env: Any, headrace: Any, topic: Any, settings: KafkaConfig) -> None:
    """The slice under way is marked before the command ends, so the next run sends the rest and nothing twice."""
    name = topic()
    dlq = f"{name}.dlq"
    asyncio.run(write_letters(settings, name, 100))
    slow = {**env, "HEADRACE_FAILPOINTS": "redrive.submitted=delay:2@2"}
    words = [*COMMAND, "dlq", "redrive", dlq, "--rate", "20"]
    with subprocess.Popen(words, cwd=env["PWD"], env=slow, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr
        assert "failpoint redrive.submitted" in first.stderr.readline()
        first.send_signal(signal.SIGINT)
        assert first.wait(100) == 130
    went = 100 - left(headrace, dlq)
    assert len(values(settings, name)) == 100 + went
    headrace("dlq", "redrive", dlq)
    assert values(settings, name) == sorted(values(settings, dlq) * 2)
