"""Standing queries in headrace.yaml: which consumer each is, what is refused where, and who gets its rows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.config.load import load_config
from headrace.config.model import HeadraceConfig
from headrace.delivery.outcomes import ACK, HANDED_OFF, Delivery, Reply
from headrace.errors import ConfigError, DestinationUnavailable, QueriesUnavailable, StatementRejected
from headrace.records import Record
from headrace_queries.engine_protocol import Filtered, Problem
from headrace_queries.filtered_destination import FilteredDestination
from headrace_queries.push_statement import PushStatement
from headrace_queries.standing import StandingQuery, problems_of, with_standing_queries
from yaml_table import table

TEXTS = table(__file__, "texts")
QUERY = StandingQuery(PushStatement("n", "stock", "", "", None), "stock", "objects")


def config_of(tmp_path: Path, text: str) -> HeadraceConfig:
    file = tmp_path / "headrace.yaml"
    file.write_text(text)
    return load_config(file, {}, check=problems_of)


def test_a_query_is_a_reactive_consumer_of_the_tables_topic(tmp_path: Path) -> None:
    """With the formats of the table, a group of its own, and its settings; a status is the response by default."""
    config = config_of(tmp_path, TEXTS["tables"] + TEXTS["queries"])
    made = with_standing_queries(config).reactive_consumers
    low = made["low"]
    assert (low.topics, low.group, low.key_format, low.backend.mode) == (
        ["s"],
        "headrace.query.low",
        "binary",
        "status",
    )
    assert (made["one"].group, made["one"].batch.max_records, made["one"].retry.attempts) == ("g", 1, 2)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("clash", "headrace.yaml:6: queries.low: a reactive consumer has the same name"),
        ("same_group", "headrace.yaml:4: queries: .* in the same group g"),
    ],
)
def test_a_query_and_a_reactive_consumer_are_told_apart(tmp_path: Path, text: str, problem: str) -> None:
    """By their names, and by their groups."""
    with pytest.raises(ConfigError, match=problem):
        config_of(tmp_path, TEXTS[text])


class _Engine:
    """Responds to batches with what a test has prepared."""

    def __init__(self, *found: Any) -> None:
        self._found = [*found]

    async def filter(self, query: StandingQuery, records: Any) -> Any:
        found = self._found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


class _Backend:
    """Takes rows."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, bytes | None]] = []

    async def deliver(self, delivery: Delivery) -> Sequence[Reply]:
        self.rows += [(record.offset, record.value) for record in delivery.records]
        return [ACK if record.value == b"1" else Reply("HTTP 500", status=500) for record in delivery.records]


def deliver(engine: _Engine, count: int, times: int = 1) -> tuple[list[Any], _Backend]:
    backend = _Backend()
    destination = FilteredDestination(engine, QUERY, backend)  # type: ignore[arg-type]
    records = [Record("s", 0, offset, 0, b"k", b"{}") for offset in range(count)]
    results: list[Any] = []
    for _ in range(times):
        try:
            delivery = Delivery("g", records[0].topic_partition, 1, records, 1)
            results.append(asyncio.run(destination.deliver(delivery)))  # type: ignore[arg-type]
        except DestinationUnavailable as cause:
            results.append(cause.description)
    return results, backend


def test_each_record_has_the_reply_for_its_row() -> None:
    """One that is left out is completed without a request; one that does not fit never gets another attempt."""
    problems: dict[int, Problem] = {2: ("unfit", "no JSON"), 4: ("failed", "no INT"), 5: ("memory", "too large")}
    [replies], backend = deliver(_Engine(Filtered(1, [None, b"1", None, b"2", None, None], problems)), 6)
    assert backend.rows == [(1, b"1"), (3, b"2")]
    assert replies[:2] == [HANDED_OFF, ACK]
    assert (replies[2].error, replies[2].reason, replies[2].permanent) == ("DecodeError", "no JSON", True)
    assert replies[3].status == 500
    assert (replies[4].error, replies[4].permanent) == ("StatementRejected", True)
    assert (replies[5].error, replies[5].permanent, replies[5].reached) == ("StatementRejected", False, True)


def test_records_wait_for_the_engine_and_are_blamed_only_for_their_values() -> None:
    """A third end of the engine at the same records is held against them, and a batch is taken apart then."""
    ended = QueriesUnavailable("it restarts", interrupted=True)
    good = Filtered(1, [b"1"], {})
    waits = "waiting for table stock: it restarts"
    results, _ = deliver(_Engine(QueriesUnavailable("it restarts"), ended, ended, good, ended, ended, ended), 1, 8)
    assert results[:3] == [waits] * 3
    assert results[3] == [ACK]
    assert results[4:7] == [waits] * 3
    assert (results[7][0].permanent, results[7][0].shared) == (True, False)
    [[first, second]], backend = deliver(_Engine(StatementRejected("no number")), 2)
    assert (first.reason, first.shared, first.permanent, second) == ("no number", True, True, first)
    assert backend.rows == []
