"""`headrace pipeline run` and `show --watch` as people use them, on a real broker and a real Spark."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.config.kafka import KafkaConfig
from headrace_devkit.devcluster.jvm_server import Server
from headrace_devkit.testing import Cluster, MakeTopic
from tests.integration.pipelines.test_pipelines import produce, records_of
from yaml_table import table

pytestmark = pytest.mark.heavy

FILE = table(__file__, "file")
LIMIT_SECONDS = 180.0


@pytest.mark.long
def test_a_file_runs_once_and_its_rows_are_shown_again_when_it_changes(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path
) -> None:
    """A run with `once` ends by itself; a change of an SQL file shows its rows by the same Spark session."""
    source, target = topic(2), topic()
    rows = (json.dumps({"plate": f"B {number}", "cents": number * 100}).encode() for number in range(10))
    produce(kafka.bootstrap_servers, source, rows)
    (tmp_path / "tolls.yaml").write_text(FILE.format(source=source, target=target))
    sql = tmp_path / "heavy.sql"
    sql.write_text("SELECT * FROM passages WHERE cents >= 800")

    def command(*words: str) -> list[str]:
        return [sys.executable, "-m", "headrace.cli.main", "pipeline", *words, "-b", kafka.bootstrap_servers]

    done = subprocess.run(
        command("run", "tolls.yaml"), cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "tolls: finished\n"), done.stderr
    written = asyncio.run(records_of(KafkaConfig(bootstrap_servers=kafka.bootstrap_servers), target))
    assert {record.value for record in written} == {b'{"plate":"B 8"}', b'{"plate":"B 9"}'}

    watching = Server("show", tmp_path / "show.log")
    watching.start(
        command("show", "tolls.yaml", "heavy_ones", "--watch", "--limit", "99"), detached=False, cwd=tmp_path
    )
    try:
        shown = "2 rows in"
        changes = {"cents >= 400": "6 rows in", "cens >= 5": "unknown column cens", "cents >= 0": "10 rows in"}
        for condition, expected in changes.items():
            watching.wait_until(lambda text=shown: text in watching.log.read_text(), LIMIT_SECONDS)
            sql.write_text(f"SELECT * FROM passages WHERE {condition}")
            shown = expected
        watching.wait_until(lambda: shown in watching.log.read_text(), LIMIT_SECONDS)
    finally:
        watching.kill()
