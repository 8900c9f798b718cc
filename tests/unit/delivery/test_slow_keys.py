"""Which keys are taken for slow, and which no longer."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from headrace.delivery.backlog import ALONE, FEW, SLOW, SlowKeys


def named(keys: Iterable[int]) -> list[bytes | None]:
    return [b"%d" % key for key in keys]


@pytest.fixture
def keys() -> SlowKeys:
    known = SlowKeys(100)
    known.learn(named(range(100)), 0.001)
    return known


def test_a_slow_key_is_encircled(keys: SlowKeys) -> None:
    """From a slow delivery to a few of it, to one alone; whoever was in a fast one meanwhile is not it."""
    keys.learn(named(range(100)), 0.1)
    assert set(keys.marks.values()) == {FEW}
    assert keys.full_records(FEW) == 12
    for first in range(0, 96, 12):
        keys.learn(named(range(first, first + 12)), 0.1 if first == 48 else 0.001)
    keys.learn(named(range(96, 100)), 0.001)
    assert set(keys.marks) == {b"%d" % key for key in range(48, 60)}
    assert set(keys.marks.values()) == {ALONE}
    assert keys.full_records(ALONE) == 1
    keys.learn(named([48]), 0.001)
    for key in range(48, 60):
        keys.learn(named([key]), 0.1 if key == 50 else 0.001)
    assert keys.marks == {b"50": SLOW}
    assert keys.full_records(SLOW) == 100


def test_a_key_that_is_fast_again_is_like_the_others(keys: SlowKeys) -> None:
    """A fast delivery of slow keys clears all of them."""
    keys.learn(named([1]), 0.001)
    keys.learn(named([1]), 0.1)
    assert keys.marks == {b"1": SLOW}
    keys.learn(named([1]), 0.1)
    assert keys.marks == {b"1": SLOW}
    keys.learn(named([1]), 0.001)
    assert keys.marks == {}


def test_when_all_take_long_some_smaller_ones_are_looked_at() -> None:
    """They tell whether it is the size, or a key that is in each of the larger ones."""
    keys = SlowKeys(100)
    assert {keys.next_records() for _ in range(100)} == {100}
    keys.learn(named(range(100)), 0.1)
    assert keys.marks == {}
    assert sorted({keys.next_records() for _ in range(100)}) == [12, 100]
    keys.learn(named(range(12)), 0.012)
    keys.learn(named(range(100)), 0.1)
    assert keys.marks == {}
    keys.learn(named(range(12)), 0.001)
    keys.learn(named(range(100)), 0.1)
    assert set(keys.marks.values()) == {FEW}


def test_few_keys_are_tried_at_a_time() -> None:
    """However many slow deliveries there are, most deliveries stay full; records without key are never marked."""
    keys = SlowKeys(100)
    keys.learn(named(range(100)), 0.001)
    keys.learn([None] * 100, 0.1)
    assert keys.marks == {}
    for first in range(0, 5000, 100):
        keys.learn(named(range(first, first + 100)), 0.1)
    assert len(keys.marks) == 1000
