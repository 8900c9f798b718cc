"""Events whose handler fails, and which worker has which event, on a real broker."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
