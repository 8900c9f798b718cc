"""What binds the audit to those whose records it notes, who do not know of it."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.delivery.protocols import Outcome, Witness
from headrace.records import Record
from headrace.telemetry.audit import Audit, Produce
from headrace.telemetry.audit_notes import Consumption


def witness_of(audit: Audit | None, audit_type: str, group: str) -> Witness | None:
    """Return what notes the records of a group that have ended; None if nothing is noted."""
    if audit is None:
        return None
    noted = audit.consumed

    def witness(records: Sequence[Record], size_bytes: int, how: str, outcomes: Sequence[Outcome], replay: str) -> None:
        noted(Consumption(audit_type, group, replay), records, size_bytes, how, outcomes)

    return witness


def noted_produce(audit: Audit | None, produce: Produce, audit_type: str = "PRODUCER") -> Produce:
    """Return what writes records and has them noted, if anything is."""
    return audit.noting(produce, audit_type) if audit else produce
