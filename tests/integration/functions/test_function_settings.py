"""Settings of a function's trigger on a broker: large records, slow handlers, the assignor, the log."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.config.producer import ProducerConfig
from headrace.kafka import Producer
from headrace.records import OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic
from headrace_devkit.testing.scenario import Scenario

ECHO = "def handler(context, event):\n    return event.body[:9]\n"


def write_large(site: Any, topic: str, *sizes: int) -> None:
    """Write records of these sizes; each has its number as key."""

    async def produce() -> None:
        producer = Producer(site.kafka, ProducerConfig(properties={"message.max.bytes": 200_000_000}))
        await producer.start()
        records = [OutgoingRecord(topic, b"%d" % n, bytes([n]) * size, partition=0) for n, size in enumerate(sizes)]
        for record in records:
            (result,) = await producer.produce([record])
            assert not isinstance(result, Exception), result
        await producer.stop()

    asyncio.run(produce())


def test_a_record_above_the_limit_goes_to_the_policy_and_the_others_on(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """It is fetched whole, however small the fetch is, and is a dead letter with its bytes after no attempt."""
    source, target, most = topic(max_message_bytes=5_000_000), topic(), 2_000_000
    write_large(site, source, 10, most + 1, 900, 4_000_000, 20)
    process = function(source, ECHO, fetchMax=most, outputTopic=target, outputFormat="binary")
    site.wait_committed(f"{source}-work", source, 5)
    assert [record.key for record in site.records(target)] == [b"0", b"2", b"4"]
    dead = site.records(f"{source}.dlq")
    assert [(record.key, len(record.value or b"")) for record in dead] == [(b"1", most + 1), (b"3", 4_000_000)]
    history = dict(dead[0].headers)
    assert history["headrace.dlq.error"] == b"RecordTooLarge"
    assert history["headrace.dlq.reason"] == b"key and value have %d bytes, more than fetchMax (%d)" % (most + 2, most)
    assert process.terminate() == 0


def test_an_output_that_a_topic_refuses_is_a_dead_letter_and_the_others_are_written(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """A compacted topic takes no record without a key; the client says so of the whole batch."""
    source, target = topic(), topic(cleanup_policy="compact")
    site.write(source, *(OutgoingRecord(source, None if n == 40 else b"%d" % n, b"v", None, 0) for n in range(100)))
    function(source, ECHO, outputTopic=target, outputFormat="binary", retry={"attempts": 2})
    site.wait_committed(f"{source}-work", source, 100)
    assert {record.key for record in site.records(target)} == {b"%d" % n for n in range(100) if n != 40}
    dead = site.records(f"{source}.dlq")
    assert [(record.key, dict(record.headers)["headrace.dlq.error"]) for record in dead] == [(None, b"RecordRefused")]


@pytest.mark.long
@pytest.mark.parametrize("size", [101_000_000, 104_700_000])
def test_the_largest_batch_that_a_broker_takes_is_received(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess], size: int
) -> None:
    """The client would disconnect from a response above its own default limit of 100 MB, again and again."""
    source, target = topic(max_message_bytes=104_857_600, segment_bytes=209_715_200), topic()
    write_large(site, source, 10, size, 20)
    function(source, ECHO, fetchMax=1000, retry={"errors": {"RecordTooLarge": "skip"}}, outputTopic=target)
    site.wait_committed(f"{source}-work", source, 3)
    assert [record.key for record in site.records(target)] == [b"0", b"2"]


def test_a_slow_handler_pauses_its_partition_and_keeps_the_membership(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess], tmp_path: Path
) -> None:
    """Also when it takes longer than session and rebalance; each record is handled once."""
    source, go = topic(2), tmp_path / "go"
    code = (
        "import os, time\n"
        "def handler(context, event):\n"
        "    print('handles', event.shard_id, event.offset)\n"
        f"    while event.shard_id == 0 and not os.path.exists({str(go)!r}):\n"
        "        time.sleep(0.01)\n"
    )
    times = {"sessionTimeout": "6s", "rebalanceTimeout": "7s", "maxProcessingTime": "1s", "heartbeatInterval": "1s"}
    process = function(source, code, trigger={"numWorkers": 2}, **times)
    site.write(source, *(OutgoingRecord(source, None, b"%d" % n, None, 0) for n in range(3)))
    began = time.monotonic()

    site.wait_until(lambda: time.monotonic() - began > 9, "more than the session and the time for a rebalance")
    site.write(source, *(OutgoingRecord(source, None, b"%d" % n, None, n % 2) for n in range(4)))
    site.wait_committed(f"{source}-work", source, 2, 1)
    go.write_text("")
    site.wait_committed(f"{source}-work", source, 5, 0)
    handled = sorted(
        line.split("handles ")[1].split('"')[0] for line in process.output.splitlines() if "handles" in line
    )
    assert handled == ["0 0", "0 1", "0 2", "0 3", "0 4", "1 0", "1 1"]
    assert not re.search(f"(revoked|lost) {source}", process.output)
    assert process.terminate() == 0
