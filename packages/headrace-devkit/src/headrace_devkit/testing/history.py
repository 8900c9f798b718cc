"""The history of one partition during delivery: attempts, commits, and operator actions, which are not faults.

Times are in seconds since the epoch by the clock of one machine, from the request to the response.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from headrace.delivery.offset_map import decode
from headrace.records import Record
from headrace_devkit.testing.ledger import Fault

NEVER = math.inf
TICK_SECONDS = 0.001
"""Kafka's times are whole milliseconds, so a later event may seem earlier by this much."""


class Seek(NamedTuple):
    """The group resumes at another offset; the response says that this offset is committed."""

    begin: float
    end: float
    offset: int


class Skip(NamedTuple):
    """A record ends without a delivery."""

    begin: float
    end: float
    offset: int


class PauseSpan(NamedTuple):
    """No delivery starts between the end of those in flight and the resume."""

    begin: float
    end: float


class Attempt(NamedTuple):
    """One record of one request, from the backend's journal."""

    request: int
    """Number of the request, in order of arrival; records of one request share it."""
    at: float
    """When it arrived."""
    offset: int
    key: bytes | None
    value: bytes | None
    ended_at: float = NEVER
    """When the backend had handled it, just before its whole response; infinity if it did not."""


class Commit(NamedTuple):
    """One commit of the group."""

    at: float
    offset: int
    metadata: str = ""


class Pushed(NamedTuple):
    """The recording of one partition when its group is idle."""

    log: Sequence[Record]
    """From the start of the group."""
    attempts: Sequence[Attempt]
    """In order of arrival."""
    dead_letters: Sequence[Record]
    """The dead letters of this partition, with the time of the append."""
    commits: Sequence[Commit]
    """In the order of the broker."""


Operation = Seek | Skip | PauseSpan


class Phase(NamedTuple):
    """The history between two seeks; only the last one is complete."""

    run: Pushed
    faults: Sequence[Fault]
    skips: Sequence[Skip]
    is_last: bool


def phases(run: Pushed, faults: Sequence[Fault], operations: Sequence[Operation]) -> Iterator[Phase]:
    """Cut a history where a seek was committed; the part after the cut is compared with the log from there on.

    A commit belongs to a seek if it has its time and offset, and no map. No other jump is explained.
    """
    seeks = [operation for operation in operations if isinstance(operation, Seek)]
    skips = [operation for operation in operations if isinstance(operation, Skip)]
    plain = [None if decode(commit.metadata, commit.offset) else commit.offset for commit in run.commits]
    before = [None, *plain]
    cuts = [
        number
        for number, commit in enumerate(run.commits)
        # The same commit repeated, before any other commit, starts no new phase.
        if plain[number] != before[number]
        and any(
            seek.offset == plain[number] and seek.begin - TICK_SECONDS <= commit.at <= seek.end + TICK_SECONDS
            for seek in seeks
        )
    ]
    times = [run.commits[number].at + TICK_SECONDS for number in cuts]
    phase_of_attempt = [bisect_right(times, attempt.at) for attempt in run.attempts]
    phase_of_dead_letter = [bisect_right(times, record.timestamp_ms / 1000) for record in run.dead_letters]
    edges = [0, *cuts, len(run.commits)]
    for number in range(len(cuts) + 1):
        first = run.commits[cuts[number - 1]].offset if number else -math.inf
        begins, ends = (times[number - 1] if number else -math.inf), [*times, math.inf][number]
        part = run._replace(
            log=[record for record in run.log if record.offset >= first],
            attempts=[a for a, phase in zip(run.attempts, phase_of_attempt, strict=True) if phase == number],
            dead_letters=[
                one for one, phase in zip(run.dead_letters, phase_of_dead_letter, strict=True) if phase == number
            ],
            commits=run.commits[edges[number] : edges[number + 1]],
        )
        relevant = [skip for skip in skips if skip.end >= begins and skip.begin <= ends]
        yield Phase(part, [*faults, *(Fault(seek.begin, seek.end) for seek in seeks)], relevant, number == len(cuts))
