"""The pipeline of `examples/audit`: events are rows of a real PostgreSQL."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from headrace.runtime.telemetry.audit_events import RangeEvent
from headrace_devkit.testing import Cluster, MakeTopic
from tests.integration.pipelines.test_pipelines import QUICK, produce
from tests.postgres_server import PostgresServer, postgres_server

EXAMPLE = Path(__file__).parents[3] / "packages" / "headrace-pipelines" / "examples" / "audit"
OTHER_NAMES = {"timestamp": "time", "offset": "first_offset", "group": "consumer_group"}
LAST_MILLISECONDS = 253_402_300_799_999
"""The end of the year 9999."""
WHEN_WRITTEN = "the time at which the event was written"
ODD = 'odd "x", \n\\u0000 €'
FOREIGN = {"id": "f", "serviceId": "f", "auditType": "FOREIGN", "auditStatus": "SUCCESS", "timestamp": 10**30}
LIMIT_SECONDS = 240.0


def column_of(field: str) -> str:
    """Return the column of a field."""
    return OTHER_NAMES.get(field, re.sub("[A-Z]", lambda letter: f"_{str(letter[0]).lower()}", field))


def row_of(event: dict[str, Any]) -> dict[str, Any]:
    """Return the row that an event should be."""
    time = event["timestamp"]
    return {
        **{column_of(field): value for field, value in event.items()},
        "time": WHEN_WRITTEN if time > LAST_MILLISECONDS else dt.datetime.fromtimestamp(time / 1000, dt.UTC),
    }


@pytest.fixture
def postgres() -> Iterator[PostgresServer]:
    with postgres_server() as server:
        server.execute((EXAMPLE / "audit.sql").read_text())
        yield server


def columns_of(postgres: PostgresServer) -> list[str]:
    """Return the columns of the table, in their order."""
    columns = "SELECT column_name FROM information_schema.columns WHERE table_name = 'audit' ORDER BY ordinal_position"
    return [name for (name,) in postgres.execute(columns)]


def rows_of(postgres: PostgresServer) -> dict[str, dict[str, Any]]:
    """Return the rows by id, without their nulls."""
    names, rows = columns_of(postgres), postgres.execute("SELECT * FROM audit")
    found = [{n: v for n, v in zip(names, row, strict=True) if v is not None} for row in rows]
    return {row["id"]: row for row in found}


def test_every_field_of_an_event_is_read() -> None:
    """A new field needs a column."""
    schema = yaml.safe_load((EXAMPLE / "audit.yaml").read_text())["sources"]["events"]["schema"]
    read = re.findall(r"(?:^|, )(\w+) ", re.sub("<.*>", "", schema))
    assert sorted(read) == sorted(field.encode_name for field in msgspec.structs.fields(RangeEvent))
    table = re.findall(r'^  "?(\w+)"? ', (EXAMPLE / "audit.sql").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(map(column_of, read))


@pytest.mark.heavy
@pytest.mark.long
@pytest.mark.timeout(600)
def test_rows_equal_the_events(kafka: Cluster, topic: MakeTopic, postgres: PostgresServer, tmp_path: Path) -> None:
    """Every field, odd texts and times; what is not an event is left out."""
    name = topic()
    document = yaml.safe_load((EXAMPLE / "audit.yaml").read_text())
    document["sources"]["events"]["topic"], document["driver"], document["trigger"] = name, QUICK, {"once": True}
    (tmp_path / "audit.yaml").write_text(yaml.safe_dump(document))
    texts = {field.encode_name: ODD for field in msgspec.structs.fields(RangeEvent) if field.type in (str, str | None)}
    place = {"topic": "t", "partition": 2, "offset": 2**62, "lastOffset": 2**62, "count": 1}
    whole = {**texts, **place, "ranges": [place, place], "timestamp": 1_767_225_600_000}
    events = {identity: {**whole, "id": identity} for identity in ("a", "b")} | {"f": FOREIGN}
    produce(kafka.bootstrap_servers, name, (json.dumps(each).encode() for each in [*events.values(), {}, {"id": None}]))
    command = [
        sys.executable,
        "-m",
        "headrace.cli.main",
        "pipeline",
        "run",
        "audit.yaml",
        "-b",
        kafka.bootstrap_servers,
    ]
    env = {**os.environ, **postgres.environment}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    assert done.returncode == 0, done.stderr

    found, expected = rows_of(postgres), {identity: row_of(event) for identity, event in events.items()}
    assert abs(dt.datetime.now(dt.UTC) - found["f"]["time"]) < dt.timedelta(hours=1)
    found["f"]["time"] = WHEN_WRITTEN
    assert found == expected
    assert {column for row in found.values() for column in row} == {*columns_of(postgres)}
