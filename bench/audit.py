"""What the audit costs: producing and pushing without a section, with summaries and with `all`, in turns."""

from __future__ import annotations

import time
from typing import Any

from bench.environment import Bench, metrics, pid
from bench.load import Target
from bench.measured import HEAD, Measured, audit_events, cells, median_of, pending_events, table
from bench.produce import produce
from bench.push import Sink, consumer
from headrace_devkit.devcluster import HeadraceProcess

ROUNDS = 3
AUDITS: dict[str, dict[str, Any]] = {
    "no audit section": {},
    "audit.to: file": {"to": "file"},
    "audit.to: topic": {"to": "topic"},
    "audit.records: all": {"to": "topic", "records": "all"},
}
TITLES = {
    "one": "1 x 100 B per request, 64 connections",
    "many": "100 x 100 B per request, 16 connections",
    "push": "100 records per POST, status only",
}


class AuditTable:
    """Measures, and prints the results."""

    title = "Audit"
    text = "Medians in turns: without an audit section, with the default of each target, and with an event per record."

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.topic = bench.topic("audited")
        self.runs: dict[tuple[str, str], list[Measured]] = {}
        self.events: dict[tuple[str, str], list[dict[str, float]]] = {}

    def measure(self) -> None:
        """Run every row, in turns."""
        for _ in range(ROUNDS):
            for audit in AUDITS:
                for shape in ("one", "many"):
                    self.runs.setdefault((shape, audit), []).append(self.producing(shape, audit))
                self.runs.setdefault(("push", audit), []).append(self.pushing(audit))

    def config(self, audit: str) -> dict[str, Any]:
        return {"audit": {**AUDITS[audit], "topic": self.bench.topic("audit")}} if AUDITS[audit] else {}

    def producing(self, shape: str, audit: str) -> Measured:
        process = self.bench.headrace(self.config(audit))
        target = Target(int(process.url.rsplit(":", 1)[1]), pid(process))
        got = produce(self.bench, target, shape, self.topic)
        self.ended(shape, audit, process)
        return got

    def pushing(self, audit: str) -> Measured:
        records = self.bench.records
        with Sink(records) as sink:
            process = consumer(self.bench, self.bench.full(records), sink, "status", self.config(audit))
            got = sink.measure(process)
            self.ended("push", audit, process)
        return got

    def ended(self, row: str, audit: str, process: HeadraceProcess) -> None:
        """Wait until every event is written, and count."""
        while AUDITS[audit]:
            text = metrics(process)
            if not pending_events(text):
                self.events.setdefault((row, audit), []).append(audit_events(text))
                break
            time.sleep(0.05)
        process.terminate()

    def lines(self) -> list[str]:
        """Return the table; medians of the rounds."""
        rows = []
        for row, title in TITLES.items():
            without, *audits = AUDITS
            rows.append(f"{title}, {without} | {cells(self.runs[row, without])} | | | ")
            for audit in audits:
                events = self.events[row, audit]
                missing = sum(counts.get("dropped", 0) + counts.get("lost", 0) for counts in events)
                share = missing / (missing + sum(counts.get("written", 0) for counts in events))
                rate, cpu = (
                    median_of(field, self.runs[row, audit]) / median_of(field, self.runs[row, without])
                    for field in ("rate", "cpu_us")
                )
                target = "<= 10 %" if "records" not in AUDITS[audit] else ""
                figures = f"**{1 - rate:.0%}** ({cpu - 1:+.0%}) | {share:.0%} of events | {target}"
                rows.append(f"{title}, {audit} | {cells(self.runs[row, audit])} | {figures}")
        return table(f"workload | {HEAD} | costs (processor time) | dropped | target", rows)
