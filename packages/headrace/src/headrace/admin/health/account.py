"""What became of each record of a window: arithmetic on what Kafka and the audit hold, without I/O."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Literal, NamedTuple

from headrace.delivery.offset_map import OffsetMap

Fate = Literal["delivered", "dead-lettered", "skipped", "waiting"]
FATES: Final[Sequence[Fate]] = ("delivered", "dead-lettered", "skipped", "waiting")
NO_DEAD_LETTER: Final = "the audit has its failure, and no dead letter of it is there"
NO_DELIVERY: Final = "its offset is committed, and the audit has no delivery of it"


class Evidence(NamedTuple):
    """What is known of the records of one partition. A time is that of the record, in ms since the epoch."""

    records: Mapping[int, int]
    """Offset to time of each record in the window. Other offsets hold no record: markers of transactions, aborted
    records, and what compaction or retention has removed."""
    committed: int
    """The next offset of the group after a restart."""
    offset_map: OffsetMap | None
    """Which offsets above it are completed."""
    dead_letters: Mapping[int, int]
    """Offset and time in the origins of dead letters."""
    retrying: Mapping[int, int]
    """The same of records that wait in retry topics."""
    skipped: Collection[int] = ()
    """Offsets that the audit shows as skipped, or dropped by a policy."""
    failed: Collection[int] = ()
    """Offsets of other failures in the audit."""
    delivered: Sequence[tuple[int, int]] = ()
    """Ranges of offsets whose delivery is in the audit: first and last one."""
    audited_since: int | None = None
    """Records from this time on have their delivery in the audit; None if it has no deliveries."""


class Account(NamedTuple):
    """What became of the records of one partition."""

    counts: Mapping[Fate, int]
    by_commit: int
    """How many of the delivered ones only the committed offset shows as delivered."""
    unaccounted: Mapping[int, str]
    """Offsets of records that are in no count, and why."""

    @property
    def records(self) -> int:
        return sum(self.counts.values()) + len(self.unaccounted)


def account(evidence: Evidence) -> Account:
    """Return what became of each record: one fate, or a reason why it has none."""
    counts: Counter[Fate] = Counter(dict.fromkeys(FATES, 0))
    by_commit, unaccounted, ranges = 0, dict[int, str](), _merged(evidence.delivered)
    firsts = [first for first, _ in ranges]
    completed = evidence.offset_map.has if evidence.offset_map else lambda offset: False
    for offset, time in evidence.records.items():
        if evidence.dead_letters.get(offset) == time:
            counts["dead-lettered"] += 1
        elif evidence.retrying.get(offset) == time:
            counts["waiting"] += 1
        elif offset in evidence.skipped:
            counts["skipped"] += 1
        elif offset >= evidence.committed and not completed(offset):
            counts["waiting"] += 1
        elif offset in evidence.failed:
            unaccounted[offset] = NO_DEAD_LETTER
        elif (index := bisect_right(firsts, offset)) and offset <= ranges[index - 1][1]:
            counts["delivered"] += 1
        elif evidence.audited_since is None or time < evidence.audited_since:
            counts["delivered"] += 1
            by_commit += 1
        else:
            unaccounted[offset] = NO_DELIVERY
    return Account(counts, by_commit, unaccounted)


def _merged(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return merged
