"""Dead letters as a consumer writes them, for tests that need some in a topic."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.delivery.dead_letter import headers_of
from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.records import OutgoingRecord


def written_for(letters: Iterable[DeadLetter]) -> list[OutgoingRecord]:
    """Return the records of a dead letter topic that stand for dead letters."""
    return [OutgoingRecord(f"{d.record.topic}.dlq", d.record.key, d.record.value, headers_of(d)) for d in letters]


def bury(site: Any, topic: str, group: str = "billing", errors: Sequence[str] = ("HTTP 400",)) -> str:
    """Write a dead letter for each record of a topic, and return the name of their topic."""
    dlq = f"{topic}.dlq"
    asyncio.run(site.admin.ensure_topic_like(dlq, topic))
    records = sorted(site.records(topic), key=lambda record: record.value or b"")
    replies = [Reply(errors[n % len(errors)], "no", permanent=True) for n in range(len(records))]
    letters = (DeadLetter(r, group, 3, reply, 1.0, 2.0) for r, reply in zip(records, replies, strict=True))
    site.write(dlq, *written_for(letters))
    return dlq
