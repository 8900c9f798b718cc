"""What one run found, the median of several, and how both are written into a table."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import NamedTuple

ENDED = re.compile(
    r'^headrace_completed_records_total\{(?:[^}]*,)?outcome="delivered"(?:,[^}]*)?\} (\S+)$', re.MULTILINE
)
PENDING_EVENTS = re.compile(r"^headrace_audit_pending_events(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
AUDIT_EVENTS = re.compile(r'^headrace_audit_events_total\{outcome="(\w+)"\} (\S+)$', re.MULTILINE)


class Measured(NamedTuple):
    """One run."""

    records: float
    seconds: float
    cpu_seconds: float = 0.0
    """Processor time of the server under test and its children."""
    stolen: float = 0.0
    """Share of the machine's time that the hypervisor gave to others."""
    others: float = 0.0
    """Share of one processor that processes took which the run did not start."""
    load: float = 0.0
    """Share of one processor that the load generator, or the backend, took."""
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    longest_ms: float = 0.0
    requests: float = 0.0
    errors: float = 0.0
    """Requests that were answered by another status than 200, or not at all."""
    refused: float = 0.0
    """Requests that were answered 503 and sent again later."""
    first_ms: float = 0.0
    """From the start until every connection had its first response."""
    least: float = 0.0
    """Responses of the connection that had the fewest, as a share of the mean."""

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / max(self.seconds, 1e-9)

    @property
    def cpu_us(self) -> float:
        """Microseconds of the processor per record."""
        return 1e6 * self.cpu_seconds / max(self.records, 1)


def median_of(field: str, runs: Sequence[Measured]) -> float:
    """Return the median of one number."""
    return float(statistics.median(getattr(run, field) for run in runs))


def cells(runs: Sequence[Measured]) -> str:
    """Return the cells of `HEAD` for the runs of one row."""
    rate, cpu_us, load, stolen = (median_of(field, runs) for field in ("rate", "cpu_us", "load", "stolen"))
    return f"{rate:,.0f} | {cpu_us:,.1f} | {load:.0%} | {stolen:.0%}"


HEAD = "Headrace per s | processor us each | generator | stolen"


def table(head: str, rows: Sequence[str]) -> list[str]:
    """Return the lines of a table in Markdown; `head` and rows are cells with bars between them."""
    return [f"| {head} |", "|" + "---|" * (head.count("|") + 1), *(f"| {row} |" for row in rows)]


def delivered_records(metrics: str) -> float:
    """Return the records that a backend or handler took, each counted once."""
    return sum(map(float, ENDED.findall(metrics)))


def pending_events(metrics: str) -> float:
    """Return the audit's events that are not written yet."""
    return sum(map(float, PENDING_EVENTS.findall(metrics)))


def audit_events(metrics: str) -> dict[str, float]:
    """Return the audit's events by outcome."""
    return {outcome: float(count) for outcome, count in AUDIT_EVENTS.findall(metrics)}
