"""A process of three with `placement` is killed: the others take over its consumers and its function."""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from function_calls import function_file
from headrace.records import OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

pytestmark = pytest.mark.timeout(500)

TAKEN_OVER_SECONDS = 130
"""With one copy nobody reads for a minute, and for sessions and looks at leases; the rest is for a busy machine."""


def running(process: HeadraceProcess) -> set[str]:
    with urllib.request.urlopen(f"{process.url}/adm/reactive-consumers", timeout=10) as response:
        return {one["name"] for one in json.loads(response.read())["consumers"]}


def copies_in(processes: Mapping[str, HeadraceProcess]) -> Counter[str]:
    """Return how many processes run each consumer."""
    return Counter(name for process in processes.values() for name in running(process))


def started(headrace: StartHeadrace, config: dict[str, Any], folder: Path, copies: int) -> dict[str, HeadraceProcess]:
    """Start three processes in two zones, and wait until they are ready."""
    processes = {}
    for number, zone in enumerate("aba"):
        name = f"p{number}"
        own: dict[str, Any] = {"placement": {"process": name, "zone": zone, "copies": copies}}
        own["state_dir"] = str(folder / name)
        processes[name] = headrace({**config, **own}, wait=False)
    for process in processes.values():
        process.wait_ready()
    return processes


@pytest.mark.parametrize("copies", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_killed_process_loses_no_record_and_others_take_over(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend, tmp_path: Path, copies: int
) -> None:
    """With two copies the other one has the partitions after a session; with one, others run it after a minute."""
    sources = {f"c{number}": topic() for number in range(5)}
    source, target = topic(), topic()
    group = {"topics": [source], "consumerGroup": source, "outputTopic": target}
    (tmp_path / "work").mkdir()
    triggers = {"in": {"kind": "kafka-cluster", "numWorkers": 1, "attributes": group}}
    file = function_file(tmp_path / "work", "def handler(context, event):\n    return event.body\n", triggers)
    common = {
        **site.config,
        "control": {"topic": f"_headrace-control-{uuid.uuid4().hex[:8]}"},
        "functions": [file],
        "reactive_consumers": {
            name: {"topics": [each], "group": each, "backend": {"url": backend.url}} for name, each in sources.items()
        },
    }
    written = 0

    def write(count: int) -> None:
        nonlocal written
        for each in (*sources.values(), source):
            records = [OutgoingRecord(each, b"k%d" % n, b"%d" % n) for n in range(written, written + count)]
            site.write(each, *records)
        written += count

    def is_done() -> bool:
        values: dict[str, set[Any]] = {each: set() for each in sources.values()}
        for one in backend.accepted:
            values[one["topic"]].add(int(one["value"]))
        outputs = {int(record.value or b"-1") for record in site.records(target)}
        return all({*range(written)} == found for found in (*values.values(), outputs))

    processes = started(headrace, common, tmp_path, copies)
    names = [*sources, "work.in"]
    site.wait_until(lambda: copies_in(processes) == Counter(names * copies), "the copies of each")
    write(20)
    site.wait_until(is_done, "all records")
    victim = max(processes, key=lambda name: ("work.in" in running(processes[name]), len(running(processes[name]))))
    lost = running(processes[victim])
    assert lost
    write(20)
    processes.pop(victim).kill()
    write(20)
    site.wait_until(is_done, f"all records, without {victim}, which had {sorted(lost)}", TAKEN_OVER_SECONDS)
    if copies == 1:
        assert copies_in(processes) == Counter(names)
