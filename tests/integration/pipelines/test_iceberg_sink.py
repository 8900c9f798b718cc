"""Batches in tables of Iceberg: written once beside other writers, refused with the reason, read by another engine."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow
import pytest
from pyiceberg.catalog import load_catalog
from pyiceberg.table import Table

from headrace.errors import HeadraceError, PipelineInvalid, SinkUnavailable
from headrace_pipelines.sinks.iceberg_batches import IcebergBatches
from tests.postgres_server import PASSWORD, PostgresServer, postgres_server

NAMES = itertools.count(1)
Batches = Callable[..., IcebergBatches]


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with postgres_server() as running:
        yield running


@pytest.fixture
def catalog(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """A catalog in SQLite, or in PostgreSQL if a test says so."""
    uri = f"sqlite:///{tmp_path}/catalog.db"
    if getattr(request, "param", "") == "postgres":
        port = request.getfixturevalue("server").port
        uri = f"postgresql+psycopg://app:{PASSWORD}@127.0.0.1:{port}/postgres"
    return {"type": "sql", "uri": uri, "warehouse": f"file://{tmp_path}/lake", "name": f"c{next(NAMES)}"}


@pytest.fixture
def batches(catalog: dict[str, str]) -> Iterator[Batches]:
    """Make targets for one table: two with one query are two drivers with copies of one checkpoint."""

    with contextlib.ExitStack() as stack:

        def make(query: str = "q", flow: str = "f", **more: str) -> IcebergBatches:
            made = IcebergBatches({**catalog, **more}, "lake.events", [], f"headrace.p.{flow}", query)
            stack.callback(made.close)
            return made

        yield make


@contextlib.contextmanager
def table_of(catalog: Mapping[str, str]) -> Iterator[Table]:
    with load_catalog(catalog["name"], **{k: v for k, v in catalog.items() if k != "name"}) as opened:
        yield opened.load_table("lake.events")


def ids(*values: int, **more: Any) -> pyarrow.Table:
    return pyarrow.table({"id": pyarrow.array(values, pyarrow.int64()), **more})


def read(catalog: Mapping[str, str]) -> list[int]:
    """Return the ids, by an engine that wrote none of the files."""
    with table_of(catalog) as table:
        files = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
    return sorted(row[0] for row in duckdb.sql(f"SELECT id FROM read_parquet({files})").fetchall()) if files else []


@pytest.mark.parametrize("catalog", ["sqlite", "postgres"], indirect=True)
def test_writers_of_one_table_keep_each_their_number(batches: Batches, catalog: dict[str, str]) -> None:
    """Three flows write at once, and another writer between them; each row is there once."""

    targets = [batches("q", f"f{flow}") for flow in range(3)]
    assert [target.open() for target in targets] == [None] * 3

    def write(flow: int) -> None:
        for number in range(4):
            targets[flow].write(number, ids(flow * 100 + number))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(write, range(3)))
    with table_of(catalog) as table:
        table.append(ids(1000))
    assert read(catalog) == sorted([*(flow * 100 + number for flow in range(3) for number in range(4)), 1000])
    assert [batches("q", f"f{flow}").open() for flow in range(3)] == [4] * 3


@pytest.mark.parametrize("catalog", ["sqlite", "postgres"], indirect=True)
def test_of_two_drivers_with_one_checkpoint_one_writes(batches: Batches, catalog: dict[str, str]) -> None:
    """Each batch is written by one of them, also when both commit at the same moment; the other one is refused."""
    both = [batches(), batches()]

    def attempt(target: IcebergBatches, number: int) -> str:
        try:
            target.write(number, ids(number), "d")
        except HeadraceError as cause:
            return cause.description
        return ""

    with ThreadPoolExecutor(2) as pool:
        for number in range(5):
            assert {target.open() for target in both} == {number or None}
            texts = list(pool.map(attempt, both, [number] * 2))
            assert sorted(map(bool, texts)) == [False, True]
            assert "another process also writes the batches" in "".join(texts)
    assert read(catalog) == list(range(5))


def test_the_number_outlives_snapshots_and_belongs_to_a_query(batches: Batches, catalog: dict[str, str]) -> None:
    """It is a property: what expires snapshots leaves it. Another checkpoint has another query, which has no number."""
    target = batches()
    target.open()
    for number in range(3):
        target.write(number, ids(number), "d")
    with table_of(catalog) as table:
        table.append(ids(99))
        table.maintenance.expire_snapshots().older_than(datetime.datetime.now()).commit()
        assert len(table.refresh().snapshots()) == 1
    again = batches()
    assert (again.open(), again.digest) == (3, "d")
    assert batches("another").open() is None
    with table_of(catalog) as table, table.transaction() as change:
        change.remove_properties("headrace.p.f.batch")
    assert again.open() is None


def test_columns_are_added_and_types_are_kept(batches: Batches, catalog: dict[str, str]) -> None:
    """New columns come with a batch. A type that does not fit is refused, and the number stays."""
    target = batches()
    target.open()
    day = datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC)
    first = ids(
        1,
        at=pyarrow.array([day], pyarrow.timestamp("us", "Europe/Berlin")),
        price=pyarrow.array([Decimal("1.50")], pyarrow.decimal128(38, 2)),
        tags=[["a", None]],
        more=[{"x": 1, "y": b"\0\xff"}],
        ratio=[float("nan")],
    )
    target.write(0, first)
    target.write(1, ids(2, name=["n"]))
    with pytest.raises(PipelineInvalid, match=r"lake\.events: .*name: string -> .*correct the flow's SQL"):
        target.write(2, ids(3, name=[1.5]))
    assert target.open() == 2
    with table_of(catalog) as table:
        rows = sorted(table.scan().to_arrow().to_pylist(), key=lambda row: row["id"])
    assert {**rows[0], "ratio": 0} == {**first.to_pylist()[0], "ratio": 0, "name": None}
    assert (rows[1]["name"], rows[1]["tags"]) == ("n", None)


def test_a_clock_that_was_set_back_is_waited_for(batches: Batches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines in Java reject a table whose snapshots are more than a minute out of order."""
    target, real = batches(), time.time
    target.open()
    target.write(0, ids(0))
    with monkeypatch.context() as patch, pytest.raises(SinkUnavailable, match="correct the clock"):
        patch.setattr(time, "time", lambda: real() - 90)
        target.write(1, ids(1))
    target.write(1, ids(1))


def test_an_error_names_the_catalog_without_its_secrets(batches: Batches) -> None:
    """One that cannot be reached is tried again."""
    uri = f"postgresql+psycopg://app:{PASSWORD}@127.0.0.1:1/postgres"
    for more, kind in (({"uri": uri}, SinkUnavailable), ({"pool_pre_ping": PASSWORD}, PipelineInvalid)):
        with pytest.raises(kind, match=r"Iceberg table lake\.events: ") as raised:
            batches(**more).open()
        assert PASSWORD not in raised.value.description
    for length in range(480, 500):  # near the end of the longest text
        text = batches(uri=uri)._without_secrets(ValueError(f"{'a' * length} {PASSWORD}"))
        assert PASSWORD[:4] not in text
