"""What the audit costs: producing and pushing with every record noted in a topic and without, in turns on one broker.

usage: python -m bench.audit [SCALE]
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from bench.produce import VALUE, ProduceTable, Target
from bench.push import Sink

ROUNDS = 3
AUDITED = {"to": "topic", "records": "all"}


class AuditTable:
    """Measures, and shows what came out."""

    def __init__(self, bench: Any, topic: str, records: int) -> None:
        self.bench, self.topic, self.records = bench, topic, records
        self.produce = ProduceTable(bench)
        self.rates: dict[tuple[str, bool], list[float]] = {}
        self.notes: dict[str, list[dict[str, float]]] = {}
        self.groups = 0

    def measure(self) -> None:
        """Run every row, in turns."""
        for _ in range(ROUNDS):
            for audited in (False, True):
                self.note("produce", audited, self.producing(audited))
                self.note("push", audited, self.pushing(audited))

    def note(self, row: str, audited: bool, rate: float) -> None:
        self.rates.setdefault((row, audited), []).append(rate)

    def config(self, audited: bool) -> dict[str, Any]:
        return {"audit": {**AUDITED, "topic": self.bench.topic("audit")}} if audited else {}

    def producing(self, audited: bool) -> float:
        process = self.bench.headrace(self.config(audited))
        body = {"records": [{"value": VALUE}] * 100}
        got = self.produce.load(Target(process.url.rsplit(":", 1)[1]), body, 16)
        self.ended("produce", audited, process)
        return got["requests"] * 100 / got["seconds"]

    def pushing(self, audited: bool) -> float:
        self.groups += 1
        with Sink(self.records) as sink:
            backend = {"url": f"http://127.0.0.1:{sink.port}/", "mode": "status"}
            reactive = {"topics": [self.topic], "group": f"audited-{self.groups}", "backend": backend}
            process = self.bench.headrace({"reactive_consumers": {"push": reactive}, **self.config(audited)})
            rate = sink.rate()
            self.ended("push", audited, process)
        return rate

    def ended(self, row: str, audited: bool, process: Any) -> None:
        """Wait until every note is written, and count."""
        while audited:
            with urllib.request.urlopen(f"{process.url}/metrics", timeout=5) as answer:
                text = answer.read().decode()
            if "headrace_audit_pending_notes 0.0" in text:
                found = re.findall(r'^headrace_audit_notes_total\{outcome="(\w+)"\} (\S+)$', text, re.MULTILINE)
                self.notes.setdefault(row, []).append({outcome: float(count) for outcome, count in found})
                break
            time.sleep(0.05)
        process.terminate()

    def lines(self) -> list[str]:
        """Return the table; medians of the rounds."""
        lines = ["| workload | without | every record noted | costs | dropped | target |", "|---|---|---|---|---|---|"]
        titles = {"produce": "100 x 100 B per request, 16 connections", "push": "100 records per POST, status only"}
        for row, title in titles.items():
            without, audited = (statistics.median(self.rates[row, noted]) for noted in (False, True))
            missing = sum(notes.get("dropped", 0) + notes.get("lost", 0) for notes in self.notes[row])
            share = missing / (missing + sum(notes.get("written", 0) for notes in self.notes[row]))
            cost = 1 - audited / without
            rates = f"{without:,.0f} | {audited:,.0f} | **{cost:.0%}**"
            lines.append(f"| {title}, rec/s | {rates} | {share:.0%} of notes | <= 10 % |")
        return lines


def main() -> None:
    from bench.__main__ import Bench
    from headrace.devcluster import Cluster

    scale = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder) / "kafka") as cluster:
        bench = Bench(cluster, Path(folder), scale)
        records = int(1_000_000 * scale)
        table = AuditTable(bench, bench.fill(records), records)
        table.measure()
        print("\n".join(table.lines()))


if __name__ == "__main__":
    main()
