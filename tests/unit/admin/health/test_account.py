"""What became of each record: a history is made, then found from what Kafka and the audit would hold of it."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.admin.health.account import FATES, NO_DEAD_LETTER, NO_DELIVERY, Evidence, account
from headrace.delivery.offset_map import OffsetMap

LOST, FAILED, REMOVED, EARLY, OTHER = "lost", "failed", "no record", "before the audit", "dead letter of another record"
HISTORY = st.lists(st.sampled_from([*FATES, "retrying", LOST, FAILED, REMOVED, EARLY, OTHER]), max_size=60)


@given(HISTORY, st.booleans(), st.integers(0, 1000))
def test_each_record_has_one_fate_or_is_named(fates: list[str], audited: bool, base: int) -> None:
    """The sums are exact: offsets without a record are in none, and without events a commit counts as a delivery."""
    at = {fate: [base + n for n, one in enumerate(fates) if one == fate] for fate in {*fates}}
    of = lambda *names: [offset for name in names for offset in at.get(name, ())]  # noqa: E731
    waiting, end = of("waiting"), base + len(fates)
    committed = min(waiting, default=end)
    found = account(
        Evidence(
            records={base + n: 10 if one == EARLY else 50 for n, one in enumerate(fates) if one != REMOVED},
            committed=committed,
            offset_map=OffsetMap(committed, end, frozenset(waiting)),
            dead_letters=dict.fromkeys(of("dead-lettered"), 50) | dict.fromkeys(of(OTHER), 7),
            retrying=dict.fromkeys(of("retrying"), 50),
            skipped=of("skipped"),
            failed=of(FAILED),
            delivered=[(offset, offset) for offset in of("delivered", OTHER)] if audited else [],
            audited_since=20 if audited else None,
        )
    )
    expected = Counter(fates)
    lost = of(LOST) if audited else []
    assert found.unaccounted == dict.fromkeys(of(FAILED), NO_DEAD_LETTER) | dict.fromkeys(lost, NO_DELIVERY)
    assert {fate: found.counts[fate] for fate in FATES[1:3]} == {fate: expected[fate] for fate in FATES[1:3]}
    assert found.counts["waiting"] == len(waiting) + expected["retrying"]
    assert found.records == len(fates) - expected[REMOVED]
    assert found.by_commit == len(of(EARLY)) + (0 if audited else len(of("delivered", OTHER, LOST)))
