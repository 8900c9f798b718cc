"""The table of offsets beside results, on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

import pytest

from headrace.client import OffsetStore
from headrace.errors import Fenced

PLACE = ("g", "t", 0)


@pytest.fixture
def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    yield connection
    connection.close()


@pytest.fixture
def store(database: sqlite3.Connection) -> OffsetStore:
    store = OffsetStore(database)
    store.create()
    store.create()
    database.commit()
    return store


def test_a_record_is_new_once(store: OffsetStore) -> None:
    """And what lies before it is done; partitions, topics and groups are apart."""
    assert store.take(*PLACE, epoch=1) is None
    assert [store.advance(*PLACE, offset, 1) for offset in (3, 3, 2, 7)] == [True, False, False, True]
    assert store.take(*PLACE, epoch=2) == 8
    assert store.advance("g", "t", 1, 3, 1)
    assert store.advance("g", "u", 0, 3, 1)
    assert store.advance("h", "t", 0, 3, 1)


def test_a_later_assignment_ends_the_earlier_one(store: OffsetStore) -> None:
    """Whoever is late writes nothing and takes nothing, whatever offset it has; the later one is not disturbed."""
    store.take(*PLACE, epoch=5)
    assert store.advance(*PLACE, 1, 5)
    assert store.take(*PLACE, epoch=6) == 2
    for offset in (1, 2, 9):
        with pytest.raises(Fenced, match="assignment 5 has ended, and 6 has started"):
            store.advance(*PLACE, offset, 5)
    with pytest.raises(Fenced):
        store.take(*PLACE, epoch=5)
    assert store.take(*PLACE, epoch=6) == 2
    assert store.advance(*PLACE, 2, 6)


def test_a_delivery_without_an_epoch_moves_no_assignment(store: OffsetStore) -> None:
    """What a replay brings once more is done already, and what is still to come is the assignment's."""
    store.take(*PLACE, epoch=5)
    with pytest.raises(Fenced, match="the delivery belongs to no assignment, and 5 has started"):
        store.advance(*PLACE, 1)
    assert store.advance(*PLACE, 1, 5)
    assert not store.advance(*PLACE, 1)
    with pytest.raises(Fenced):
        store.advance(*PLACE, 2, None)
    assert store.take(*PLACE, epoch=5) == 2


def test_a_transaction_that_is_rolled_back_moves_nothing(store: OffsetStore, database: sqlite3.Connection) -> None:
    """The offset goes with the results."""
    store.take(*PLACE, epoch=1)
    database.commit()
    assert store.advance(*PLACE, 0, 1)
    database.rollback()
    assert store.take(*PLACE, epoch=1) is None
    assert store.advance(*PLACE, 0, 1)
