"""SQL on the command line, against a real broker: slices of topics, conditions of consume, tables of a Headrace."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster, MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario
from headrace_devkit.testing.secured import command_environment


@pytest.fixture
def orders(site: Scenario, topic: MakeTopic) -> str:
    """A topic of three partitions, whose name needs quotes: 300 objects and a text that is none."""
    name = topic(3) + "-eu.v1"
    site.cli("topics", "create", name, "--partitions", "3")
    values = [{"carrier": "UA" if n % 3 == 0 else "AA", "n": n, "delay": n - 150} for n in range(300)]
    texts = [json.dumps(value).encode() for value in values] + [b"no object"]
    site.write(
        name, *(OutgoingRecord(name, b"k%d" % n, text, [("source", b"web")], n % 3) for n, text in enumerate(texts))
    )
    return name


def test_a_slice_of_topics_is_asked(site: Scenario, orders: str, topic: MakeTopic, tmp_path: Path) -> None:
    """Columns come from the content; topics are joined; a record that does not fit, and a cut, are told."""
    done = site.cli("sql", f'SELECT carrier, count(*) AS n, min(delay) FROM "{orders}" GROUP BY 1 ORDER BY 1')
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["carrier", "n", "min(delay)"],
        ["AA", "200", "-149"],
        ["UA", "100", "-150"],
    ]
    assert f"{orders}: records left out: 1; the last is partition 0, offset 100" in done.stderr
    carriers = topic()
    site.write_json(carriers, {"code": "UA", "name": "United"})
    join = f'SELECT c.name, sum(o.n) AS n FROM "{orders}" o JOIN "{carriers}" c ON o.carrier = c.code GROUP BY 1'
    assert json.loads(site.cli("sql", join, "--output", "json").stdout) == [{"name": "United", "n": 14850}]
    last = site.cli("sql", f'SELECT n, key, partition FROM "{orders}" ORDER BY n', "--last", "30", "--output", "csv")
    rows = [*csv.DictReader(last.stdout.splitlines())]
    assert [int(row["n"]) for row in rows] == [*range(271, 300)], "ten of each partition, one of which is left out"
    assert rows[0] == {"n": "271", "key": "k271", "partition": "1"}
    assert f"{orders}: reading the newest 30 of 301 offsets" in last.stderr
    part = ("--partition", "1", "--offsets", "10-19", "--value-format", "string")
    found = site.cli("sql", f'SELECT value, "offset" FROM "{orders}" LIMIT 1', *part, "--output", "json").stdout
    assert json.loads(found) == [{"value": '{"carrier": "AA", "n": 31, "delay": -119}', "offset": 10}]


def test_a_statement_becomes_a_parquet_file(env: Mapping[str, str], orders: str, tmp_path: Path) -> None:
    """With the types of the columns."""
    command = [sys.executable, "-m", "headrace.cli.main", "sql", f'SELECT carrier, n FROM "{orders}" WHERE n < 5']
    with (tmp_path / "rows.parquet").open("wb") as file:
        subprocess.run([*command, "--output", "parquet"], cwd=tmp_path, env=env, stdout=file, check=True, timeout=240)
    table = pyarrow.parquet.read_table(tmp_path / "rows.parquet")
    assert sorted(table["n"].to_pylist()) == [0, 1, 2, 3, 4]
    assert [str(field.type) for field in table.schema] == ["string", "int64"]


@pytest.fixture
def env(kafka: Cluster, tmp_path: Path) -> Mapping[str, str]:
    return {**command_environment(kafka.bootstrap_servers, tmp_path), "PYTHONUNBUFFERED": "1"}


def test_tables_of_a_running_headrace(site: Scenario, orders: str, headrace: StartHeadrace, tmp_path: Path) -> None:
    """They are listed, shown, asked and built again; a prompt reads standard input."""
    columns = "carrier STRING, n BIGINT"
    tables = {"flights": {"topic": orders, "kind": "log", "schema": columns}}
    process = headrace({**site.config, "tables": tables, "state_dir": str(tmp_path / "state")})
    url = ("--url", process.url)

    def listed() -> dict[str, Any]:
        [row] = json.loads(site.cli("tables", "show", *url, "--output", "json").stdout)
        return dict(row)

    site.wait_until(lambda: listed()["state"] == "live", "the table to be live")
    assert (listed()["rows"], listed()["corrupt"]) == (300, 1)
    assert "flights  log   " in site.cli("tables", "show", *url).stdout
    shown = site.cli("tables", "show", "flights", *url).stdout
    assert "partition 0, offset 100: its value does not fit the columns" in shown
    assert "  carrier    VARCHAR\n" in shown
    count = "SELECT carrier, count(*) AS n FROM flights GROUP BY 1 ORDER BY 1"
    assert site.cli("sql", count, *url, "--output", "csv").stdout == "carrier,n\nAA,200\nUA,100\n"
    typed = f"\\d\n\\d flights\n{count}\nLIMIT 1;\n\\q\nnever"
    prompted = site.cli("sql", *url, "--output", "csv", given=typed).stdout
    assert prompted.startswith("TABLE\nflights\nCOLUMN     TYPE\n")
    assert prompted.endswith("carrier,n\nAA,200\n")
    assert "did you mean flights?" in site.cli("sql", "SELECT 1 FROM flight", *url, code=1).stderr
    rebuilt = site.cli("tables", "rebuild", "flights", *url).stdout
    assert rebuilt == "table flights is being built again: see headrace tables show flights\n"
    site.wait_until(lambda: listed()["state"] == "live" and listed()["rows"] == 300, "the table to be live again")
    assert "table 'nope' does not exist" in site.cli("tables", "show", "nope", *url, code=1).stderr
