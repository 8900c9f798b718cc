"""A plain PySpark job writes by `headrace-kafka`: each record once over kills, and no old checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, OffsetSpec

from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.scenario import Scenario
from headrace_jvm import ensure_artifacts, find_java
from tests.integration.pipelines.test_pipelines import produce

pytestmark = [pytest.mark.heavy, pytest.mark.long]

JOB = Path(__file__).parents[2] / "plain_spark_job.py"
PER_BATCH = 100
_END_SECONDS = 240.0
CALLS = """
from pathlib import Path

def keep(rows, number):
    Path(__file__).with_name("kept").write_text(f"{number} {rows.count()}")
"""


class PlainJob:
    """A job from one topic to another, started again with its checkpoint as often as a test wants."""

    def __init__(self, servers: str, source: str, target: str, folder: Path) -> None:
        self.checkpoint = folder / "checkpoint"
        self.log = folder / "job.log"
        jars = os.pathsep.join(map(str, sorted(ensure_artifacts("spark").glob("*.jar"))))
        self._before = [servers, source, target]
        self._after = [jars, str(PER_BATCH)]
        self._env = {**os.environ, "JAVA_HOME": str(find_java(17, for_spark=True).home)}
        self._env["PYSPARK_PYTHON"] = sys.executable
        self._admin = AdminClient({"bootstrap.servers": servers})
        self._target = target

    def start(self, checkpoint: Path | None = None) -> subprocess.Popen[bytes]:
        words = [*self._before, str(checkpoint or self.checkpoint), *self._after]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(JOB), *words], stdout=log, stderr=log, env=self._env, start_new_session=True
            )

    def end_offset(self) -> int:
        """Return the end of the target, with records of transactions that are open or were aborted."""
        asked = {confluent_kafka.TopicPartition(self._target, 0): OffsetSpec.latest()}  # type: ignore[no-untyped-call]
        [found] = self._admin.list_offsets(asked, request_timeout=_END_SECONDS).values()
        return int(found.result().offset)

    def kill_after(self, records: int) -> None:
        """Start the job, and end it hard as soon as it has written so many records more: a transaction is open."""
        process, begin, end = self.start(), self.end_offset(), time.monotonic() + _END_SECONDS
        try:
            while self.end_offset() < begin + records:
                assert process.poll() is None, self.log.read_text()[-4000:]
                assert time.monotonic() < end, self.log.read_text()[-4000:]
                time.sleep(0.005)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def ended(self, checkpoint: Path | None = None) -> int:
        """Run the job to its end, and return its exit code."""
        process = self.start(checkpoint)
        try:
            return process.wait(_END_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("kills", [2, 12])
@pytest.mark.timeout(900)
def test_each_record_is_written_once_over_kills(
    kafka: Cluster, topic: MakeTopic, site: Scenario, tmp_path: Path, kills: int
) -> None:
    """For readers at read_committed. An old copy of the checkpoint is refused, and nothing is written."""
    source, target, old = topic(2), topic(1), tmp_path / "old"
    values = [b"%d" % number for number in range((2 * kills + 3) * PER_BATCH)]
    produce(kafka.bootstrap_servers, source, values)
    job = PlainJob(kafka.bootstrap_servers, source, target, tmp_path)
    for number in range(kills):
        job.kill_after(PER_BATCH + 7 * number)
        if not old.exists():
            shutil.copytree(job.checkpoint, old)
    assert job.ended() == 0, job.log.read_text()[-4000:]
    assert Counter(record.value for record in site.records(target)) == Counter(values)
    assert job.ended(old) == 1
    assert "the checkpoint is an old copy" in job.log.read_text()
    assert len(site.records(target)) == len(values)


def test_rows_go_to_a_format_and_to_a_function(kafka: Cluster, tmp_path: Path) -> None:
    """Paths are relative to the pipeline file. A format that is missing, and a function that fails, are named."""
    (tmp_path / "given").mkdir()
    (tmp_path / "given/1.json").write_text('{"id": 1}\n{"id": 2}\n')
    (tmp_path / "calls.py").write_text(CALLS)

    def run(**sinks: dict[str, object]) -> subprocess.CompletedProcess[str]:
        flows = {name: {"sql": "SELECT id FROM given", "sink": sink} for name, sink in sinks.items()}
        sources = {"given": {"files": "given", "format": "json", "schema": "id INT"}}
        spec = {"name": "sinks", "trigger": {"once": True}, "sources": sources, "flows": flows}
        (tmp_path / "p.yaml").write_text(json.dumps(spec))
        words = [sys.executable, "-m", "headrace.cli.main", "pipeline", "run", "p.yaml", "-b", kafka.bootstrap_servers]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    done = run(stored={"format": "json", "options": {"path": "stored"}}, called={"python": "calls:keep"})
    assert done.returncode == 0, done.stderr
    assert [file.read_text() for file in (tmp_path / "stored").glob("*.json")] == ['{"id":1}\n{"id":2}\n']
    assert (tmp_path / "kept").read_text() == "0 2"
    missing = run(other={"format": "nosuch"})
    assert missing.returncode
    assert "nosuch" in missing.stderr, missing.stderr
    failed = run(another={"python": "calls:keeps"})
    assert failed.returncode
    assert "does not define keeps" in failed.stderr, failed.stderr
