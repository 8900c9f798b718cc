"""A function whose outputs and offsets are committed together, on a real broker."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord, TopicPartition
from headrace_devkit.testing import Cluster, HeadraceProcess, MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.exactly_once import HANDLER, SLOW, by_id, check, committed_records, fill, write_function


@pytest.fixture
def function(site: Scenario, headrace: StartHeadrace, tmp_path: Path) -> Callable[..., HeadraceProcess]:
    """Run a handler exactly once: `function(source, target, code, **attributes)`."""

    def start(source: str, target: str, code: str = HANDLER, more: Any = None, **attributes: Any) -> HeadraceProcess:
        file = write_function(tmp_path, source, target, code, **attributes)
        return headrace({**site.config, **(more or {}), "functions": [file]})

    return start


def test_kills_of_the_process_repeat_and_lose_nothing(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """SIGKILL at random moments under load; what was open is aborted by the next process with the name."""
    source, target = topic(3), topic(3)
    # A short session: the partitions of a process that was killed are assigned again after it.
    process = function(source, target, SLOW, sessionTimeout="3s", heartbeatInterval="500ms")
    moments = random.Random(1)
    for wave in range(3):
        fill(site, source, 1500)
        site.wait_until(lambda w=wave: committed_records(site, source) > w * 1500, "progress")
        threading.Event().wait(moments.uniform(0, 0.4))
        process.kill()
        process.start()
        process.wait_ready()
    site.wait_until(lambda: committed_records(site, source) == 4500, "every record committed")
    check(site, source, target)


def test_a_frozen_process_adds_nothing_after_a_peer_has_its_partitions(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """Its transaction carries the generation of a member that is gone; it joins again."""
    source, target = topic(3), topic(3)
    fill(site, source, 6000)
    frozen = function(source, target, SLOW, sessionTimeout="3s", heartbeatInterval="500ms")
    site.wait_until(lambda: committed_records(site, source) > 300, "progress")
    frozen.server.signal(signal.SIGSTOP)
    try:
        function(source, target, SLOW, sessionTimeout="3s", heartbeatInterval="500ms")
        site.wait_until(lambda: committed_records(site, source) == 6000, "every record committed by the peer")
    finally:
        frozen.server.signal(signal.SIGCONT)
    fill(site, source, 600)
    site.wait_until(lambda: committed_records(site, source) == 6600, "the later records committed")
    check(site, source, target)


def test_two_processes_with_one_name_fence_each_other_and_repeat_nothing(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """The one that is fenced opens its producer again when it has outputs, and the log names the setting."""
    source, target = topic(4), topic(2)
    more = {"producer": {"transactions": {"id": f"one-name-{source}"}}}
    processes = [function(source, target, SLOW, more) for _ in range(2)]
    fill(site, source, 3000, 4)
    site.wait_until(lambda: committed_records(site, source) == 3000, "every record committed")
    check(site, source, target)
    assert any("producer.transactions.id" in process.output for process in processes)


def test_one_event_without_a_key_is_the_only_dead_letter(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """Of a compacted topic; Kafka's client reports the whole batch. A deleted dead letter topic is made again."""
    source, target = topic(1), topic(1, cleanup_policy="compact")
    function(source, target, retry={"attempts": 1})
    for count in (12, 24):
        site.write(source, *(OutgoingRecord(source, None if n == 5 else b"k%d" % n, b"%d" % n) for n in range(12)))
        site.wait_until(lambda count=count: committed_records(site, source) == count, "every record committed")
        [dead_letter] = site.records(f"{source}.dlq")
        assert (dead_letter.value, dict(dead_letter.headers)["headrace.dlq.error"]) == (b"5", b"RecordRefused")
        site.delete_topic(f"{source}.dlq")
    check(site, source, target, lambda each: by_id(each) if each.key else [])


def test_an_event_that_emits_to_a_missing_topic_holds_its_own_partition_back(
    site: Scenario, kafka: Cluster, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """Until the topic is there; the outputs of all others are visible meanwhile."""
    source, target = topic(4), topic(1)
    missing = f"{target}-missing"
    fill(site, source, 120, 4)
    emit = f"context.emit({missing!r} if event.body == b'40' else {target!r}, None, event.id)"
    process = function(source, "", f"def handler(context, event):\n    {emit}\n")
    site.wait_until(lambda: committed_records(site, source) == 100, "all but the end of one partition committed")
    assert site.committed(f"{source}-work")[TopicPartition(source, 0)] == 10
    url = f"{process.url}/health/readiness"
    site.wait_until(lambda: f"outputs to {missing} are not" in str(site.ask(url).body), "readiness names the topic")
    kafka.create_topic(missing)
    site.wait_until(lambda: committed_records(site, source) == 120, "every record committed")
    check(site, source, target, lambda each: [] if each.value == b"40" else by_id(each))
    assert [each.value for each in site.records(missing)] == [f"{source}-0-10".encode()]
