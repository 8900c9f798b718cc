"""Batches in a Delta table: written once, fenced, with new columns and few files. No process and no Spark."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pytest
from deltalake import DeltaTable, write_deltalake

from headrace.errors import PipelineInvalid, SinkUnavailable
from headrace_pipelines.sinks import delta_batches
from headrace_pipelines.sinks.changes import DELETED, SEQUENCE
from headrace_pipelines.sinks.delta_batches import DeltaBatches
from headrace_pipelines.sinks.delta_sink import DeltaSink

ONE, TWO = "00ff00ff00ff00ff", "f0ff00ff00ff00ff"
Batches = Callable[..., DeltaBatches]
FLOW: Any = SimpleNamespace(group="headrace.p.f", path=str)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path / "table")


@pytest.fixture
def batches(folder: str) -> Batches:
    """Make targets of one query for one table."""
    return lambda **keys: DeltaSink.model_validate({"delta": folder, **keys}).target(FLOW, "q")


@pytest.fixture
def target(batches: Batches) -> DeltaBatches:
    made = batches()
    assert made.open() is None
    return made


def rows(*ids: Any, **columns: list[Any]) -> pyarrow.Table:
    return pyarrow.table({"id": [*ids], **columns})


def read(folder: str, *columns: str) -> list[Any]:
    """Return the rows as another program reads them: of one column its values."""
    found = DeltaTable(folder).to_pyarrow_table().select(columns or ["id"]).to_pylist()
    return sorted((tuple(row.values()) if columns else row["id"] for row in found), key=repr)


def test_values_are_the_same_for_another_reader(folder: str, batches: Batches) -> None:
    """Each type of Spark's Arrow tables, with nulls where Spark excludes them, because a later batch may have some."""
    inner = pyarrow.struct([pyarrow.field("x", pyarrow.int32(), nullable=False)])
    kinds: dict[str, tuple[pyarrow.DataType, Any]] = {
        "id": (pyarrow.int64(), 1),
        "text": (pyarrow.string(), "ä\x00'"),
        "raw": (pyarrow.binary(), b"\x00\xff"),
        "price": (pyarrow.decimal128(38, 10), Decimal("1.5000000000")),
        "at": (pyarrow.timestamp("us", tz="Europe/Berlin"), datetime(2026, 3, 29, 1, 30, 0, 1, tzinfo=UTC)),
        "local": (pyarrow.timestamp("us"), datetime(2026, 3, 29, 2, 30)),
        "day": (pyarrow.date32(), date(1, 1, 1)),
        "list": (pyarrow.list_(pyarrow.field("element", inner, nullable=False)), [{"x": 1}, {"x": 2}]),
        "map": (pyarrow.map_(pyarrow.string(), inner), [("k", {"x": 1})]),
        "part": (pyarrow.string(), "a b/c=%"),
    }
    fields = [pyarrow.field(name, kind, nullable=False) for name, (kind, _) in kinds.items()]
    row = {name: value for name, (_, value) in kinds.items()}
    first = batches(partition_by=["day", "part"], options={"delta.logRetentionDuration": "interval 2 days"})
    first.open()
    first.write(0, pyarrow.Table.from_pylist([row], pyarrow.schema(fields)))
    empty = dict.fromkeys(kinds)
    loose = pyarrow.schema([field.with_nullable(True) for field in fields])
    holes = {**empty, "list": [None, {"x": None}], "id": 2}
    inner = pyarrow.struct([pyarrow.field("x", pyarrow.int32())])
    loose = loose.set(loose.get_field_index("list"), pyarrow.field("list", pyarrow.list_(inner)))
    first.write(1, pyarrow.Table.from_pylist([holes, empty], loose))
    table = DeltaTable(folder)
    found = sorted(table.to_pyarrow_table().to_pylist(), key=lambda each: each["id"] or 9)
    assert [dict(sorted(each.items())) for each in found] == [
        dict(sorted(each.items())) for each in (row, holes, empty)
    ]
    assert table.metadata().partition_columns == ["day", "part"]
    assert table.metadata().configuration == {"delta.logRetentionDuration": "interval 2 days"}


def test_the_number_and_the_digest_are_in_the_commit_of_the_rows(folder: str, batches: Batches) -> None:
    """They are also found after checkpoints of the log, and among the commits of others."""
    target = batches(options={"delta.checkpointInterval": "3"})
    assert (target.open(), target.digest) == (None, "")
    for number in range(8):
        target.write(number, rows(number), (ONE, TWO)[number % 2])
        write_deltalake(folder, rows(100), mode="append")
    target.write(8, rows().cast(pyarrow.schema([("id", pyarrow.int64())])), ONE)
    again = batches()
    assert (again.open(), again.digest, len(read(folder))) == (9, ONE, 16)
    for file in Path(folder, "_delta_log").glob("*00[0-4].json"):
        file.unlink()  # as a cleaner of the log does; the newest checkpoint has what was there
    assert (again.open(), again.digest) == (9, ONE)
    again.write(9, rows(9), TWO)
    other = DeltaSink.model_validate({"delta": folder}).target(FLOW, "other")
    assert (other.open(), other.digest) == (None, "")


def test_of_two_processes_with_one_query_one_loses(folder: str, batches: Batches, target: DeltaBatches) -> None:
    """Both have opened the table: the second commit fails, also if it makes the table, and after others' commits."""
    for number in range(2):
        other = batches()
        other.open()
        if number:
            write_deltalake(folder, rows(100), mode="append")
        target.write(number, rows(number), ONE)
        with pytest.raises(SinkUnavailable, match=r"CommitFailedError|exists"):
            other.write(number, rows(number), TWO)
        assert (other.open(), other.digest) == (number + 1, ONE)
    assert read(folder) == [0, 1, 100]


def test_a_batch_of_another_process_that_was_read_meanwhile_is_not_written_again(
    folder: str, batches: Batches, target: DeltaBatches, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library reads new commits when it compacts, and the next commit would no longer conflict with them."""
    monkeypatch.setattr(delta_batches, "_MOST_SMALL_FILES", 2)
    target.write(0, rows(0))
    other, tidy = batches(), DeltaBatches._tidy

    def meanwhile(self: DeltaBatches) -> None:
        other.open()
        other.write(2, rows(2))
        tidy(self)

    monkeypatch.setattr(DeltaBatches, "_tidy", meanwhile)
    target.write(1, rows(1))
    with pytest.raises(SinkUnavailable, match="another process also writes"):
        target.write(2, rows(2))
    assert (target.open(), read(folder)) == (3, [0, 1, 2])


def test_columns_come_and_go_and_keep_their_type(folder: str, target: DeltaBatches) -> None:
    """A new one is null in older rows, one that is gone in newer rows; a type is never cast."""
    target.write(0, rows(1, name=["a"]))
    target.write(1, rows(2, extra=[1.5]))
    assert read(folder, "id", "name", "extra") == [(1, "a", None), (2, None, 1.5)]
    for changed, text in (
        (rows("3"), r"column id: the flow has string, and the table int64: cast it"),
        (rows(3).cast(pyarrow.schema([("id", pyarrow.int32())])), "int32, and the table int64"),
        (rows(3, NAME=["b"]), "name"),
        (rows(3, name=pyarrow.nulls(1)), "column name has no type: cast it"),
        (pyarrow.table({"count(1)": [1]}), r"column count\(1\) is not a valid name"),
        (rows(3, took=pyarrow.array([1], pyarrow.duration("us"))), "Duration"),
    ):
        with pytest.raises(PipelineInvalid, match=text):
            target.write(2, changed)
        assert target.open() == 2
    target.write(2, rows(3))
    assert read(folder) == [1, 2, 3]


def test_what_a_table_never_accepts_stops_the_flow(folder: str, target: DeltaBatches) -> None:
    """The error has no value of a row; the number stays."""
    target.write(0, rows(1))
    DeltaTable(folder).alter.add_constraint({"positive": "id > 0"})
    assert target.open() == 1
    for refused in (target, DeltaBatches(f"{folder}2", {"delta.nonsense": "1"}, [], [], "q")):
        with pytest.raises(PipelineInvalid, match=r"failed validation|property") as raised:
            refused.write(1, rows(-77))
        assert "77" not in raised.value.description
    assert (target.open(), read(folder)) == (1, [1])


def test_partitions_are_those_of_the_table(batches: Batches, target: DeltaBatches) -> None:
    """Delta cannot change them."""
    with pytest.raises(PipelineInvalid, match="partition_by names day, which the flow does not have"):
        batches(partition_by=["day"]).write(0, rows(1))
    target.write(0, rows(1, day=["a"]))
    for value in (Decimal("-0.5"), 1e300, b"a"):  # the library cannot read the first again, nor the table then
        with pytest.raises(PipelineInvalid, match="cast it to STRING"):
            batches(partition_by=["day"]).write(0, rows(1, day=[value]))
    other = batches(partition_by=["day"])
    other.open()
    with pytest.raises(PipelineInvalid, match=r"partitioned by no column: write sink.partition_by: \[\]"):
        other.write(1, rows(2, day=["a"]))


def test_changes_replace_and_delete_by_key_in_sequence(folder: str, batches: Batches) -> None:
    """An older row than the table's has no effect, and a batch without an effect is counted all the same."""
    target = batches(keys=["id", "Part"], partition_by=["Part"], sequence_by="seq", apply_as_deletes="gone")
    target.open()

    def change(number: int, *changes: tuple[int, str, bool], **columns: Any) -> None:
        ids, sequences, gone = zip(*changes, strict=True)
        hidden = {SEQUENCE: [*sequences], DELETED: [*gone], "Part": ["a"] * len(ids)}
        target.write(number, rows(*ids, **hidden, **columns), ONE)
        assert batches().open() == number + 1

    change(0, (1, "1", False), (2, "5", False), (3, "1", False), (9, "1", True), name=["one", "two", "three", "-"])
    change(1, (1, "2", False), (2, "4", False), (3, "2", True), (4, "1", False), name=["uno", "old", "-", "four"])
    change(2, (2, "4", True), (2, "3", False), (7, "1", True), name=["-", "old", "-"])
    write_deltalake(folder, rows(5, name=["of another"], Part=["a"]), mode="append", schema_mode="merge")
    with pytest.raises(SinkUnavailable):  # it may be the row that the merge looks for
        change(3, (5, "0", False), name=["five"])
    target.open()
    change(3, (5, "0", False), (6, "1", False), name=["five", "six"], extra=[1, 2])
    found = read(folder, "id", "name", "extra")
    assert found == [(1, "uno", None), (2, "two", None), (4, "four", None), (5, "five", 1), (6, "six", 2)]
    assert DELETED not in DeltaTable(folder).to_pyarrow_table().column_names


@pytest.mark.parametrize("partitioned", [False, True])
def test_small_files_are_compacted_and_removed_later(
    folder: str, batches: Batches, monkeypatch: pytest.MonkeyPatch, *, partitioned: bool
) -> None:
    """Between batches, beside an OPTIMIZE of another program; files go as `deletedFileRetentionDuration` says."""
    monkeypatch.setattr(delta_batches, "_MOST_SMALL_FILES", 4)
    target = batches(
        options={"delta.deletedFileRetentionDuration": "interval 0 seconds"},
        partition_by=["part"] if partitioned else [],
    )
    target.open()
    for number in range(14):
        if number in (5, 10):
            DeltaTable(folder).optimize.compact()
        target.write(number, rows(number, -number, part=["a", None]), ONE)
    assert len(read(folder)) == 28
    assert target.open() == 14
    parts = 2 if partitioned else 1
    assert len(DeltaTable(folder).file_uris()) <= 5 * parts
    monkeypatch.setattr(delta_batches, "_VACUUM_SECONDS", -1.0)
    for number in range(14, 18):
        target.write(number, rows(number, -number, part=["a", None]), ONE)
    assert len([*Path(folder).rglob("*.parquet")]) <= 8 * parts + 2


def test_files_of_others_below_the_folder_are_kept(
    folder: str, batches: Batches, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A vacuum would remove other tables, and all that is not the table's; it says which file is in its way."""
    monkeypatch.setattr(delta_batches, "_MOST_SMALL_FILES", 2)
    other = Path(folder, "orders")
    target = batches(options={"delta.deletedFileRetentionDuration": "interval 0 seconds"})
    target.open()
    target.write(0, rows(0))
    write_deltalake(str(other), rows(1))
    for number in range(1, 4):
        target.write(number, rows(number))
    assert (read(str(other)), read(folder)) == ([1], [0, 1, 2, 3])
    assert "files of others, such as orders/" in capsys.readouterr().err


def test_a_store_that_is_away_is_waited_for() -> None:
    """The error can go away, and quotes no option."""
    options = {"aws_endpoint": "http://127.0.0.1:1", "aws_allow_http": True, "max_retries": 0, "aws_region": "x"}
    login = {"aws_access_key_id": "id", "aws_secret_access_key": "hidden-s3cret"}
    uri = "s3://lake/orders"
    sink = DeltaSink.model_validate({"delta": uri, "options": {**options, **login}})
    with pytest.raises(SinkUnavailable, match=uri) as refused:
        sink.target(FLOW, "q").open()
    assert "s3cret" not in refused.value.description
