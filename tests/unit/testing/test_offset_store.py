"""The table of offsets beside results, on SQLite."""

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
