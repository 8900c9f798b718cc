"""One record decides about itself only: its outcome is the same alone and among others, wherever SQL reads it."""

from __future__ import annotations

import asyncio
import functools
import json
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.compute as pc
import pytest

from headrace.config.kafka import SchemaRegistryConfig
from headrace.formats.choice import Codecs
from headrace.formats.registry import SchemaRegistry
from headrace.records import Record, RecordBatch, TopicPartition
from headrace.runtime import SystemClock
from headrace_queries.columns import declared
from headrace_queries.engine.batch_rows import load_batch
from headrace_queries.engine.database import end_if_broken, open_database
from headrace_queries.engine.decoding import Decoder
from headrace_queries.engine.evaluations import Evaluations
from headrace_queries.engine.filter import Filters
from headrace_queries.engine.pull import Pulls, RowWriter
from headrace_queries.engine.push import Pushes
from headrace_queries.engine.statements import Statements
from headrace_queries.engine.table_feed import TableFeed
from headrace_queries.engine.table_file import TableFile
from headrace_queries.engine_protocol import Changes, Ended, Filter, Filtered, Lookup, PushBegun, Subscribe
from headrace_queries.push_statement import read_push
from headrace_queries.query_sections import QuerySections
from headrace_queries.record_filter import RecordFilter
from yaml_table import table

Written = tuple[bytes | None, bytes | None, int, Any]
"""Key, value, timestamp and headers."""
NOW = 1_700_000_000_000
GOOD: Written = (b'"good"', b'{"a": "g", "b": 7, "zone": "Europe/Berlin"}', NOW, None)
VALUE = b'{"a": "x", "b": 1}'
DEEP = b'{"a":' + b"[" * 5_000 + b"]" * 5_000 + b"}"
VALUES = [text.encode("utf-8", "surrogatepass") for name in ("fitting", "unfit") for text in table(__file__, name)]
KEYS = [b"plain", b'{"id": 1}', b"a\0b", b"\xff", None, b"", b"[" * 3_000 + b"]" * 3_000, b"1e999", b"\0\0\0\0"]
TIMES = [0, -1, NOW * 1_000, NOW * 1_000_000, 2**63 - 1, -(2**63), 253_402_300_800_000]
HEADERS: list[Any] = [[("h", None)], [("", b"")], [("h", b"1"), ("h", b"\xff")], [("h\0", b"1")], [("h", b"x")] * 1_000]
HOSTILE: list[Written] = [
    *((b'"k"', value, NOW, None) for value in [*VALUES, DEEP, b"\xff", b"x" * 100_000, None]),
    *((key, VALUE, NOW, None) for key in KEYS),
    *((b'"k"', VALUE, time, None) for time in TIMES),
    *((b'"k"', VALUE, NOW, headers) for headers in HEADERS),
]
AMONG = [record for hostile in HOSTILE for record in (hostile, GOOD)]
TABLES = {name: {"topic": "t", **settings} for name, settings in table(__file__, "tables").items()}
COUNT = len(AMONG)


class Kept:
    """Tables of a folder as the engine has them, without Kafka."""

    def __init__(self, folder: Path, tables: Mapping[str, Any], **sql: Any) -> None:
        settings = {"kafka": {"bootstrap_servers": "h:1"}, "state_dir": str(folder), "tables": tables, "sql": sql}
        self.config = QuerySections.model_validate(settings)
        self.connection, paths = open_database(self.config, lossless=True)
        self.codecs = Codecs(SchemaRegistry(SchemaRegistryConfig(), SystemClock()))
        self.statements = Statements(self.connection.cursor())
        self.evaluations = Evaluations("push queries", 256 << 20)
        self.files: dict[str, TableFile] = {}
        for name, config in self.config.tables.items():
            file = self.files[name] = TableFile(self.connection.cursor(), name, config, paths[name])
            file.open(declared(config.value_schema) if config.value_schema else None)

    def apply(self, name: str, first: int, records: list[Written]) -> None:
        config = self.config.tables[name]
        decoder = Decoder(config.key_format, config.value_format, self.codecs)
        self.files[name].apply(decoder.to_arrow([batch_of(first, records)]), {0: first + len(records)})

    def rows(self, name: str) -> list[bytes]:
        cursor = self.connection.cursor().execute(f'SELECT * FROM {name} ORDER BY "offset"')
        return RowWriter(cursor, "objects").texts(cursor.fetchall())

    def pushes(self, name: str, sent: list[Any]) -> Pushes:
        feed: Any = types.SimpleNamespace(file=self.files[name], key_column="key")
        return Pushes(feed, self.evaluations, self.evaluations, sent.append)

    async def close(self) -> None:
        await self.evaluations.stop()
        self.connection.close()

    async def evaluate(self, sql: str, records: list[Written], first: int = 0) -> Filtered:
        statement = read_push(sql)
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        tables = self.config.tables
        filters = Filters(self.connection, tables, {}, self.codecs, self.statements, found.set_result)
        batch = batch_of(first, records)
        sides = (batch.offsets, batch.timestamps_ms, batch.keys, batch.values, batch.headers)
        filters.filter(Filter(1, statement.table, statement, "objects", 0, *sides))
        response = await found
        await filters.stop()
        assert isinstance(response, Filtered), response
        return response


async def applied(pushes: Pushes, positions: dict[int, int]) -> None:
    arrived = pushes.take_arrived()
    assert arrived
    await pushes.applied(arrived, positions)


def batch_of(first: int, records: list[Written]) -> RecordBatch:
    keys, values, times, headers = (list(column) for column in zip(*records, strict=True))
    return RecordBatch(TopicPartition("t", 0), [*range(first, first + len(keys))], times, keys, values, headers, [])


@pytest.mark.parametrize("name", TABLES)
async def test_a_row_does_not_depend_on_the_records_around_it(tmp_path: Path, name: str) -> None:
    """Nor whether it is corrupt. Statements, keys, changes, snapshots and standing queries show the same rows."""
    log = {**TABLES[name], "kind": "log"}
    kept = Kept(tmp_path, {"together": log, "alone": log, "latest": TABLES[name], "latest_parts": TABLES[name]})
    sent: list[Any] = []
    forms = ("objects", "arrays")
    pushes = kept.pushes("together", sent)
    statement = read_push("SELECT * FROM together")
    for number, form in enumerate(forms):
        await pushes.subscribe(Subscribe(number, "together", statement, form))
    sent.clear()
    kept.apply("together", 0, AMONG)
    await applied(pushes, {0: COUNT})
    kept.apply("latest", 0, AMONG)
    for at, record in enumerate(HOSTILE):
        kept.apply("alone", 2 * at, [record])
    for at in range(0, COUNT, 8):
        kept.apply("latest_parts", at, AMONG[at : at + 8])
    rows = kept.rows("together")
    by_offset = {json.loads(row)["offset"]: row for row in rows}
    assert [row for at, row in by_offset.items() if at % 2 == 0] == kept.rows("alone")
    assert sum(at % 2 for at in by_offset) == (0 if name == "avro_keys" else len(HOSTILE)), "good ones arrive"
    assert kept.files["together"].corrupt.count == COUNT - len(rows)
    assert kept.rows("latest") == kept.rows("latest_parts")
    assert kept.files["latest"].corrupt == kept.files["latest_parts"].corrupt

    changes = {type(message).__name__: message for message in sent}
    assert [*changes] == ["Changes"], changes
    assert sent[0].rows == rows
    assert [[*json.loads(row).values()] for row in rows] == [json.loads(row) for row in sent[1].rows]
    snapshot: list[Any] = []
    await kept.pushes("together", snapshot).subscribe(Subscribe(1, "together", statement, "objects", {}))
    assert isinstance(snapshot[0], PushBegun)
    assert [row for message in snapshot[1:] for row in message.rows] == rows
    standing = await kept.evaluate("SELECT * FROM together", AMONG)
    assert [row for row in standing.rows if row is not None] == rows
    if newest := [row for row in kept.rows("latest") if json.loads(row)["offset"] == COUNT - 1]:
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        key = GOOD[0].decode()  # type: ignore[union-attr]
        Pulls(kept.connection, kept.statements, {"latest": "key"}, found.set_result).look_up(Lookup(1, "latest", key))
        assert [(await found).row] == newest
    await kept.close()


async def test_values_fit_their_columns_at_any_depth_or_their_record_is_corrupt(tmp_path: Path) -> None:
    """Text or a number is never a struct of nulls, and what is absent or null is no error."""
    kept = Kept(tmp_path, {"typed": {**TABLES["typed"], "kind": "log"}})
    for name in ("fitting", "unfit"):
        records: list[Written] = [
            (b"k", text.encode("utf-8", "surrogatepass"), NOW, None) for text in table(__file__, name)
        ]
        problems = (await kept.evaluate("SELECT * FROM typed", records)).problems
        assert [*problems] == ([] if name == "fitting" else [*range(len(records))])


@pytest.mark.parametrize("sql", table(__file__, "statements"))
async def test_a_statement_fails_at_the_records_at_which_it_fails_alone(tmp_path: Path, sql: str) -> None:
    """The others have their rows, whatever the class of DuckDB's error; a push query ends with the first's position."""
    kept = Kept(tmp_path, {"json": {**TABLES["json"], "kind": "log"}})
    together = await kept.evaluate(sql, AMONG)
    alone = [await kept.evaluate(sql, [record], at) for at, record in enumerate(AMONG[:-1]) if record is not GOOD]
    assert together.rows[::2] == [row for found in alone for row in found.rows]
    assert {at: kind for at, (kind, _) in together.problems.items()} == {
        2 * at: found.problems[0][0] for at, found in enumerate(alone) if found.problems
    }
    sent: list[Any] = []
    pushes = kept.pushes("json", sent)
    await pushes.subscribe(Subscribe(1, "json", read_push(sql), "objects"))
    await pushes.subscribe(Subscribe(2, "json", read_push("SELECT key FROM json"), "objects"))
    sent.clear()
    kept.apply("json", 0, AMONG)
    await applied(pushes, {0: COUNT})
    failed = [at for at, (kind, _) in together.problems.items() if kind == "failed"]
    before = [row for row in together.rows[: min(failed, default=COUNT)] if row is not None]
    changes = [message for message in sent if isinstance(message, Changes)]
    assert [row for message in changes if 1 in message.numbers for row in message.rows] == before
    reasons = [message.reason for message in sent if isinstance(message, Ended)]
    assert [f"offset {min(failed)})" in reason for reason in reasons] == [True] * bool(failed)
    assert any(2 in message.numbers for message in changes), "others go on"
    await kept.close()


@pytest.mark.parametrize("condition", table(__file__, "conditions"))
async def test_a_condition_is_met_by_the_records_that_meet_it_alone(condition: str) -> None:
    """What is not of its format, or at which it fails, is left out and reported."""
    reports: list[str] = []
    codecs = Codecs(SchemaRegistry(SchemaRegistryConfig(), SystemClock()))
    found = RecordFilter(condition, codecs, "string", "string", reports.append)

    def records() -> list[Record]:
        return [
            Record("t", 0, at, time, key, value, functools.partial(list, h or ()))
            for at, (key, value, time, h) in enumerate(AMONG)
        ]

    together = [record.offset for record in await found.matching(records())]
    alone = [record.offset for one in records() for record in await found.matching([one])]
    assert together == alone
    assert {*range(1, COUNT, 2)} <= {*together}
    assert "records left out" in reports[0]


def test_a_record_that_fails_alone_for_any_reason_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that nobody thought of is of the record that causes it; not so if the table takes no record at all."""
    kept = Kept(tmp_path, {"json": {**TABLES["json"], "kind": "log"}})

    def fails(connection: Any, columns: Any, records: Any, **more: Any) -> None:
        if broken or 5 in records.filter(pc.field("value").is_valid())["offset"].to_pylist():
            connection.execute("SELECT error('planted')")
        load_batch(connection, columns, records, **more)

    broken = False
    monkeypatch.setattr("headrace_queries.engine.table_file.load_batch", fails)
    kept.apply("json", 0, [GOOD] * 9)
    assert [json.loads(row)["offset"] for row in kept.rows("json")] == [0, 1, 2, 3, 4, 6, 7, 8]
    assert "partition 0, offset 5: the table cannot take it" in kept.files["json"].corrupt.last
    broken = True
    with pytest.raises(Exception, match="planted"):
        kept.apply("json", 9, [GOOD])
    assert kept.files["json"].corrupt.count == 1


async def test_push_queries_of_hard_records_end_in_time_and_at_the_first_failure(tmp_path: Path) -> None:
    """However many records fail, and however large the rows are that a client has not seen."""
    kept = Kept(tmp_path, {"json": {**TABLES["json"], "kind": "log"}})
    count = 3_000
    sent: list[Any] = []
    pushes = kept.pushes("json", sent)
    statement = read_push('SELECT error("offset"::VARCHAR) AS x FROM json WHERE "offset" > 0')
    await pushes.subscribe(Subscribe(1, "json", statement, "objects"))
    kept.apply("json", 0, [GOOD] * count)
    await applied(pushes, {0: count})
    assert "offset 1)" in sent[-1].reason
    kept.apply("json", count, [(b'"k"', b'"%b"' % (b"x" * 100_000), NOW, None)] * 200)
    await pushes.subscribe(Subscribe(2, "json", read_push("SELECT * FROM json"), "objects", {0: count}))
    sizes = [sum(map(len, message.rows)) for message in sent if getattr(message, "numbers", None) == [2]]
    assert sum(sizes) > 20_000_000
    assert max(sizes) < 16 << 20, "so much may wait for a client"
    await kept.close()


def test_a_file_that_could_not_be_checkpointed_ends_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DuckDB takes no call to it any more, and the files have what was committed."""
    ends: list[int] = []
    monkeypatch.setattr("os._exit", ends.append)
    connection = duckdb.connect()
    connection.execute(f"ATTACH '{tmp_path / 'f.duckdb'}' AS f; CREATE TABLE f.t AS SELECT 1 AS n")
    connection.execute("SET debug_checkpoint_abort = 'before_header'")
    for sql in "CHECKPOINT f", "SELECT * FROM f.t":
        with pytest.raises(duckdb.Error) as caught:
            connection.execute(sql)
    end_if_broken(caught.value)
    assert ends


class Taker:
    """Takes the records of each transaction, as push queries do."""

    def __init__(self, file: TableFile) -> None:
        self.file = file
        self.taken: list[tuple[int, dict[int, int]]] = []

    def take_arrived(self) -> int:
        return len(self.file.arrived())

    async def applied(self, arrived: int, positions: Mapping[int, int]) -> None:
        self.taken.append((arrived, {**positions}))


async def test_a_batch_that_needs_too_much_memory_is_applied_in_parts(tmp_path: Path) -> None:
    """Each part in its own transaction with its positions, and push queries get the records of each."""
    tables = {"large": {"topic": "t", "kind": "log", "schema": "tags ARRAY<STRUCT<a: STRING, b: STRING>>"}}
    kept = Kept(tmp_path, tables, memory_bytes=64 << 20)
    registry = SchemaRegistry(SchemaRegistryConfig(), SystemClock())
    admin: Any = None  # nothing is read here
    feed = TableFeed(kept.files["large"], "large", kept.config.tables["large"], admin, kept.codecs, registry)
    taker = feed.pushes = Taker(feed.file)
    tags = b",".join([b'{"a": "%s", "b": "y"}' % (b"x" * 24)] * 10_000)
    records = [(b'"k"', b'{"tags": [%s]}' % tags, NOW, None)] * 12
    large = kept.config.tables["large"]
    decoded = Decoder(large.key_format, large.value_format, kept.codecs).to_arrow([batch_of(5, records)])
    await feed.apply_records(decoded, {0: 17})
    assert sum(count for count, _ in taker.taken) == feed.file.rows == 12
    ends = [positions[0] for _, positions in taker.taken]
    assert len(ends) > 1
    assert ends == sorted(ends)
    assert feed.file.positions() == {0: ends[-1]} == {0: 17}
    assert json.loads(kept.rows("large")[0])["tags"][0] == {"a": "x" * 24, "b": "y"}
    await kept.close()
