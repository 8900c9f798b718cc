"""The audit counts what happened, whatever fails meanwhile: each completed record has its event or is in a count."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace_devkit.testing import Cluster, PlannedResponse, RecordingBackend, StartHeadrace
from tests.faults.ledger import Ledger, Poster

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]

COMPLETED = ("delivered", "dead_letter", "skipped", "discarded")


class Numbers:
    """What a process counts."""

    def __init__(self, url: str) -> None:
        text = Ledger.ask(f"{url}/metrics").body
        sample = r"(?m)^headrace_(\w+?)(?:_total)?(?:\{(.*?)\})? (\S+)"
        self.found = {(name, tuple(re.findall(r'"(.*?)"', of))): float(n) for name, of, n in re.findall(sample, text)}

    def of(self, name: str, *labels: str) -> int:
        return int(self.found.get((name, labels), 0))

    @property
    def due(self) -> int:
        """Records that were written for clients, that ended, and dead letters, which are written too."""
        ended = sum(self.of("completed_records", "push", "reactive", outcome) for outcome in COMPLETED)
        letters = self.of("completed_records", "push", "reactive", "dead_letter")
        return sum(self.of("produce_records", result) for result in ("acknowledged", "failed")) + ended + letters

    @property
    def counted(self) -> int:
        return sum(self.of("audit_events", outcome) for outcome in ("written", "dropped", "lost"))

    @property
    def is_quiet(self) -> bool:
        return not self.of("audit_pending_events")


class Audited(Ledger):
    """A topic that a process writes and pushes, with events of all of it."""

    def __init__(self, cluster: Any, folder: Path, headrace: Any, url: str, change: str = "") -> None:
        super().__init__(cluster, folder)
        self.topic = self.new_topic(3)
        cluster.create_topic(f"{self.topic}-audit", 3, {})
        consumer = {
            "topics": [self.topic],
            "group": self.topic,
            "retry": {"attempts": 2, "first_delay_seconds": 0.05, "max_delay_seconds": 0.1},
            "backend": {"url": url},
        }
        self.process = headrace(
            {
                **self.config,
                "control": {"topic": f"_headrace-control-{self.topic}"},
                "audit": {"to": "topic", "records": "all", "topic": f"{self.topic}-audit"},
                "reactive_consumers": {"push": consumer},
            },
            env=self.changed(change),
        )

    def settled(self) -> Numbers:
        """Return the numbers of the process once everything is completed and has its event, and let it drain."""
        self.wait_committed_all(self.topic, self.topic)
        self.wait_until(lambda: Numbers(self.process.url).is_quiet, "the last events")
        numbers = Numbers(self.process.url)
        assert self.process.terminate() == 0
        return numbers

    def events(self) -> tuple[list[Any], int]:
        """Return the events, and how many they say are missing."""
        events = [json.loads(record.value or b"") for record in self.records(f"{self.topic}-audit")]
        gaps = sum(event["count"] for event in events if event["auditType"] == "DROPPED")
        return [event for event in events if event["auditType"] != "DROPPED"], gaps


SMALL = "from headrace.config.audit_config import AuditConfig\n\nAuditConfig.max_pending_bytes = 3_000\n"
"""Room for a dozen events."""
TROUBLE = (
    PlannedResponse(status=503),
    PlannedResponse(cut_after_bytes=0),
    PlannedResponse(status=200, body=b"no json"),
) * 3


@pytest.mark.parametrize("change", ["", pytest.param(SMALL, marks=pytest.mark.long)], ids=["usual", "small"])
def test_events_and_counted_gaps_are_as_many_as_completed_records(
    kafka: Cluster, headrace: StartHeadrace, backend: RecordingBackend, tmp_path: Path, change: str
) -> None:
    """The backend breaks and some records are bad; with a budget for a dozen events, gaps say what is missing."""
    backend.script += TROUBLE
    backend.response = PlannedResponse(fails=lambda record: record["value"]["id"] % 50 == 7)
    scenario = Audited(kafka, tmp_path, headrace, backend.url, change)
    with Poster(scenario.process.url, scenario.topic) as poster:
        poster.wait_for_more(600)
    numbers = scenario.settled()
    events, gaps = scenario.events()
    assert len(events) + gaps == numbers.due == numbers.counted
    if not gaps:
        kinds = Counter((event["auditType"], event["auditStatus"]) for event in events)
        records, letters = scenario.records(scenario.topic), scenario.records(f"{scenario.topic}.dlq")
        assert kinds["PRODUCER", "SUCCESS"] == len(records) + len(letters)
        assert len(letters) == kinds["REACTIVE_CONSUMER", "FAILURE"] > 0
        places = {(n["partition"], n["offset"]) for n in events if n["auditType"] == "REACTIVE_CONSUMER"}
        assert places == {(record.partition, record.offset) for record in records}
