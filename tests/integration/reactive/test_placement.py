"""Consumers on some of the processes."""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

from headrace.records import OutgoingRecord
from headrace_devkit.testing import HeadraceProcess, MakeTopic, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario


def running(process: HeadraceProcess) -> set[str]:
    with urllib.request.urlopen(f"{process.url}/adm/reactive-consumers", timeout=10) as response:
        return {one["name"] for one in json.loads(response.read())["consumers"]}


def test_each_consumer_runs_in_two_processes_of_two_zones(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend, tmp_path: Path
) -> None:
    """A process that comes back in time has its consumers again, and the others keep theirs."""
    name, names = topic(), [f"c{number}" for number in range(5)]
    control = {"topic": f"_headrace-control-{uuid.uuid4().hex[:8]}"}
    consumers = {each: {"topics": [name], "group": f"{name}-{each}", "backend": {"url": backend.url}} for each in names}
    site.write(name, OutgoingRecord(name, b"k", b"1"))

    def started(process: str, zone: str) -> HeadraceProcess:
        own: dict[str, Any] = {"placement": {"process": process, "zone": zone}, "state_dir": str(tmp_path / process)}
        return headrace({**site.config, "control": control, "reactive_consumers": consumers, **own}, wait=False)

    processes = {each: started(each, zone) for each, zone in (("p0", "a"), ("p1", "b"), ("p2", "a"))}
    for process in processes.values():
        process.wait_ready()
    site.wait_until(
        lambda: Counter(n for p in processes.values() for n in running(p)) == Counter(names * 2), "two of each", 60
    )
    before = {each: running(process) for each, process in processes.items()}
    assert before["p1"] == {*names}  # the only process of its zone
    for each in names:
        site.wait_committed(f"{name}-{each}", name, 1)
    processes["p2"].terminate()
    processes["p2"] = started("p2", "a")
    processes["p2"].wait_ready()
    site.wait_until(lambda: running(processes["p2"]) == before["p2"], "p2 has its consumers again", 60)
    assert {each: running(process) for each, process in processes.items()} == before
    site.write(name, OutgoingRecord(name, b"k", b"2"))
    for each in names:
        site.wait_committed(f"{name}-{each}", name, 2)
    assert json.loads((tmp_path / "p2" / "placement.json").read_text()).keys() == {*names}
