"""`headrace reconcile` against a real broker: dead letters, skips, what waits, and what a wrong reset has passed."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.records import OutgoingRecord
from headrace_devkit.testing import MakeTopic, PlannedResponse, RecordingBackend, StartHeadrace
from headrace_devkit.testing.scenario import Scenario


def test_every_record_is_accounted_for(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace, backend: RecordingBackend, tmp_path: Path
) -> None:
    """The sum is exact through a dead letter, a skip, an outage and a reset, which is named offset by offset."""
    name = topic(3)
    backend.response = PlannedResponse(fails=lambda record: record["partition"] == 1 and record["offset"] == 5)
    consumer = {"topics": [name], "group": name, "backend": {"url": backend.url}, "retry": {"attempts": 1}}
    audit = {"to": "topic", "topic": f"{name}-audit"}
    config = {**site.config, "audit": audit, "reactive_consumers": {"billing": consumer}}
    (tmp_path / "headrace.yaml").write_text(json.dumps(config))
    process = headrace(config)

    def write(count: int) -> None:
        site.write(name, *(OutgoingRecord(name, None, b"{}", partition=n % 3) for n in range(count)))

    def reconcile(code: int | None = 0) -> list[str]:
        return site.cli("reconcile", name, "--consumer", "billing", code=code).stdout.splitlines()

    def becomes(text: str) -> None:
        site.wait_until(lambda: text in reconcile(None), f"{text} in {reconcile(None)}")

    write(60)
    becomes("60 records = 59 delivered + 1 dead-lettered + 0 skipped + 0 waiting + 0 unaccounted")
    backend.response = PlannedResponse(status=503)
    write(3)
    becomes("63 records = 59 delivered + 1 dead-lettered + 0 skipped + 3 waiting + 0 unaccounted")
    words = ("--partition", "2", "--reason", "x", "--url", process.url)
    site.cli("reactive", "skip", "billing", "20", *words)
    backend.response = PlannedResponse()
    becomes("63 records = 61 delivered + 1 dead-lettered + 1 skipped + 0 waiting + 0 unaccounted")
    assert process.terminate() == 0
    write(3)
    becomes("66 records = 61 delivered + 1 dead-lettered + 1 skipped + 3 waiting + 0 unaccounted")
    site.cli("groups", "reset", name, "--topic", name, "--to", "latest", "--yes")
    lines = reconcile(code=1)
    assert "66 records = 61 delivered + 1 dead-lettered + 1 skipped + 0 waiting + 3 unaccounted" in lines
    assert lines[-3:] == [
        f"{name}-{n}@21: its offset is committed, and the audit has no delivery of it" for n in range(3)
    ]
    assert "0 records = " in site.cli("reconcile", name, "--consumer", "billing", "--from", "0s").stdout
    assert "billing" in site.cli("reconcile", name, "--consumer", "biling", code=2).stderr
