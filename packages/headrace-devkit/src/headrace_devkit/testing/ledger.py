"""Compares the responses that producing clients received with the records in the topic.

Pure: no clock, no network, no data from Headrace itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from headrace.records import Record

_EXAMPLES = 20


class Sent(NamedTuple):
    """One record as the client that sent it knows it."""

    client: int
    key: bytes | None
    value: bytes
    """Unique in the history."""
    sent_at: float
    """Seconds of the monotonic clock, before the request left."""
    answered_at: float
    outcome: Literal["ok", "fail", "unknown"]
    partition: int = -1
    offset: int = -1


class Fault(NamedTuple):
    """A time in which outcomes may be unknown, or records be delivered again."""

    begin: float
    """Seconds, by the clock of the history."""
    end: float
    """When the fault was repaired and the produce deadline after it had passed."""
    most: float = math.inf
    """Upper bound of the records in flight, if it is known."""


def check_produced(history: Sequence[Sent], log: Iterable[Record], faults: Sequence[Fault] = ()) -> list[str]:
    """Return the violated promises of a producer, a sentence each; empty if there are none.

    Args:
        history: Every record that was sent, in order of sending for each client.
        log: Everything in the topic.
        faults: When outcomes could become unknown; none means never.
    """
    sent = {record.value: record for record in history}
    positions: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    found: list[tuple[str, str]] = []

    def violation(kind: str, what: str) -> None:
        found.append((kind, what))

    for record in log:
        known = sent.get(record.value or b"")
        if known is None:
            violation("phantom", f"no client sent the record at {record.partition}:{record.offset}")
            continue
        positions[known.value].append((record.partition, record.offset))
        if record.key != known.key:
            violation("key", f"{known.value!r} has the key {record.key!r}, sent was {known.key!r}")
    for sent_record in history:
        at = positions.get(sent_record.value, [])
        answered = f"{sent_record.value!r} was ok at {sent_record.partition}:{sent_record.offset}"
        if sent_record.outcome == "ok" and not at:
            violation("lost", f"{answered} and is not there")
        elif sent_record.outcome == "ok" and (sent_record.partition, sent_record.offset) not in at:
            violation("moved", f"{answered} and is at {at}")
        elif sent_record.outcome == "fail" and at:
            violation("ghost", f"{sent_record.value!r} was a fail and is at {at}")
        if len(at) > 1:
            violation("double", f"{sent_record.value!r} is at {at}")
    return sentences([*found, *_out_of_order(history), *_unknown(history, faults)])


def sentences(found: Iterable[tuple[str, str]]) -> list[str]:
    """Return violations as sentences, kind by kind; at most twenty of a kind, then their number."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for kind, what in found:
        kinds[kind].append(f"{kind}: {what}")
    return [
        text
        for kind, texts in kinds.items()
        for text in [*texts[:_EXAMPLES], *([f"{kind}: {len(texts)} in all"] if len(texts) > _EXAMPLES else [])]
    ]


def _out_of_order(history: Sequence[Sent]) -> Iterable[tuple[str, str]]:
    last: dict[tuple[int, int], Sent] = {}
    for record in history:
        if record.outcome == "ok":
            before = last.get((record.client, record.partition))
            if before and before.offset >= record.offset:
                where = f"{record.partition}:{record.offset}, at {before.offset} was {before.value!r}, sent earlier"
                yield "order", f"{record.value!r} of client {record.client} is at {where}"
            last[record.client, record.partition] = record


def _unknown(history: Sequence[Sent], faults: Sequence[Fault]) -> Iterable[tuple[str, str]]:
    counts = [0] * len(faults)
    for record in history:
        if record.outcome == "unknown":
            sent, answered = record.sent_at, record.answered_at
            hit = [i for i, fault in enumerate(faults) if answered >= fault.begin and sent <= fault.end]
            for index in hit[:1]:
                counts[index] += 1
            if not hit:
                times = f"sent at {sent:.3f}, answered at {answered:.3f}"
                yield "unknown", f"{record.value!r} became unknown outside every fault, {times}"
    for fault, count in zip(faults, counts, strict=True):
        if count > fault.most:
            yield "unknown", f"{count} records became unknown in one fault, {fault.most} were in flight at most"
