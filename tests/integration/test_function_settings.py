"""Settings of a function's trigger on a broker: large records, slow handlers, the assignor, the log."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.producer import ProducerConfig
from headrace.kafka import Producer
from headrace.records import OutgoingRecord
from headrace.testing import HeadraceProcess

ECHO = "def handler(context, event):\n    return event.body[:9]\n"


@pytest.fixture
def function(site: Any, headrace: Any, tmp_path: Path) -> Callable[..., HeadraceProcess]:
    """Run a handler on a topic: `function(source, code, spec={}, **attributes)`."""

    def start(source: str, code: str, *, spec: Any = None, workers: int = 1, **attributes: Any) -> HeadraceProcess:
        (tmp_path / "work.py").write_text(code)
        known = {"topics": [source], "consumerGroup": f"{source}-work", **attributes}
        trigger = {"kind": "kafka-cluster", "numWorkers": workers, "attributes": known}
        made = {"handler": "work:handler", "triggers": {"in": trigger}, **(spec or {})}
        (tmp_path / "function.yaml").write_text(yaml.safe_dump({"metadata": {"name": "work"}, "spec": made}))
        process: HeadraceProcess = headrace({**site.config, "functions": [str(tmp_path / "function.yaml")]})
        return process

    return start


def write_large(site: Any, topic: str, *sizes: int) -> None:
    """Write records of these sizes; each has its number as key."""

    async def produce() -> None:
        producer = Producer(site.kafka, ProducerConfig(max_record_bytes=200_000_000))
        await producer.start()
        records = [OutgoingRecord(topic, b"%d" % n, bytes([n]) * size, partition=0) for n, size in enumerate(sizes)]
        for record in records:
            (result,) = await producer.produce([record])
            assert not isinstance(result, Exception), result
        await producer.stop()

    asyncio.run(produce())


@pytest.mark.parametrize("most", [1000, 2_000_000])
def test_a_record_above_the_limit_goes_to_the_policy_and_the_others_on(
    site: Any, topic: Any, function: Any, most: int
) -> None:
    """It is fetched whole, however small the fetch is, and is a dead letter with its bytes after no attempt."""
    source, target = topic(max_message_bytes=5_000_000), topic()
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


def test_a_record_above_the_limit_is_skipped_if_the_policy_skips_it(site: Any, topic: Any, function: Any) -> None:
    """`retry.errors` decides, as for any failure; there is no dead letter then."""
    source, target = topic(), topic()
    write_large(site, source, 101, 10)
    policy = {"errors": {"RecordTooLarge": "skip"}}
    function(source, ECHO, fetchMax=100, retry=policy, outputTopic=target, outputFormat="binary")
    site.wait_committed(f"{source}-work", source, 2)
    assert [record.key for record in site.records(target)] == [b"1"]
    assert site.records(f"{source}.dlq") == []


@pytest.mark.parametrize("size", [101_000_000, pytest.param(104_700_000, marks=pytest.mark.long)])
def test_the_largest_batch_that_a_broker_takes_is_received(site: Any, topic: Any, function: Any, size: int) -> None:
    """The client would disconnect from an answer above its own default limit of 100 MB, again and again."""
    source, target = topic(max_message_bytes=104_857_600, segment_bytes=209_715_200), topic()
    write_large(site, source, 10, size, 20)
    function(source, ECHO, fetchMax=1000, retry={"errors": {"RecordTooLarge": "skip"}}, outputTopic=target)
    site.wait_committed(f"{source}-work", source, 3)
    assert [record.key for record in site.records(target)] == [b"0", b"2"]


def test_a_slow_handler_pauses_its_partition_and_keeps_the_membership(
    site: Any, topic: Any, function: Any, tmp_path: Path
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
    process = function(source, code, workers=2, **times)
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


def test_odd_events_reach_the_handler_and_odd_answers_cost_their_own_record_only(
    site: Any, topic: Any, function: Any
) -> None:
    """No body, no key, bytes that are no text, a thousand headers; then values that no format can hold."""
    source, target = topic(), topic()
    code = (
        "import os\n"
        "class Silent:\n"
        "    def __repr__(self): raise ValueError('no words')\n"
        "endless = []\n"
        "endless.append(endless)\n"
        "odd = {b'endless': endless, b'silent': Silent(), b'half': '\\ud800'}\n"
        "def handler(context, event):\n"
        "    if event.key in odd: return odd[event.key]\n"
        "    found = event.headers\n"
        "    return (os.getpid(), event.body is None, event.key is None, len(found), found.get('b') == b'\\xff')\n"
    )
    many = [(f"h{n}", b"%d" % n) for n in range(999)]
    odd = [OutgoingRecord(source, key, b"1", None, 0) for key in (b"endless", b"silent", b"half")]
    usual = [
        OutgoingRecord(source, None, None, None, 0),
        OutgoingRecord(source, b"\xff", b"", [("b", b"\xff"), ("c", None)], 0),
        OutgoingRecord(source, b"many", b"\xff\xfe", [*many, ("b", b"\xff")], 0),
    ]
    site.write(source, usual[0], odd[0], usual[1], odd[1], odd[2], usual[2])
    process = function(source, code, outputTopic=target, attempts=1)
    site.wait_committed(f"{source}-work", source, 6)
    seen = [json.loads(record.value or b"") for record in site.records(target)]
    assert [each[1:] for each in seen] == [[True, True, 0, False], [False, False, 2, True], [False, False, 1000, True]]
    assert len({each[0] for each in seen}) == 1, "the worker is the same"
    dead = {record.key: dict(record.headers)["headrace.dlq.error"] for record in site.records(f"{source}.dlq")}
    assert dead == {b"endless": b"RecursionError", b"silent": b"ValueError", b"half": b"UnicodeEncodeError"}
    assert process.terminate() == 0
