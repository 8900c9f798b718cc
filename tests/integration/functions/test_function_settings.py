"""Settings of a function's trigger on a broker: large records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.config.producer_config import ProducerConfig
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
