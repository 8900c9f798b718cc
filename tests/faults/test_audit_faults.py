"""The audit counts what happened, whatever fails meanwhile: notes and told holes are as many as records that ended."""

from __future__ import annotations

import json
import re
import urllib.request
import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.testing import Answer

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(500)]

ENDED = ("delivered", "dead_letter", "skipped", "discarded")


class Numbers:
    """What a process counts."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        sample = r"(?m)^headrace_(\w+?)(?:_total)?(?:\{(.*?)\})? (\S+)"
        self.found = {(name, tuple(re.findall(r'"(.*?)"', of))): float(n) for name, of, n in re.findall(sample, text)}

    def of(self, name: str, *labels: str) -> int:
        return int(self.found.get((name, labels), 0))

    @property
    def due(self) -> int:
        """Records that were written for clients, that ended, and dead letters, which are written too."""
        ended = sum(self.of("ended_records", "push", "reactive", outcome) for outcome in ENDED)
        letters = self.of("ended_records", "push", "reactive", "dead_letter")
        return self.of("produce_requested_records") + ended + letters

    @property
    def counted(self) -> int:
        return sum(self.of("audit_notes", outcome) for outcome in ("written", "dropped", "lost"))

    @property
    def is_quiet(self) -> bool:
        return not self.of("audit_pending_notes")


def notes_of(ledger: Any, topic: str) -> tuple[list[Any], int]:
    """Return the notes of a topic, and how many it says are missing."""
    notes = [json.loads(record.value) for record in ledger.records(topic)]
    holes = sum(note["count"] for note in notes if note["auditType"] == "DROPPED")
    return [note for note in notes if note["auditType"] != "DROPPED"], holes


def settled(bed: Any, process: Any, ledger: Any, group: str) -> Numbers:
    """Return the numbers of a process once everything has ended and is noted, and let it drain."""
    bed.wait_until(lambda: ledger.lag(group) == 0, 150, f"lag 0 of {group}")
    bed.wait_until(lambda: Numbers(process.url).is_quiet, 150, "the last notes")
    numbers = Numbers(process.url)
    assert process.terminate() == 0
    return numbers


def start(headrace: Any, cluster: Any, topic: str, url: str, **audit: Any) -> Any:
    """Start a process that writes and pushes a topic, and notes all of it."""
    consumer = {
        "topics": [topic],
        "group": f"{topic}-push",
        "retry": {"attempts": 2, "first_delay_seconds": 0.05, "max_delay_seconds": 0.1},
        "backend": {"url": url},
    }
    return headrace(
        {
            "kafka": {"bootstrap_servers": cluster.bootstrap_servers},
            "control": {"topic": f"_headrace-control-{topic}"},
            "audit": {"to": "topic", "records": "all", "topic": f"{topic}-audit", **audit},
            "reactive_consumers": {"push": consumer},
        }
    )


TROUBLE: Sequence[Answer] = (Answer(status=503), Answer(cut_after_bytes=0), Answer(status=200, body=b"no json")) * 3


@pytest.mark.parametrize("budget", [134_217_728, pytest.param(3_000, marks=pytest.mark.long)])
def test_notes_and_told_holes_are_as_many_as_records_that_ended(
    kafka: Any, headrace: Any, backend: Any, bed: Any, budget: int
) -> None:
    """The backend breaks and some records are bad; with a budget for a dozen notes, holes say what is missing."""
    topic = f"audited-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(topic, 3)
    ledger = bed.Ledger(kafka.bootstrap_servers)
    backend.script += TROUBLE
    backend.answer = Answer(fails=lambda record: record["value"]["id"] % 50 == 7)
    process = start(headrace, kafka, topic, backend.url, max_pending_bytes=budget)
    with bed.Poster(process.url, topic) as poster:
        poster.wait_for(600)
    numbers = settled(bed, process, ledger, f"{topic}-push")
    notes, holes = notes_of(ledger, f"{topic}-audit")
    assert len(notes) + holes == numbers.due == numbers.counted
    if not holes:
        kinds = Counter((note["auditType"], note["auditStatus"]) for note in notes)
        records, letters = len(ledger.records(topic)), len(ledger.records(f"{topic}.dlq"))
        assert kinds["PRODUCER", "SUCCESS"] == records + letters
        assert letters == kinds["REACTIVE_CONSUMER", "FAILURE"] > 0
        places = {(n["partition"], n["offset"]) for n in notes if n["auditType"] == "REACTIVE_CONSUMER"}
        assert places == {(record.partition, record.offset) for record in ledger.records(topic)}


@pytest.mark.long
def test_a_broker_that_dies_costs_no_note_that_is_not_counted(
    kafka_three: Any, headrace: Any, backend: Any, bed: Any
) -> None:
    """Notes wait for the other brokers; what is lost all the same is counted."""
    topic = f"audited-{uuid.uuid4().hex[:8]}"
    for name in (topic, f"{topic}-audit"):
        kafka_three.create_topic(name, 3, {"min.insync.replicas": "2"})
    ledger = bed.Ledger(kafka_three.bootstrap_servers)
    process = start(headrace, kafka_three, topic, backend.url)
    with bed.Poster(process.url, topic) as poster:
        poster.wait_for(300)
        kafka_three.kill(1)
        poster.wait_for_more()
        kafka_three.restart(1)
        kafka_three.wait_in_sync()
        poster.wait_for_more()
    numbers = settled(bed, process, ledger, f"{topic}-push")
    notes, holes = notes_of(ledger, f"{topic}-audit")
    lost = numbers.of("audit_notes", "lost")
    assert numbers.counted == numbers.due
    assert numbers.due - holes <= len(notes) <= numbers.due - holes + lost
