"""Batches in tables of a real PostgreSQL: written once, merged by key, and refused with the reason."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest

from headrace.errors import PipelineInvalid, SinkUnavailable
from headrace_pipelines.driver.postgres import PostgresBatches
from headrace_pipelines.sinks.changes import DELETED, SEQUENCE
from headrace_pipelines.sinks.postgres_sink import PostgresSink
from tests.postgres_server import PostgresServer, postgres_server
from yaml_table import table

NAMES = itertools.count(1)
Batches = Callable[..., PostgresBatches]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture
def name(server: PostgresServer) -> str:
    """The name of a new table."""
    made = f"t{next(NAMES)}"
    server.execute(f'CREATE TABLE {made} (id int PRIMARY KEY, name text, "at" timestamptz, more jsonb, extra int)')
    return made


def rows(**columns: list[str | None]) -> Any:
    return pyarrow.table(columns)


@pytest.fixture
def batches(server: PostgresServer, name: str) -> Iterator[Batches]:
    """Make targets with these keys for the new table or another one, which are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(*keys: str, table: str = name, **more: Any) -> PostgresBatches:
            changes = {key: more.pop(key) for key in ("sequence_by", "apply_as_deletes") if key in more}
            sink = PostgresSink.model_validate(server.sink(table, *keys, **more) | changes)
            flow: Any = SimpleNamespace(group="headrace.p.f")
            made: PostgresBatches = sink.target(flow, table)
            stack.callback(made.close)
            return made

        yield make


@pytest.fixture
def target(batches: Batches) -> PostgresBatches:
    """The new table by `id`, opened."""
    made = batches("id")
    made.open()
    return made


def test_rows_replace_those_with_their_key(server: PostgresServer, batches: Batches, name: str) -> None:
    """Of two rows with a key the last counts; nulls, empty texts and quotes stay what they are."""
    target = batches("id")
    assert target.open() is None
    texts = ['a "quoted", b', "", None, "old", "new"]
    target.write(0, rows(id=["1", "2", "3", "4", "4"], name=texts, more=['{"a": [1]}', None, None, None, None]))
    target.write(1, rows(id=["1"], name=["changed"], at=["2026-01-01 10:00:00"]))
    target.write(2, rows(id=[], name=[]))
    assert server.execute(f'SELECT id, name, more, extract(epoch FROM "at")::int FROM {name} ORDER BY id') == [
        (1, "changed", {"a": [1]}, 1767261600),
        (2, "", None, None),
        (3, None, None, None),
        (4, "new", None, None),
    ]
    assert batches("id").open() == 3


def test_a_predecessor_is_waited_for_or_kept_out(server: PostgresServer, batches: Batches, name: str) -> None:
    """Two processes with one query never both write a number: the second waits for the first, and then refuses."""
    first, second = batches("id"), batches("id")
    for target in (first, second):
        target.open()
    first.write(0, rows(id=["1"]))
    with pytest.raises((SinkUnavailable, PipelineInvalid)):
        second.write(0, rows(id=["2"]))
    assert second.open() == 1
    server.execute(
        f"CREATE OR REPLACE FUNCTION slow() RETURNS trigger AS $$ BEGIN PERFORM pg_sleep(2); RETURN NEW; END $$ "
        f"LANGUAGE plpgsql; CREATE TRIGGER slow BEFORE INSERT ON {name} FOR EACH ROW EXECUTE FUNCTION slow()"
    )
    writing = threading.Thread(target=first.write, args=(1, rows(id=["3"])))
    writing.start()
    time.sleep(0.5)
    assert second.open() == 2
    writing.join()
    with pytest.raises(SinkUnavailable, match="another process also writes the batches"):
        first.open()
        second.write(2, rows(id=[]))
        first.write(2, rows(id=[]))
    assert server.execute(f"SELECT id FROM {name} ORDER BY id") == [(1,), (3,)]


@pytest.mark.parametrize(("columns", "keys", "text"), table(__file__, "what_does_not_fit_is_named_without_values"))
def test_what_does_not_fit_is_named_without_values(
    batches: Batches, columns: dict[str, list[str | None]], keys: list[str], text: str
) -> None:
    """The table's own words hold values of records, so they are left out."""
    target = batches(*keys)
    target.open()
    with pytest.raises(PipelineInvalid, match=text) as refused:
        target.write(0, rows(**columns))
    assert "x1" not in refused.value.description
    assert refused.value.__cause__ is None


def test_flows_that_begin_together_create_the_table_of_numbers_once(server: PostgresServer, batches: Batches) -> None:
    """Each of them looks for it, and finds none."""
    for _ in range(10):
        server.execute("DROP TABLE IF EXISTS _headrace_batches")
        targets, begin = [batches("id") for _ in range(6)], threading.Barrier(6)

        def open_together(target: PostgresBatches, begin: threading.Barrier = begin) -> int | None:
            begin.wait()
            return target.open()

        with ThreadPoolExecutor(6) as pool:
            assert [*pool.map(open_together, targets)] == [None] * 6
        for target in targets:
            target.close()


def test_a_missing_table_and_a_missing_right_are_named(server: PostgresServer, batches: Batches, name: str) -> None:
    """The right comes with the statement that grants it."""
    nowhere = batches("id", table="nowhere")
    nowhere.open()
    with pytest.raises(PipelineInvalid, match=r'127.0.0.1:\d+, database postgres: relation "nowhere" does not exist'):
        nowhere.write(0, rows(id=["1"]))
    server.execute("CREATE ROLE poor LOGIN PASSWORD 'p'; GRANT SELECT ON ALL TABLES IN SCHEMA public TO poor")
    rights = rf"GRANT SELECT, INSERT, UPDATE ON {name}, _headrace_batches TO poor"
    for password, text in (("p", rights), ("wrong", "password authentication failed")):
        with pytest.raises(SinkUnavailable, match=text):
            batches("id", user="poor", password=password).open()
    rights = rf"GRANT SELECT, INSERT, UPDATE, DELETE ON {name}, _headrace_batches, _headrace_sequences TO poor"
    with pytest.raises(SinkUnavailable, match=rights):
        batches("id", user="poor", password="p", sequence_by="at").open()


def test_a_server_that_is_down_is_waited_for(server: PostgresServer, target: PostgresBatches, name: str) -> None:
    """The error can go away; after it a batch that was cut is written once."""
    target.write(0, rows(id=["1"]))
    server.stop()
    try:
        with pytest.raises(SinkUnavailable, match="PostgreSQL 127"):
            target.write(1, rows(id=["2"]))
        with pytest.raises(SinkUnavailable):
            target.open()
    finally:
        server.start()
    assert target.open() == 1
    target.write(1, rows(id=["2"]))
    assert server.execute(f"SELECT id FROM {name} ORDER BY id") == [(1,), (2,)]


def changes(*rows: tuple[int, int, str | None]) -> Any:
    """Return changes of an id with a sequence: a new name, or None for a delete."""
    columns = zip(*((str(id_), f"1{at:04}", name, str(name is None).lower()) for id_, at, name in rows), strict=True)
    return pyarrow.table(dict(zip(("id", SEQUENCE, "name", DELETED), map(list, columns), strict=True)))


def test_late_changes_lose_in_any_order_of_batches(server: PostgresServer, batches: Batches, name: str) -> None:
    """Two flows write shuffled changes into one table, by two names: its newest change decides about each key."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    chance = random.Random(seed)
    history = [(chance.randrange(8), at, chance.choice([None, f"n{at}"])) for at in range(300)]
    newest = {id_: text for id_, _, text in history}
    chance.shuffle(history)
    tables = (name, f"public.{name}")
    targets = [batches("id", table=table, sequence_by="at", apply_as_deletes="gone") for table in tables]
    for number, target in enumerate(targets):
        target._query += str(number)
        target.open()
    numbers = [itertools.count(), itertools.count()]
    while history:
        which = chance.randrange(2)
        part = [history.pop() for _ in range(min(len(history), chance.randrange(1, 30)))]
        targets[which].write(next(numbers[which]), changes(*part))
    kept = {id_: text for id_, text in newest.items() if text}
    assert dict(server.execute(f"SELECT id, name FROM {name}")) == kept
    assert len(server.execute(f"SELECT key FROM _headrace_sequences WHERE target = '{name} by at'")) == len(newest)


def test_of_equal_sequences_the_later_row_counts(server: PostgresServer, batches: Batches, name: str) -> None:
    """Also in a later batch, and for a delete. Without a sequence the later batch counts."""
    target = batches("id", sequence_by="at", apply_as_deletes="gone")
    target.open()
    target.write(0, changes((1, 5, "a"), (1, 5, "b"), (2, 5, None), (2, 5, "c"), (3, 5, "d")))
    target.write(1, changes((2, 5, "e"), (3, 5, None), (1, 4, None), (1, 4, "late")))
    assert server.execute(f"SELECT id, name FROM {name} ORDER BY id") == [(1, "b"), (2, "e")]
    plain = batches("id", apply_as_deletes="gone")
    plain.open()
    plain.write(2, changes((1, 0, None), (4, 0, "f"), (2, 0, None), (2, 0, "g")))
    assert server.execute(f"SELECT id, name FROM {name} ORDER BY id") == [(2, "g"), (4, "f")]
