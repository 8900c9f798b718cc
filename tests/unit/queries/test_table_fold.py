"""A table equals the fold of its topic, whatever comes in its records and whenever its process ends."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config.kafka import SchemaRegistryConfig
from headrace.errors import ConfigError
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.records import RecordBatch, TopicPartition
from headrace_devkit.testing import MakeTopic, ManualClock
from headrace_queries.columns import Column, declared
from headrace_queries.engine.database import open_database
from headrace_queries.engine.decoding import Decoder
from headrace_queries.engine.table_file import TableFile
from headrace_queries.query_sections import QuerySections

PARTITIONS = 3
SCHEMA = "item STRING, n BIGINT"
HEADERS = [("source", b"\x00\xff"), ("empty", None)]
GOOD: list[tuple[bytes, tuple[str | None, int | None]]] = [
    (b'{"item": "a", "n": 1}', ("a", 1)),
    (b'{"n": -9223372036854775808, "item": "\\u0000\\u00e4", "more": [1]}', ("\0\u00e4", -(2**63))),
    (b'{"item": null}', (None, None)),
    (b" {\n} ", (None, None)),
]
BAD = [b"", b"nope", b"\xff\xfe", b"[]", b"null", b'"text"', b'{"n": "x"}', b'{"n": 9223372036854775808}', b'{"n": 1']
KEYS = ["a", "b", "", "\u00e4 '\""]

Written = tuple[bytes | None, bytes | None]
"""Key and value."""


def records_of(partition: int) -> st.SearchStrategy[list[Written]]:
    """Return records whose keys are in no other partition, as Kafka has them."""
    keys = st.sampled_from([*(f"{partition}{key}".encode() for key in KEYS), None, b"\xff"])
    values = st.sampled_from([*(text for text, _ in GOOD), *BAD]) | st.none()
    return st.lists(st.tuples(keys, values), max_size=12)


class Broken(Mapping[int, int]):
    """Positions that fail when they are written, which is the last thing of a transaction."""

    def __getitem__(self, key: int) -> int:
        raise OSError

    def __iter__(self) -> Iterator[int]:
        raise OSError

    def __len__(self) -> int:
        return 1


class Kept:
    """A table in a folder, opened as the engine does."""

    def __init__(self, folder: Path, kind: str, schema: str = SCHEMA, **more: Any) -> None:
        table = {"topic": "t", "kind": kind, "schema": schema, **more}
        settings = {"kafka": {"bootstrap_servers": "h:1"}, "state_dir": str(folder), "tables": {"stock": table}}
        self.config = QuerySections.model_validate(settings)
        self.connection, paths = open_database(self.config)
        self._table = self.config.tables["stock"]
        self.file = TableFile(self.connection.cursor(), "stock", self._table, paths["stock"])
        codecs = Codecs(SchemaRegistry(SchemaRegistryConfig(), ManualClock()))
        self._decoder = Decoder(self._table.key_format, self._table.value_format, codecs)

    def open(self) -> Kept:
        assert self._table.value_schema
        self.file.open(declared(self._table.value_schema))
        return self

    def apply(self, batches: list[RecordBatch], positions: Mapping[int, int] | None = None) -> None:
        ends = {batch.topic_partition.partition: batch.offsets[-1] + 1 for batch in batches}
        self.file.apply(self._decoder.to_arrow(batches), ends if positions is None else positions)

    def rows(self, columns: str = 'key, item, n, partition, "offset", epoch_ms(timestamp), headers') -> list[Any]:
        return self.connection.cursor().execute(f'SELECT {columns} FROM stock ORDER BY partition, "offset"').fetchall()


def batch(partition: int, first: int, records: list[Written]) -> RecordBatch:
    offsets = list(range(first, first + len(records)))
    keys, values = [key for key, _ in records], [value for _, value in records]
    headers = [HEADERS if offset % 2 else None for offset in offsets]
    return RecordBatch(
        TopicPartition("t", partition), offsets, [1000 + o for o in offsets], keys, values, headers, [9] * len(keys)
    )


def folded(kind: str, topic: list[list[Written]]) -> tuple[list[Any], int]:
    """Return the rows that a table must have, and the number of corrupt records."""
    good = dict(GOOD)
    rows: dict[Any, Any] = {}
    corrupt = 0
    for partition, records in enumerate(topic):
        for offset, (key, value) in enumerate(records):
            if key == b"\xff" or value in BAD or (kind == "latest" and key is None):
                corrupt += 1
                continue
            place = key if kind == "latest" else (partition, offset)
            text = None if key is None else key.decode()
            headers = [{"key": name, "value": data} for name, data in HEADERS] if offset % 2 else None
            cells = (None, None) if value is None else good[value]
            rows[place] = (text, *cells, partition, offset, 1000 + offset, headers)
            if kind == "latest" and value is None:
                del rows[place]
    return sorted(rows.values(), key=lambda row: row[3:5]), corrupt


@settings(max_examples=settings().max_examples // 4)  # each makes files
@given(
    kind=st.sampled_from(["latest", "log"]),
    topic=st.tuples(*map(records_of, range(PARTITIONS))),
    steps=st.lists(
        st.tuples(st.sampled_from(["read", "fail", "crash"]), *[st.integers(0, 5)] * PARTITIONS), max_size=8
    ),
)
def test_a_table_is_the_fold_of_its_topic(
    kind: str, topic: MakeTopic, steps: list[tuple[str, *tuple[int, ...]]]
) -> None:
    """Batches of any size, failed transactions, and copies of the files in place of a process that ended."""
    with contextlib.ExitStack() as stack:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(len(steps) + 1)]
        kept = Kept(folders.pop(), kind).open()
        for what, *counts in [*steps, ("read", *[99] * PARTITIONS)]:
            if what == "crash":
                folder = folders.pop()
                shutil.copytree(kept.config.state_dir, folder, dirs_exist_ok=True)
                kept.connection.close()
                kept = Kept(folder, kind)
                assert kept.file.open_again(), "its columns are known without Kafka"
                kept.open()
            at = kept.file.positions()
            parts = [(p, at.get(p, 0), topic[p][at.get(p, 0) :][:count]) for p, count in enumerate(counts)]
            batches = [batch(*part) for part in parts if part[2]]
            if what == "fail" and batches:
                with pytest.raises(OSError):
                    kept.apply(batches, Broken())
            elif what == "read" and batches:
                kept.apply(batches)
        rows, corrupt = folded(kind, list(topic))
        assert kept.rows() == rows
        assert kept.file.rows == len(rows)
        assert kept.file.corrupt.count == corrupt
        assert kept.file.positions() == {p: len(records) for p, records in enumerate(topic) if records}
        kept.connection.close()


@pytest.mark.parametrize("read", ["used_bytes", "topic_id"])
def test_a_push_query_reads_rows_behind_anything_that_the_feed_has_read(tmp_path: Path, read: str) -> None:
    """The feed and the push queries that begin share a connection, and a call of one comes behind any of the other."""
    kept = Kept(tmp_path, "log").open()
    kept.apply([batch(0, 0, [(b"k", GOOD[0][0])])])
    kept.file.keep_topic_id("id")
    getattr(kept.file, read)
    assert kept.file.rows_between(0, 0, 1).to_arrow_reader(10).read_all().num_rows == 1
    kept.connection.close()


def test_added_columns_are_taken_up_and_other_changes_are_refused(tmp_path: Path) -> None:
    """A new column is null in rows from before; the refusal names what changed and both ways out."""
    kept = Kept(tmp_path, "log").open()
    kept.apply([batch(0, 0, [(b"k", GOOD[0][0])])])
    kept.connection.close()
    kept = Kept(tmp_path, "log", "more STRING, item STRING, n BIGINT").open()
    kept.apply([batch(0, 1, [(b"k", b'{"item": "b", "n": 2, "more": "x"}')])])
    assert kept.rows("more, item, n") == [(None, "a", 1), ("x", "b", 2)]
    kept.connection.close()
    changes: list[tuple[dict[str, str], str]] = [
        ({"schema": SCHEMA}, "column more is not in the schema any more"),
        ({"schema": "more STRING, item STRING, n STRING"}, "column n was BIGINT, and is TEXT now"),
        ({"schema": SCHEMA, "topic": "u"}, "topic was t, and is u now"),
    ]
    for change, says in changes:
        kept = Kept(tmp_path, **{"kind": "log", **change})
        with pytest.raises(ConfigError) as refused:
            kept.open()
        assert refused.value.description.startswith(says)
        assert "revert that, or build the table from its topic again (headrace tables rebuild stock)" in str(
            refused.value
        )
        kept.connection.close()
    kept = Kept(tmp_path, "latest")
    kept.file.rebuild()
    assert not kept.file.open_again()
    assert kept.open().rows("n") == []
    assert kept.file.positions() == {}
    kept.connection.close()


def test_a_type_that_cannot_be_read_is_refused_and_a_failed_transaction_has_its_reason(tmp_path: Path) -> None:
    """Not only that it has failed."""
    with pytest.raises(ConfigError, match=r"column n cannot have type VARIANT: .*Use another type"):
        Kept(tmp_path / "refused", "log", "item STRING, n VARIANT").open()
    kept = Kept(tmp_path, "log").open()
    kept.file.columns.values[1] = Column("n", "VARIANT")
    with pytest.raises(duckdb.NotImplementedException):
        kept.apply([batch(0, 0, [(b"k", GOOD[0][0])])])
    kept.connection.close()


def test_a_process_that_ends_while_it_makes_a_table_makes_it_at_its_next_start(tmp_path: Path) -> None:
    """At every statement of the way."""
    texts = ["{}", json.dumps({"item": "b"})]
    for end in range(1, 40):
        folder = tmp_path / str(end)
        kept = Kept(folder, "latest")
        kept.file.connection = Ending(kept.file.connection, end)  # type: ignore[assignment]
        with contextlib.suppress(KeyboardInterrupt):
            kept.open()
            assert end > 5
            return
        shutil.copytree(folder, folder / "copy")
        kept.connection.close()
        again = Kept(folder / "copy", "latest").open()
        again.apply([batch(0, 0, [(b"k", text.encode()) for text in texts])])
        assert again.rows("item") == [("b",)]
        again.connection.close()
    raise AssertionError("the table was not made")


class Ending:
    """A connection whose process ends before a statement."""

    def __init__(self, connection: Any, left: int) -> None:
        self._connection, self._left = connection, left

    def execute(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left <= 0:
            raise KeyboardInterrupt
        return self._connection.execute(*arguments)


def test_a_column_has_any_name(tmp_path: Path) -> None:
    """Names that the engine has for records of a batch are those of columns too."""
    kept = Kept(tmp_path, "latest", "seq INT, problem STRING, gone BOOLEAN, bad BOOLEAN").open()
    kept.apply([batch(0, 0, [(b"a", b'{"seq": 9, "problem": "x", "gone": true, "bad": true}')] * 2)])
    assert kept.rows("seq, problem, gone, bad") == [(9, "x", True, True)]
    assert kept.file.corrupt.count == 0
