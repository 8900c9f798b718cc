"""`headrace pipeline run` and `show --watch` as people use them, on a real broker and a real Spark."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from yaml_table import table

from headrace.devcluster.jvm_server import Server

pytestmark = pytest.mark.heavy

FILE = table(__file__, "file")
LIMIT_SECONDS = 180.0


@pytest.mark.long
def test_a_file_runs_once_and_its_rows_are_shown_again_when_it_changes(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """A run with `once` ends by itself; a change of an SQL file shows its rows by the same Spark session."""
    source, target = topic(2), topic()
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in range(10):
        producer.produce(source, json.dumps({"plate": f"B {number}", "cents": number * 100}).encode())
    producer.flush(60)
    (tmp_path / "tolls.yaml").write_text(FILE.format(source=source, target=target))
    sql = tmp_path / "heavy.sql"
    sql.write_text("SELECT * FROM passages WHERE cents >= 800")
    command = [sys.executable, "-m", "headrace.cli.main", "pipeline"]
    servers = ["-b", kafka.bootstrap_servers]
    done = subprocess.run(
        [*command, "run", "tolls.yaml", *servers], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS
    )
    assert (done.returncode, done.stdout) == (0, "tolls: finished\n"), done.stderr
    written = subprocess.run(
        [sys.executable, "-m", "headrace.cli.main", "consume", target, *servers],
        cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_SECONDS,
    )  # fmt: skip
    assert sorted(written.stdout.splitlines()) == ['{"plate":"B 8"}', '{"plate":"B 9"}']

    watching = Server("show", tmp_path / "show.log")
    watching.start(
        [*command, "show", "tolls.yaml", "heavy_ones", "--watch", "--limit", "99", *servers],
        detached=False,
        cwd=tmp_path,
    )
    try:
        shown = tmp_path / "show.log"
        watching.wait_until(lambda: "2 rows in" in shown.read_text(), LIMIT_SECONDS)
        took = []
        for least in (700, 600, 500, 400):
            began = time.monotonic()
            sql.write_text(f"SELECT * FROM passages WHERE cents >= {least}")
            watching.wait_until(lambda rows=10 - least // 100: f"{rows} rows in" in shown.read_text(), LIMIT_SECONDS)
            took.append(round(time.monotonic() - began, 2))
        sql.write_text("SELECT * FROM passages WHERE cens >= 5")
        watching.wait_until(lambda: "unknown column cens" in shown.read_text(), LIMIT_SECONDS)
        sql.write_text("SELECT * FROM passages WHERE cents >= 0")
        watching.wait_until(lambda: "10 rows in" in shown.read_text(), LIMIT_SECONDS)
    finally:
        watching.kill()
    print(f"seconds from save to rows: {took}")
    assert min(took) < 10
