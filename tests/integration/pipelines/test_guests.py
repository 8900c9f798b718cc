"""What another package adds: one file and one entry point each, and everything that lists its family has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config import dialects
from headrace.functions.triggers import trigger_kinds
from headrace_devkit.testing import Cluster
from headrace_pipelines.sinks import sink_kinds
from yaml_table import table

ROOT = Path(__file__).parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]
HEADRACE = "-m", "headrace.cli.main"
ENTRIES = f"""[{sink_kinds.GROUP}]
lines = lines_sink:LinesSink
[{trigger_kinds.GROUP}]
ticks = ticks_trigger:TicksTrigger
[headrace.console.pages]
weather = weather_page
[{dialects.GROUP}]
properties = properties_dialect:PropertiesDialect
"""


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run Python with a distribution on its path that has the files of `tests/guests`, each with an entry point."""
    about = tmp_path / "headrace_guests-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-guests\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    path = os.pathsep.join(map(str, (tmp_path, ROOT / "tests/guests", ROOT)))

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command, env = [sys.executable, *words], {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)

    return run


def pipeline(folder: Path, **sink: Any) -> str:
    """Write a pipeline file, and return its name."""
    flow = {"sql": "SELECT id + 1 AS id FROM given", "sink": {"lines": "written.txt", **sink}}
    sources = {"given": {"files": "given", "format": "json", "schema": "id INT"}}
    (folder / "p.yaml").write_text(
        json.dumps({"name": "guest", "trigger": {"once": True}, "sources": sources, "flows": {"f": flow}}, indent=1)
    )
    return "p.yaml"


def test_a_sink_is_checked_and_documented(python: Run, tmp_path: Path) -> None:
    """Its keys, its own check, the sections of the reference; no library of Spark, Kafka or a database is loaded."""
    assert python(*HEADRACE, "pipeline", "validate", pipeline(tmp_path)).stdout == "p.yaml: ok\n"
    refused = python(*HEADRACE, "pipeline", "validate", pipeline(tmp_path, mode="update"))
    assert (refused.returncode, refused.stderr.count("lines are written once: use mode: append")) == (78, 1)
    page = python("-c", "from docs.generate import configuration_page; print(configuration_page())").stdout
    assert page.count("A file that grows by a line for each row.") == 1
    assert page.count("`flows.<name>.sink.lines`") == 1
    listed = python("-c", "import sys, headrace_pipelines.spec; print(*sys.modules)").stdout.split()
    assert "lines_sink" in listed
    assert {"pyspark", "psycopg", "confluent_kafka", "headrace.runtime", "headrace.kafka"} & {*listed} == set()


@pytest.mark.heavy
@pytest.mark.long
def test_a_sink_writes_the_rows_of_a_flow(python: Run, kafka: Cluster, tmp_path: Path) -> None:
    """Spark's driver finds it too, and plan and status have what it says of itself."""
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "1.json").write_text('{"id": 1}\n{"id": 2}\n')
    file, broker = pipeline(tmp_path), ("-b", kafka.bootstrap_servers)
    planned = python(*HEADRACE, "pipeline", "plan", file, *broker)
    assert "flow f <- given -> lines written.txt (append, at least once, line by line)" in planned.stdout
    done = python(*HEADRACE, "pipeline", "run", file, *broker, "--output", "json")
    assert json.loads(done.stdout)["flows"]["f"]["sink"] == "lines written.txt"
    assert (tmp_path / "written.txt").read_text().splitlines() == ['{"id":2}', '{"id":3}']


def test_a_kind_of_trigger_is_read_and_documented(python: Run, tmp_path: Path) -> None:
    """Its keys, their values and their misspellings; the schema and the page of keys."""

    def validated(**attributes: Any) -> str:
        records = {"kind": "kafka", "attributes": {"topics": ["t"], "consumerGroup": "g"}}
        triggers = {"k": records, "t": {"kind": "ticks", "attributes": attributes}}
        (tmp_path / "m.py").write_text("def h(context, event): ...")
        (tmp_path / "function.yaml").write_text(yaml.safe_dump({"spec": {"handler": "m:h", "triggers": triggers}}))
        return python(*HEADRACE, "function", "validate", "function.yaml").stderr

    assert "tick" not in validated(tickSeconds=5)
    assert "tickSeconds: should be greater than or equal to 1" in validated(tickSeconds=0)
    assert "did you mean tickSeconds?" in validated(tickSecond=5)
    page = python("-c", "from docs.generate import function_keys_page; print(function_keys_page())").stdout
    assert page.count("## `attributes` of kind `ticks`\n") == page.count("Time between two ticks.") == 1
    schema = json.loads(python(*HEADRACE, "config", "schema", "function").stdout)
    trigger = schema["properties"]["spec"]["properties"]["triggers"]["additionalProperties"]["properties"]
    assert (trigger["kind"]["examples"][-1], "tickSeconds" in trigger["attributes"]["properties"]) == ("ticks", True)


def test_a_dialect_is_recognised_and_read(python: Run, tmp_path: Path) -> None:
    """Also its remarks; `headrace.yaml` is read as before."""
    (tmp_path / "sidecar.properties").write_text("bootstrap.servers=broker:9\nacks=1\n")
    assert "broker:9" in python(*HEADRACE, "config", "show", "-c", "sidecar.properties").stdout
    assert "acks has no effect" in python(*HEADRACE, "config", "check", "-c", "sidecar.properties").stderr
    (tmp_path / "headrace.yaml").write_text("kafka: {bootstrap_servers: 'other:9'}")
    assert "other:9" in python(*HEADRACE, "config", "show", "-c", "headrace.yaml").stdout


def test_a_page_of_the_console_is_served_and_in_the_navigation(python: Run) -> None:
    """Behind the pages of Headrace, each of which the walk through a browser opens."""
    lines = ("from headrace_console.serve import Console, ConsoleSettings", "from headrace_console.view import PAGES")
    lines += ("from nicegui import app", "Console(ConsoleSettings(['http://localhost:1'])).register()")
    lines += (
        "routes = {route.path for route in app.routes}",
        "print(*(one.path for one in PAGES if one.path in routes))",
    )
    served = python("-c", "\n".join(lines)).stdout.split()
    opened = {
        path.partition("?")[0] for path, _ in table(str(ROOT / "tests/integration/console/test_console"), "pages")
    }
    assert (served[-1], {*served[:-1]}) == ("/weather", opened)


def test_a_format_is_one_file_and_one_row(python: Run, tmp_path: Path) -> None:
    """In a copy of the source: settings, commands and codecs have it."""
    copy = shutil.copytree(
        ROOT / "packages/headrace/src/headrace", tmp_path / "headrace", ignore=shutil.ignore_patterns("*.pyc")
    )
    shutil.copy(ROOT / "tests/guests/hex_format.py", copy / "formats" / "hex.py")
    with (copy / "formats" / "formats.csv").open("a") as rows:
        rows.write("hex,6,6,HexCodec,,text/plain\n")
    lines = (
        "from headrace.formats.schema_codec import PLAIN_CODECS",
        "print(PLAIN_CODECS['hex'].encode(b'\"01ff\"').hex())",
    )
    assert python("-c", "\n".join(lines)).stdout.startswith("01ff")
    for words in (("produce", "--help"), ("consume", "--help"), ("config", "schema"), ("config", "schema", "pipeline")):
        assert "hex" in python(*HEADRACE, *words).stdout, words
