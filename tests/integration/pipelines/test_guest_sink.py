"""A sink of another package: one file and one entry point, and everything that lists sinks has it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.pipelines.sinks.sink_kinds import GROUP

ROOT = Path(__file__).parents[3]
Run = Callable[..., subprocess.CompletedProcess[str]]
PIPELINE: dict[str, Any] = {
    "name": "guest",
    "trigger": {"once": True},
    "sources": {"given": {"files": "given", "format": "json", "schema": "id INT"}},
    "flows": {"f": {"sql": "SELECT id + 1 AS id FROM given", "sink": {"lines": "written.txt"}}},
    "driver": {"shuffle_partitions": 1},
}


@pytest.fixture
def python(tmp_path: Path) -> Run:
    """Run Python with a distribution on its path that has one file and one entry point."""
    packages = tmp_path / "packages"
    about = packages / "headrace_lines-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: headrace-lines\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{GROUP}]\nlines = lines_sink:LinesSink\n")
    (packages / "lines_sink.py").write_text((ROOT / "tests/guests/lines_sink.py").read_text())
    env = {**os.environ, "PYTHONPATH": f"{packages}{os.pathsep}{ROOT}"}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)

    return run


def write(folder: Path, **sink: Any) -> str:
    """Write the pipeline file with a changed sink, and return its name."""
    flow = PIPELINE["flows"]["f"]
    changed = {**PIPELINE, "flows": {"f": {**flow, "sink": {**flow["sink"], **sink}}}}
    (folder / "p.yaml").write_text(json.dumps(changed, indent=1))
    return "p.yaml"


def test_a_registered_sink_is_checked_and_documented(python: Run, tmp_path: Path) -> None:
    """Its keys, its own check, the sections of the reference; no library of Spark, Kafka or a database is loaded."""
    command = "-m", "headrace.cli.main", "pipeline", "validate"
    assert python(*command, write(tmp_path)).stdout == "p.yaml: ok\n"
    refused = python(*command, write(tmp_path, mode="update"))
    assert (refused.returncode, refused.stderr.count("lines are written once: use mode: append")) == (78, 1)
    assert "lin: unknown key: did you mean lines?" in python(*command, write(tmp_path, lin="x")).stderr
    page = python("-c", "from docs.generate import configuration_page; print(configuration_page())").stdout
    assert page.count("A file that grows by a line for each row.") == 1
    assert page.count("`flows.<name>.sink.lines`") == 1
    listed = python("-c", "import sys, headrace.pipelines.spec; print(*sys.modules)").stdout.split()
    heavy = {"pyspark", "psycopg", "confluent_kafka", "headrace.runtime", "headrace.kafka"}
    assert heavy & {*listed} == set()
    assert "lines_sink" in listed


@pytest.mark.heavy
def test_a_registered_sink_writes_the_rows_of_a_flow(python: Run, kafka: Any, tmp_path: Path) -> None:
    """Spark's driver finds it too, and plan and status have what it says of itself."""
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "1.json").write_text('{"id": 1}\n{"id": 2}\n')
    file = write(tmp_path)
    broker = "-b", kafka.bootstrap_servers
    planned = python("-m", "headrace.cli.main", "pipeline", "plan", file, *broker)
    assert "flow f <- given -> lines written.txt (append, at least once, line by line)" in planned.stdout, (
        planned.stderr
    )
    done = python("-m", "headrace.cli.main", "pipeline", "run", file, *broker, "--output", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["flows"]["f"]["sink"] == "lines written.txt"
    assert (tmp_path / "written.txt").read_text().splitlines() == ['{"id":2}', '{"id":3}']
