"""Flows into Delta tables: types of Spark, changes by key, and a column that is added while the checkpoint stays."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from headrace.config.kafka import KafkaConfig
from headrace_devkit.testing import Cluster, MakeTopic
from tests.integration.pipelines.test_pipeline_checkpoints import outcome
from tests.integration.pipelines.test_pipelines import QUICK, produce

pytestmark = [pytest.mark.heavy, pytest.mark.long]
TYPED = """
SELECT id, name, decode(unhex('C3A4'), 'UTF-8') AS text, unhex('00FF') AS raw, CAST(1.5 AS DECIMAL(38, 10)) AS price,
  TIMESTAMP '2026-03-29 01:30:00.000001Z' AS at, TIMESTAMP_NTZ '2026-03-29 02:30:00' AS local, DATE '2026-03-29' AS day,
  array(named_struct('x', id), NULL) AS list, map('k', array(id)) AS map, CAST(id AS SMALLINT) AS small
FROM changes
"""
NEWEST = "SELECT id, name, seq AS __seq, name IS NULL AS __gone FROM changes"


def spec(topic: str, folder: Path, typed: str) -> dict[str, Any]:
    changes = {"keys": ["id"], "sequence_by": "__seq", "apply_as_deletes": "__gone"}
    return {
        "name": "lake",
        "sources": {"changes": {"topic": topic, "schema": "id INT, name STRING, seq BIGINT"}},
        "flows": {
            "typed": {"sql": typed, "sink": {"delta": "typed", "partition_by": ["name"]}},
            "newest": {"sql": NEWEST, "sink": {"delta": f"file://{folder}/newest", **changes}},
        },
        "driver": {"shuffle_partitions": 1, **QUICK},
        "folder": folder,
    }


def test_rows_and_changes_arrive_with_their_types(kafka: Cluster, topic: MakeTopic, tmp_path: Path) -> None:
    """A later column is null in older rows; rows of one batch with one key are one change."""
    source, settings = topic(1), KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)

    def send(*changes: tuple[int, str | None, int]) -> None:
        values = (dict(zip(("id", "name", "seq"), change, strict=True)) for change in changes)
        produce(kafka.bootstrap_servers, source, [json.dumps(value).encode() for value in values])

    def run(typed: str, reads: int) -> str:
        return asyncio.run(outcome(spec(source, tmp_path, typed), settings, tmp_path, reads))

    send((1, "a", 1), (1, "c", 3), (1, "b", 2), (2, "x", 1), (2, None, 2), (3, None, 1))
    assert not run(TYPED, 6)
    send((1, "old", 2), (2, "again", 3), (4, "d", 1))
    assert not run(TYPED.replace(" AS small", " AS small, seq AS further"), 3)
    found = {row["id"]: row for row in DeltaTable(tmp_path / "newest").to_pyarrow_table().to_pylist()}
    assert {key: row["name"] for key, row in found.items()} == {1: "c", 2: "again", 4: "d"}
    assert set(found[1]) == {"id", "name", "__headrace_sequence"}
    typed = DeltaTable(tmp_path / "typed").to_pyarrow_table().sort_by([("further", "ascending")]).to_pylist()
    assert len(typed) == 9
    assert [row["further"] for row in typed] == [1, 2, 3, *[None] * 6]
    assert typed[1] == {
        "id": 1,
        "name": "old",
        "text": "ä",
        "raw": b"\x00\xff",
        "price": Decimal("1.5000000000"),
        "at": datetime(2026, 3, 29, 1, 30, 0, 1, tzinfo=UTC),
        "local": datetime(2026, 3, 29, 2, 30),
        "day": date(2026, 3, 29),
        "list": [{"x": 1}, None],
        "map": [("k", [1])],
        "small": 1,
        "further": 2,
    }
    send((1, "a", 1))
    why = run(TYPED.replace("DATE '2026-03-29'", "'2026-03-29'"), 0)
    assert "column day: the flow has string, and the table date32[day]: cast it" in why
