"""What the audit costs: producing and pushing with every record audited and without, in turns."""

from __future__ import annotations

import time
from typing import Any

from bench.environment import Bench, metrics, pid
from bench.load import Target
from bench.measured import HEAD, Measured, audit_notes, cells, median_of, pending_notes, table
from bench.produce import produce
from bench.push import Sink, consumer
from headrace.devcluster import HeadraceProcess

ROUNDS = 3
AUDITED = {"to": "topic", "records": "all"}
TITLES = {"produce": "100 x 100 B per request, 16 connections", "push": "100 records per POST, status only"}


class AuditTable:
    """Measures, and shows what came out."""

    title = "Audit"
    text = "Medians in turns, with `audit.records: all` and without an audit section."

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.topic = bench.topic("audited")
        self.runs: dict[tuple[str, bool], list[Measured]] = {}
        self.notes: dict[str, list[dict[str, float]]] = {}

    def measure(self) -> None:
        """Run every row, in turns."""
        for _ in range(ROUNDS):
            for audited in (False, True):
                self.runs.setdefault(("produce", audited), []).append(self.producing(audited))
                self.runs.setdefault(("push", audited), []).append(self.pushing(audited))

    def config(self, audited: bool) -> dict[str, Any]:
        return {"audit": {**AUDITED, "topic": self.bench.topic("audit")}} if audited else {}

    def producing(self, audited: bool) -> Measured:
        process = self.bench.headrace(self.config(audited))
        target = Target(int(process.url.rsplit(":", 1)[1]), pid(process))
        got = produce(self.bench, target, "many", self.topic)
        self.ended("produce", audited, process)
        return got

    def pushing(self, audited: bool) -> Measured:
        records = self.bench.records
        with Sink(records) as sink:
            process = consumer(self.bench, self.bench.full(records), sink, "status", self.config(audited))
            got = sink.measure(process)
            self.ended("push", audited, process)
        return got

    def ended(self, row: str, audited: bool, process: HeadraceProcess) -> None:
        """Wait until every note is written, and count."""
        while audited:
            text = metrics(process)
            if not pending_notes(text):
                self.notes.setdefault(row, []).append(audit_notes(text))
                break
            time.sleep(0.05)
        process.terminate()

    def lines(self) -> list[str]:
        """Return the table; medians of the rounds."""
        rows = []
        for row, title in TITLES.items():
            without, audited = (self.runs[row, with_audit] for with_audit in (False, True))
            missing = sum(notes.get("dropped", 0) + notes.get("lost", 0) for notes in self.notes[row])
            share = missing / (missing + sum(notes.get("written", 0) for notes in self.notes[row]))
            cost = 1 - median_of("rate", audited) / median_of("rate", without)
            rows.append(f"{title}, records | {cells(without)} | | | ")
            rows.append(
                f"{title}, every record audited | {cells(audited)} | **{cost:.0%}** | {share:.0%} of notes | <= 10 %"
            )
        return table(f"workload | {HEAD} | costs | dropped | target", rows)
