"""Compares the deliveries to a backend with the topic, the dead letters and every commit of the group.

Pure: no clock, no network, no data from Headrace itself. One partition at a time, because nothing is promised across
partitions. Every time is in seconds since the epoch by the clock of one machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace.delivery.dead_letter import Origin, origin_of
from headrace.delivery.offset_map import decode
from headrace.records import Record
from headrace_devkit.testing.history import NEVER, TICK_SECONDS, Operation, PauseSpan, Pushed, Skip, phases
from headrace_devkit.testing.ledger import Fault, sentences

if TYPE_CHECKING:  # the pytest plugin is loaded in every test run where Headrace is installed
    from headrace.config.consumers import Ordering

Violations = Iterator[tuple[str, str]]


def check_pushed(
    run: Pushed, ordering: Ordering = "partition", faults: Sequence[Fault] = (), operations: Sequence[Operation] = ()
) -> list[str]:
    """Return the violated promises of a delivery, a sentence each; empty if there are none.

    A sentence begins with its kind. `lost`: committed, never handled; `skipped`: committed, never delivered; `ahead`:
    committed before it had ended; `back`: an offset was committed below an earlier one; `order`: delivered before an
    earlier record of its key or partition had ended; `repeat`: delivered again after an attempt that ended it, and no
    fault explains that; `phantom`: not what is in the topic; `behind`: the commits do not reach the end; `unwanted`:
    delivered after it was skipped; `paused`: delivered while its partition was.

    Args:
        run: The recording.
        ordering: The promised order.
        faults: Faults that explain repeats of records that no commit had ended when the fault began.
        operations: Operator actions. A seek explains that the group resumes at its offset, a skip that this one
            record is never handled. They explain nothing else.
    """
    found = [*_phantoms(run), *_during_pauses(run, operations)]
    for phase in phases(run, faults, operations):
        ends, claims = _ends(phase.run, phase.skips), _claims(phase.run)
        found += _unfinished(phase.run, ends, claims)
        found += _behind(phase.run) if phase.is_last else ()
        found += _commits(phase.run, ends, claims)
        found += _disorder(phase.run, ordering, ends)
        found += _repeats(phase.run, claims, phase.faults, phase.skips)
        found += _unwanted(phase.run, claims, phase.faults, phase.skips)
    return sentences(found)


def _during_pauses(run: Pushed, operations: Sequence[Operation]) -> Violations:
    pauses = [operation for operation in operations if isinstance(operation, PauseSpan)]
    for attempt in run.attempts:
        if any(pause.begin < attempt.at < pause.end for pause in pauses):
            yield "paused", f"offset {attempt.offset} arrived at {attempt.at:.3f}, while the partition was paused"


def _unwanted(run: Pushed, claims: Mapping[int, float], faults: Sequence[Fault], skips: Sequence[Skip]) -> Violations:
    """Yield deliveries of skipped records, unless a fault undid the skip before it was committed."""
    for attempt in run.attempts:
        for skip in skips:
            undone = any(
                skip.end <= fault.end and attempt.at >= fault.begin and claims[skip.offset] >= fault.begin
                for fault in faults
            )
            if attempt.offset == skip.offset and attempt.at > skip.end and not undone:
                yield "unwanted", f"offset {skip.offset} arrived at {attempt.at:.3f}, skipped by {skip.end:.3f}"


def _origins(run: Pushed) -> Iterator[tuple[Record, Origin]]:
    for record in run.dead_letters:
        if origin := origin_of(record.headers):
            yield record, origin


def _ends(run: Pushed, skips: Sequence[Skip]) -> dict[int, float]:
    """Return when each record first ended: handled, in the dead letter topic, or skipped."""
    ends: dict[int, float] = defaultdict(lambda: NEVER)
    for attempt in run.attempts:
        ends[attempt.offset] = min(ends[attempt.offset], attempt.ended_at)
    for record, origin in _origins(run):
        ends[origin.offset] = min(ends[origin.offset], record.timestamp_ms / 1000)
    for skip in skips:
        ends[skip.offset] = min(ends[skip.offset], skip.begin)
    return ends


def _claims(run: Pushed) -> dict[int, float]:
    """Return when a commit first covered each record, by its offset or its map."""
    claims: dict[int, float] = defaultdict(lambda: NEVER)
    offsets = [record.offset for record in run.log]
    first = 0
    for commit in run.commits:
        while first < len(offsets) and offsets[first] < commit.offset:
            claims[offsets[first]] = min(claims[offsets[first]], commit.at)
            first += 1
        ended = decode(commit.metadata, commit.offset)
        above = first
        while ended and above < len(offsets) and offsets[above] < ended.end:
            if ended.has(offsets[above]):
                claims[offsets[above]] = min(claims[offsets[above]], commit.at)
            above += 1
    return claims


def _phantoms(run: Pushed) -> Violations:
    known = {record.offset: (record.key, record.value) for record in run.log}
    for attempt in run.attempts:
        if known.get(attempt.offset) != (attempt.key, attempt.value):
            yield "phantom", f"{attempt.value!r} was delivered as offset {attempt.offset}, which is not in the topic"
    for record in run.dead_letters:
        origin = origin_of(record.headers)
        if not origin or known.get(origin.offset) != (record.key, record.value):
            yield "phantom", f"the dead letter at {record.partition}:{record.offset} is not a record of the topic"


def _unfinished(run: Pushed, ends: Mapping[int, float], claims: Mapping[int, float]) -> Violations:
    seen = {attempt.offset for attempt in run.attempts} | {origin.offset for _, origin in _origins(run)}
    for record in run.log:
        if ends[record.offset] == NEVER and claims[record.offset] < NEVER:
            kind, what = ("lost", "handled") if record.offset in seen else ("skipped", "delivered")
            yield kind, f"offset {record.offset} is committed and was never {what}"


def _behind(run: Pushed) -> Violations:
    reached = run.commits[-1].offset if run.commits else 0
    if run.log and reached <= run.log[-1].offset:
        yield "behind", f"the group committed {reached}, and the last record is at {run.log[-1].offset}"


def _commits(run: Pushed, ends: Mapping[int, float], claims: Mapping[int, float]) -> Violations:
    for record in run.log:
        ended, claimed = ends[record.offset], claims[record.offset]
        if claimed < NEVER and ended > claimed + TICK_SECONDS:
            yield "ahead", f"offset {record.offset} was committed at {claimed:.3f} and ended at {ended:.3f}"
    for before, commit in zip(run.commits, run.commits[1:], strict=False):
        if commit.offset < before.offset:
            yield "back", f"{commit.offset} was committed at {commit.at:.3f} after {before.offset}"


def _disorder(run: Pushed, ordering: Ordering, ends: Mapping[int, float]) -> Violations:
    """Yield deliveries before an earlier record of the same lane had ended, unless it was in the same request."""
    if ordering == "none":
        return
    lanes: dict[bytes | None, list[int]] = defaultdict(list)
    position: dict[int, tuple[bytes | None, int]] = {}
    for record in run.log:
        if ordering == "partition" or record.key is not None:
            lane = record.key if ordering == "key" else None
            position[record.offset] = (lane, len(lanes[lane]))
            lanes[lane].append(record.offset)
    latest = {lane: _running_latest(ends[offset] for offset in offsets) for lane, offsets in lanes.items()}
    last_index: dict[tuple[int, bytes | None], int] = {}  # by request and lane
    for attempt in sorted(run.attempts, key=lambda attempt: (attempt.request, attempt.offset)):
        if attempt.offset not in position:
            continue
        lane, index = position[attempt.offset]
        before = last_index.get((attempt.request, lane))
        last_index[attempt.request, lane] = index
        if before is None:
            had = latest[lane][index - 1] if index else -NEVER
        else:
            had = max((ends[offset] for offset in lanes[lane][before + 1 : index]), default=-NEVER)
        if had > attempt.at + TICK_SECONDS:
            yield "order", f"offset {attempt.offset} arrived at {attempt.at:.3f}, one before it ended at {had:.3f}"


def _running_latest(times: Iterable[float]) -> list[float]:
    latest, found = -NEVER, []
    for time in times:
        latest = max(latest, time)
        found.append(latest)
    return found


def _repeats(run: Pushed, claims: Mapping[int, float], faults: Sequence[Fault], skips: Sequence[Skip]) -> Violations:
    """Yield deliveries after an attempt that ended the record, even one in flight, that no fault explains."""
    aborted = _aborted(run, skips)
    deliveries = [
        (attempt.at, attempt.offset, attempt.ended_at < NEVER and attempt.request not in aborted)
        for attempt in run.attempts
    ]
    # An attempt and its dead letter may have the same millisecond.
    deliveries += [(record.timestamp_ms / 1000 + TICK_SECONDS, origin.offset, True) for record, origin in _origins(run)]
    first: dict[int, float] = {}
    counts = [0] * len(faults)
    for at, offset, ended in sorted(deliveries):
        if offset not in first:
            if ended:
                first[offset] = at
            continue
        for number, fault in enumerate(faults):
            began = fault.begin - TICK_SECONDS
            if at >= began and claims[offset] >= began and first[offset] <= fault.end:
                counts[number] += 1
                break
        else:
            before = f"the attempt at {first[offset]:.3f} had ended it, and no fault explains that"
            yield "repeat", f"offset {offset} arrived at {at:.3f}: {before}"
    for fault, count in zip(faults, counts, strict=True):
        if count > fault.most:
            yield "repeat", f"{count} records were delivered again after one fault, {fault.most} were in flight at most"


def _aborted(run: Pushed, skips: Sequence[Skip]) -> set[int]:
    """Return the requests that a skip aborted, so their other records are delivered again."""
    return {
        attempt.request
        for attempt in run.attempts
        for skip in skips
        if attempt.offset == skip.offset and attempt.at <= skip.end and attempt.ended_at >= skip.begin
    }
