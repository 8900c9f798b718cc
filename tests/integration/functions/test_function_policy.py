"""Events whose handler fails, and which worker has which event, on a real broker."""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.records import OutgoingRecord, TopicPartition
from headrace_devkit.testing import HeadraceProcess, MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from tests.function_calls import function_file


def ended(site: Any, process: HeadraceProcess, trigger: str) -> dict[str, float]:
    """Return the records of a trigger that have ended, by outcome."""
    found = {}
    for line in site.ask(f"{process.url}/metrics").body.splitlines():
        if line.startswith("headrace_completed_records_total{") and f'consumer="work.{trigger}"' in line:
            found[line.split('outcome="')[1].split('"')[0]] = float(line.rsplit(" ", 1)[1])
    return {outcome: count for outcome, count in found.items() if count}


def test_a_failure_never_commits_silently(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, tmp_path: Path
) -> None:
    """Each policy: retried and then a dead letter, a dead letter at once, handled as in Nuclio, and stopped."""
    code = (
        "calls = {}\n"
        "def handler(context, event):\n"
        "    calls[event.id] = calls.get(event.id, 0) + 1\n"
        "    if event.body == b'bad' or (event.body == b'once' and calls[event.id] == 1):\n"
        "        raise RuntimeError('attempt %d' % calls[event.id])\n"
        "    return event.body\n"
    )
    names = ("retry", "deadLetter", "handled", "stop")
    topics = {name: topic() for name in names}
    target = topic()
    for name in names:
        values = [b"a", b"once", b"bad", b"b"]
        site.write(topics[name], *(OutgoingRecord(topics[name], name.encode(), value) for value in values))
    retry = {"attempts": 2, "first_delay_seconds": 0.05}
    own = {"retry": retry, "outputTopic": target, "outputFormat": "binary"}
    attributes = {name: {"topics": [at], "consumerGroup": at, "onFailure": name, **own} for name, at in topics.items()}
    triggers = {name: {"kind": "kafka-cluster", "attributes": attributes[name]} for name in names}
    process = headrace({**site.config, "functions": [function_file(tmp_path, code, triggers)]}, wait=False)
    for name in ("retry", "deadLetter", "handled"):
        site.wait_committed(topics[name], topics[name], 4)
    site.wait_until(lambda: "stop" in str(site.reasons(process.url)), "the reason of the stop")
    assert "offset 2 failed 2 times (RuntimeError)" in str(site.reasons(process.url))
    assert site.committed(topics["stop"]) == {TopicPartition(topics["stop"], 0): 2}
    assert ended(site, process, "retry") == {"delivered": 3, "dead_letter": 1}
    assert ended(site, process, "deadLetter") == {"delivered": 2, "dead_letter": 2}
    assert ended(site, process, "handled") == {"delivered": 2, "skipped": 2}
    outputs = defaultdict(list)
    for record in site.records(target):
        outputs[record.key.decode()].append(record.value or b"")
    assert sorted(outputs["retry"]) == [b"a", b"b", b"once"]
    assert sorted(outputs["deadLetter"]) == sorted(outputs["handled"]) == [b"a", b"b"]
    attempts = {
        name: [dict(each.headers)["headrace.dlq.attempts"] for each in site.records(f"{topics[name]}.dlq")]
        for name in ("retry", "deadLetter")
    }
    assert attempts == {"retry": [b"2"], "deadLetter": [b"1", b"1"]}
    assert "attempt 1" in process.output, "the log has the stack of what is taken for handled"
    assert process.terminate() == 0


def test_retry_topics_let_later_events_pass(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """A failed event waits there, is called again when it is due, and its output has the event's key."""
    source, target = topic(), topic()
    code = (
        "calls = {}\n"
        "def handler(context, event):\n"
        "    calls[event.id] = calls.get(event.id, 0) + 1\n"
        "    if event.body == b'late' and calls[event.id] < 3 or event.body == b'bad':\n"
        "        raise RuntimeError(event.id)\n"
        "    return event.body\n"
    )
    values = [b"late", b"bad", *[b"%d" % number for number in range(5)]]
    site.write(source, *(OutgoingRecord(source, b"key", value) for value in values))
    retry = {"attempts": 1, "topics": [1, 2]}
    process = function(source, code, retry=retry, outputTopic=target, outputFormat="binary")
    site.wait_until(lambda: len(site.records(target)) == 6, "the outputs")
    assert [record.value for record in site.records(target)] == [*values[2:], b"late"]
    site.wait_until(lambda: len(site.records(f"{source}.dlq")) == 1, "the dead letter")
    (dead_letter,) = site.records(f"{source}.dlq")
    history = dict(dead_letter.headers)
    assert (dead_letter.value, history["headrace.dlq.attempts"], history["headrace.dlq.offset"]) == (b"bad", b"3", b"1")
    assert site.committed(f"{source}-work") == {TopicPartition(source, 0): 7}
    assert process.terminate() == 0


WHO = (
    "import json, os\n"
    "def handler(context, event):\n"
    "    seen = {'worker': context.worker_id, 'pid': os.getpid(), 'trigger': event.trigger.name}\n"
    "    return {**seen, 'partition': event.shard_id, 'n': event.body}\n"
)


def outputs_of(site: Any, target: str) -> list[Any]:
    return [(record.key, json.loads(record.value)) for record in site.records(target)]


def test_events_of_a_key_go_to_one_worker_in_their_order(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """In whatever partition they are; both workers have some."""
    source, target = topic(2), topic()
    records = [OutgoingRecord(source, b"k%d" % (n % 20), b"%d" % n, partition=n % 20 % 2) for n in range(400)]
    site.write(source, *records)
    own = {"workerAllocationMode": "key", "valueFormat": "json", "outputTopic": target}
    process = function(source, WHO, trigger={"numWorkers": 2}, **own)
    site.wait_until(lambda: len(site.records(target)) == 400, "the outputs")
    found = outputs_of(site, target)
    assert len({body["worker"] for _, body in found}) == 2
    for key in {key for key, _ in found}:
        bodies = [body for other, body in found if other == key]
        assert [body["n"] for body in bodies] == sorted(body["n"] for body in bodies)
        assert len({body["pid"] for body in bodies}) == 1
    assert process.terminate() == 0


def test_a_partition_keeps_its_worker_across_rebalances(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess], headrace: StartHeadrace, tmp_path: Path
) -> None:
    """While it is assigned; partitions spread evenly over the workers, also topics of one partition."""
    wide, narrow, target = topic(8), [topic() for _ in range(4)], topic()
    topics = [wide, *narrow]

    def write() -> None:
        site.write(wide, *(OutgoingRecord(wide, wide.encode(), b"1", partition=number) for number in range(8)))
        for name in narrow:
            site.write(name, OutgoingRecord(name, name.encode(), b"1"))

    def workers_of(pid: int, first: int) -> dict[tuple[bytes, int], str]:
        """Return the worker of each partition, of a process's outputs from an index on."""
        found = outputs_of(site, target)[first:]
        return {(key, body["partition"]): body["worker"] for key, body in found if parent_of(body["pid"]) == pid}

    own = {"topics": topics, "workerAllocationMode": "static", "valueFormat": "json", "outputTopic": target}
    write()
    one = function(wide, WHO, trigger={"numWorkers": 2}, **own)
    site.wait_until(lambda: len(site.records(target)) == 12, "the outputs")
    before = workers_of(one.server.id.pid, 0)
    loads = [worker for (key, _), worker in before.items() if key == wide.encode()]
    assert sorted(loads) == ["0"] * 4 + ["1"] * 4
    assert len({worker for (key, _), worker in before.items() if key != wide.encode()}) == 2

    two = headrace({**site.config, "functions": [str(tmp_path / "function.yaml")]})
    seen = 12

    def shared() -> bool:
        nonlocal seen
        seen = len(site.records(target))
        write()
        site.wait_until(lambda: len(site.records(target)) >= seen + 12, "the outputs")
        return bool(workers_of(two.server.id.pid, seen))

    site.wait_until(shared, "outputs of the second process")
    kept = workers_of(one.server.id.pid, seen)
    assert kept and kept.items() <= before.items()
    assert two.terminate() == one.terminate() == 0


def test_events_wait_for_a_full_batch_until_its_timeout(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """Each partition for itself; a stop does not wait, and the next process has the events that did."""
    source, target = topic(2), topic()

    def write(partition: int, count: int) -> None:
        site.write(source, *(OutgoingRecord(source, None, b"v", partition=partition) for _ in range(count)))

    def start(timeout: str) -> HeadraceProcess:
        batch = {"mode": "enable", "batchSize": 3, "timeout": timeout}
        code = "def handler(context, events):\n    return str(len(events))\n"
        return function(source, code, trigger={"batch": batch}, outputTopic=target)

    def wait_for_outputs(*expected: bytes) -> None:
        site.wait_until(lambda: len(site.records(target)) >= len(expected), f"outputs {expected}")
        assert [record.value for record in site.records(target)] == [*expected]

    write(0, 2)
    process = start("4m")
    write(1, 3)
    wait_for_outputs(b"3")
    write(0, 2)
    wait_for_outputs(b"3", b"3")
    assert process.terminate() == 0
    assert site.committed(f"{source}-work") == {TopicPartition(source, 0): 3, TopicPartition(source, 1): 3}
    process = start("500ms")
    wait_for_outputs(b"3", b"3", b"1")
    assert process.terminate() == 0


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0


def test_a_hung_event_stops_no_other(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess]
) -> None:
    """Its worker is replaced three times, it becomes a dead letter `timeout`, and thousands behind it are called."""
    source, target = topic(2), topic()
    code = (
        "import time\n"
        "def handler(context, event):\n"
        "    if event.body == b'hang':\n"
        "        time.sleep(600)\n"
        "    return event.body\n"
    )
    values = [b"hang", *[b"%d" % number for number in range(2500)]]
    site.write(source, *(OutgoingRecord(source, None, value, partition=0) for value in values))
    site.write(source, *(OutgoingRecord(source, None, b"x%d" % number, partition=1) for number in range(2500)))
    process = function(source, code, spec={"eventTimeout": "1s"}, outputTopic=target, outputFormat="binary")
    for partition, count in enumerate((2501, 2500)):
        site.wait_committed(f"{source}-work", source, count, partition)
    assert sorted(record.value or b"" for record in site.records(target)) == sorted(
        [*values[1:], *(b"x%d" % number for number in range(2500))]
    )
    (dead_letter,) = site.records(f"{source}.dlq")
    assert dict(dead_letter.headers)["headrace.dlq.error"] == b"timeout"
    assert process.terminate() == 0


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_that_are_killed_lose_nothing(
    site: Scenario, topic: MakeTopic, function: Callable[..., HeadraceProcess], signal_number: int
) -> None:
    """Every event has its output, in order per partition after its repetitions, and no event is a dead letter."""
    source, target = topic(4), topic()
    code = (
        "import os, time\n"
        "def handler(context, event):\n"
        "    time.sleep(0.0005)\n"
        "    return {'n': event.body, 'pid': os.getpid()}\n"
    )
    for partition in range(4):
        records = [OutgoingRecord(source, b"%d" % partition, b"%d" % n, partition=partition) for n in range(1500)]
        site.write(source, *records)
    process = function(source, code, trigger={"numWorkers": 2}, valueFormat="json", outputTopic=target)
    killed: set[int] = set()

    def kill_one() -> bool:
        pids = {body["pid"] for _, body in outputs_of(site, target)} - killed
        for pid in pids:
            if parent_of(pid) == process.server.id.pid:
                os.kill(pid, signal_number)
                killed.add(pid)
        return len(killed) >= 6 or sum(site.committed(f"{source}-work").values()) == 6000

    site.wait_until(kill_one, "six workers to kill")
    site.wait_until(lambda: sum(site.committed(f"{source}-work").values()) == 6000, "the end")
    for partition in range(4):
        found = [body["n"] for key, body in outputs_of(site, target) if key == b"%d" % partition]
        assert set(found) == set(range(1500))
        assert len(found) == 1500 or signal_number == signal.SIGKILL, "SIGTERM repeats nothing"
    assert len(killed) >= 2
    assert ended(site, process, "in") == {"delivered": 6000}
    assert process.terminate() == 0
