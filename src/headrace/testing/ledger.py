"""What clients were told of the records they produced, held against what is in the topic.

Pure: no clock, no network, nothing of Headrace's own view. Source: reliability.md 2.4, checks K1 to K6.
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
    """Unlike that of any other record of the history."""
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
    """When all was mended, and the produce deadline after it had passed."""
    most: float = math.inf
    """Records that can have been in flight, if that is known."""


def check_produced(history: Sequence[Sent], log: Iterable[Record], faults: Sequence[Fault] = ()) -> list[str]:
    """Return what contradicts the promises of a producer, a sentence each; empty if nothing does.

    Args:
        history: Every record that was sent, in order of sending for each client.
        log: Everything in the topic.
        faults: When outcomes could become unknown; none means never.
    """
    sent = {record.value: record for record in history}
    places: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    found: list[tuple[str, str]] = []

    def violation(kind: str, what: str) -> None:
        found.append((kind, what))

    for record in log:
        known = sent.get(record.value or b"")
        if known is None:
            violation("phantom", f"nobody sent what is at {record.partition}:{record.offset}")
            continue
        places[known.value].append((record.partition, record.offset))
        if record.key != known.key:
            violation("key", f"{known.value!r} has the key {record.key!r}, sent was {known.key!r}")
    for told in history:
        at = places.get(told.value, [])
        if told.outcome == "ok" and not at:
            violation("lost", f"{told.value!r} was ok at {told.partition}:{told.offset} and is not there")
        elif told.outcome == "ok" and (told.partition, told.offset) not in at:
            violation("moved", f"{told.value!r} was ok at {told.partition}:{told.offset} and is at {at}")
        elif told.outcome == "fail" and at:
            violation("ghost", f"{told.value!r} was a fail and is at {at}")
        if len(at) > 1:
            violation("double", f"{told.value!r} is at {at}")
    return sentences([*found, *_out_of_order(history), *_unknown(history, faults)])


def sentences(found: Iterable[tuple[str, str]]) -> list[str]:
    """Return violations as sentences, kind by kind; of many of one kind twenty, and how many there are."""
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
    for told in history:
        if told.outcome == "ok":
            before = last.get((told.client, told.partition))
            if before and before.offset >= told.offset:
                where = f"{told.partition}:{told.offset}, at {before.offset} was {before.value!r}, sent earlier"
                yield "order", f"{told.value!r} of client {told.client} is at {where}"
            last[told.client, told.partition] = told


def _unknown(history: Sequence[Sent], faults: Sequence[Fault]) -> Iterable[tuple[str, str]]:
    counts = [0] * len(faults)
    for told in history:
        if told.outcome == "unknown":
            hit = [i for i, fault in enumerate(faults) if told.answered_at >= fault.begin and told.sent_at <= fault.end]
            for index in hit[:1]:
                counts[index] += 1
            if not hit:
                times = f"sent at {told.sent_at:.3f}, answered at {told.answered_at:.3f}"
                yield "unknown", f"{told.value!r} became unknown outside every fault, {times}"
    for fault, count in zip(faults, counts, strict=True):
        if count > fault.most:
            yield "unknown", f"{count} records became unknown in one fault, {fault.most} were in flight at most"
