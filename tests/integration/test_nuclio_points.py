"""Points in which a function is better here than in Nuclio; docs/functions.md lists all of them with their tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.records import OutgoingRecord, TopicPartition
from headrace.testing import HeadraceProcess


@pytest.fixture
def function(site: Any, headrace: Any, tmp_path: Path) -> Callable[..., HeadraceProcess]:
    """Run a handler on a topic: `function(source, code, spec={}, trigger={}, **attributes)`."""

    def start(
        source: str, code: str, *, spec: Any = None, trigger: Any = None, wait: bool = True, **attributes: Any
    ) -> HeadraceProcess:
        (tmp_path / "work.py").write_text(code)
        known = {"topics": [source], "consumerGroup": f"{source}-work", **attributes}
        made = {"kind": "kafka-cluster", **(trigger or {}), "attributes": known}
        content = {"handler": "work:handler", "triggers": {"in": made}, **(spec or {})}
        (tmp_path / "function.yaml").write_text(yaml.safe_dump({"metadata": {"name": "work"}, "spec": content}))
        process: HeadraceProcess = headrace({**site.config, "functions": [str(tmp_path / "function.yaml")]}, wait=wait)
        return process

    return start


def test_point_2_a_success_commits_nothing_before_it(site: Any, topic: Any, function: Any, tmp_path: Path) -> None:
    """The commit waits for the failed event, also across kill -9; what had succeeded behind it is not called again."""
    source, target, mended = topic(), topic(), tmp_path / "mended"
    code = (
        "import os\n"
        "def handler(context, event):\n"
        f"    if event.offset == 3 and not os.path.exists({str(mended)!r}):\n"
        "        raise RuntimeError('not yet')\n"
        "    return event.id\n"
    )
    site.write(source, *(OutgoingRecord(source, b"k%d" % n, b"1") for n in range(50)))
    settings = {
        "ordering": "key",
        "retry": {"attempts": 1000, "first_delay_seconds": 0.2, "max_delay_seconds": 0.2},
        "outputTopic": target,
        "consumer": {"instance_id": "one"},
    }
    process = function(source, code, **settings)
    site.wait_committed(f"{source}-work", source, 3)
    site.wait_until(lambda: len(site.records(target)) == 49, "the outputs behind it")
    assert site.committed(f"{source}-work") == {TopicPartition(source, 0): 3}
    process.kill()
    mended.touch()
    process = function(source, code, **settings)
    site.wait_committed(f"{source}-work", source, 50)
    assert {record.value.decode() for record in site.records(target)} == {f"{source}-0-{n}" for n in range(50)}
    assert process.terminate() == 0


def test_point_9_an_empty_list_and_a_dead_worker_harm_no_other(site: Any, topic: Any, function: Any) -> None:
    """An empty list is no output; a worker that ends with exit code 0 is replaced, and the process stays ready."""
    source, target = topic(), topic()
    code = (
        "import os\n"
        "def handler(context, event):\n"
        "    if event.body == b'exit':\n"
        "        os._exit(0)\n"
        "    return [] if event.body == b'list' else event.body\n"
    )
    values = [b"list", b"a", b"exit", b"list", b"b"]
    site.write(source, *(OutgoingRecord(source, None, value, None, 0) for value in values))
    process = function(source, code, outputTopic=target, outputFormat="binary")
    site.wait_committed(f"{source}-work", source, 5)
    assert [record.value for record in site.records(target)] == [b"a", b"b"]
    assert [record.value for record in site.records(f"{source}.dlq")] == [b"exit"]
    process.wait_ready()
    assert process.terminate() == 0


def test_points_11_and_17_an_event_has_the_true_place_key_and_time_of_its_record(
    site: Any, topic: Any, function: Any
) -> None:
    """`id` is the same at the second call; `num_shards` is the topic's number of partitions; `worker_id` is a text."""
    source, target = topic(3), topic()
    code = (
        "calls = {}\n"
        "def handler(context, event):\n"
        "    calls.setdefault(event.offset, []).append(event.id)\n"
        "    if len(calls[event.offset]) == 1:\n"
        "        raise RuntimeError('the first call')\n"
        "    ids, key, worker = calls[event.offset], event.key.decode(), context.worker_id\n"
        "    return [(200, {'ids': ids, 'key': key, 'at': event.timestamp_ms, 'of': event.num_shards, 'w': worker})]\n"
    )
    site.write(source, *(OutgoingRecord(source, b"k%d" % n, b"v", None, 2) for n in range(2)))
    process = function(source, code, outputTopic=target, retry={"first_delay_seconds": 0.05})
    site.wait_committed(f"{source}-work", source, 2, 2)
    times = [record.timestamp_ms for record in site.records(source)]
    assert [json.loads(record.value) for record in site.records(target)] == [
        {"ids": [f"{source}-2-{n}"] * 2, "key": f"k{n}", "at": times[n], "of": 3, "w": "0"} for n in range(2)
    ]
    assert process.terminate() == 0


def test_point_20_a_start_that_hangs_is_ended_and_named(site: Any, topic: Any, function: Any, tmp_path: Path) -> None:
    """By its time limit, with the setting; nothing is consumed, and the function starts once it can."""
    source, free = topic(), tmp_path / "free"
    code = (
        "import os, time\n"
        "def init_context(context):\n"
        f"    while not os.path.exists({str(free)!r}):\n"
        "        time.sleep(0.05)\n"
        "def handler(context, event): pass\n"
    )
    site.write_json(source, 1)
    process = function(source, code, spec={"readinessTimeoutSeconds": 1}, wait=False)
    reason = "init_context took longer than 1 s (readinessTimeoutSeconds)"
    site.wait_until(lambda: reason in site.reasons(process.url).get("function work.in", ""), "the reason")
    assert site.committed(f"{source}-work").get(TopicPartition(source, 0), 0) == 0
    free.touch()
    process.wait_ready()
    site.wait_committed(f"{source}-work", source, 1)
    assert process.terminate() == 0
