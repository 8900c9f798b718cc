"""What people did to a partition while it was delivered, so that a ledger can tell their doing from a fault.

Times are in seconds since the epoch by the clock of one machine, from when it was asked until the answer was there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from headrace.delivery.offset_map import decode
from headrace.testing.ledger import Fault

if TYPE_CHECKING:
    from headrace.testing.push_ledger import Pushed

TICK_SECONDS = 0.001
"""Kafka's times are whole milliseconds, so what is later may seem to be earlier by so much."""


class Seek(NamedTuple):
    """The group goes on at another offset; the answer is that this is committed."""

    begin: float
    end: float
    offset: int


class Skip(NamedTuple):
    """A record ends without a delivery."""

    begin: float
    end: float
    offset: int


class Pause(NamedTuple):
    """Nothing begins, from when what was in flight has ended until the partition is released."""

    begin: float
    end: float


Operation = Seek | Skip | Pause


class Era(NamedTuple):
    """A history between two seeks; only the last one comes to rest."""

    run: Pushed
    faults: Sequence[Fault]
    skips: Sequence[Skip]
    is_last: bool


def eras(run: Pushed, faults: Sequence[Fault], operations: Sequence[Operation]) -> Iterator[Era]:
    """Cut a history where a seek was committed; what lies behind the cut is held against the log from there on.

    A commit is a seek's if it came in its time, names its offset and has no map; so no other jump is explained.
    """
    seeks = [operation for operation in operations if isinstance(operation, Seek)]
    skips = [operation for operation in operations if isinstance(operation, Skip)]
    plain = [None if decode(commit.metadata, commit.offset) else commit.offset for commit in run.commits]
    before = [None, *plain]
    cuts = [
        number
        for number, commit in enumerate(run.commits)
        # The same said again, before anything else was committed, begins nothing new.
        if plain[number] != before[number]
        and any(
            seek.offset == plain[number] and seek.begin - TICK_SECONDS <= commit.at <= seek.end + TICK_SECONDS
            for seek in seeks
        )
    ]
    times = [run.commits[number].at + TICK_SECONDS for number in cuts]
    era_of_attempt = [bisect_right(times, attempt.at) for attempt in run.attempts]
    era_of_letter = [bisect_right(times, letter.timestamp_ms / 1000) for letter in run.letters]
    edges = [0, *cuts, len(run.commits)]
    for number in range(len(cuts) + 1):
        first = run.commits[cuts[number - 1]].offset if number else -math.inf
        begins, ends = (times[number - 1] if number else -math.inf), [*times, math.inf][number]
        part = run._replace(
            log=[record for record in run.log if record.offset >= first],
            attempts=[a for a, era in zip(run.attempts, era_of_attempt, strict=True) if era == number],
            letters=[letter for letter, era in zip(run.letters, era_of_letter, strict=True) if era == number],
            commits=run.commits[edges[number] : edges[number + 1]],
        )
        told = [skip for skip in skips if skip.end >= begins and skip.begin <= ends]
        yield Era(part, [*faults, *(Fault(seek.begin, seek.end) for seek in seeks)], told, number == len(cuts))
