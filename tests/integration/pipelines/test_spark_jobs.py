"""A plain PySpark job writes by `headrace-kafka`: each record once over kills, and no old checkpoint."""

from __future__ import annotations

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

from headrace_devkit.testing import Cluster, MakeTopic
from headrace_devkit.testing.scenario import Scenario
from headrace_jvm import ensure_artifacts, find_java
from tests.integration.pipelines.test_pipelines import produce

pytestmark = pytest.mark.heavy

JOB = Path(__file__).parents[2] / "plain_spark_job.py"
PER_BATCH = 100
_END_SECONDS = 240.0


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
        self._consumer = confluent_kafka.Consumer({"bootstrap.servers": servers, "group.id": target})
        self._target = target

    def start(self, checkpoint: Path | None = None) -> subprocess.Popen[bytes]:
        words = [*self._before, str(checkpoint or self.checkpoint), *self._after]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(JOB), *words], stdout=log, stderr=log, env=self._env, start_new_session=True
            )

    def end_offset(self) -> int:
        """Return the end of the target, with records of transactions that are open or were aborted."""
        partition = confluent_kafka.TopicPartition(self._target, 0)
        return int(self._consumer.get_watermark_offsets(partition, 10)[1])

    def kill_after(self, records: int) -> None:
        """Start the job, and end it hard as soon as it has written so many records more: a transaction is open."""
        process, begin, end = self.start(), self.end_offset(), time.monotonic() + _END_SECONDS
        while self.end_offset() < begin + records:
            assert process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < end, self.log.read_text()[-4000:]
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.long)])
@pytest.mark.timeout(900)
def test_each_record_is_written_once_over_kills(
    kafka: Cluster, topic: MakeTopic, site: Scenario, tmp_path: Path, kills: int
) -> None:
    """For readers at read_committed. An old copy of the checkpoint is refused, and nothing is written."""
    source, target, old = topic(2), topic(1), tmp_path / "old"
    values = [b"%d" % number for number in range((kills + 3) * PER_BATCH)]
    produce(kafka.bootstrap_servers, source, values)
    job = PlainJob(kafka.bootstrap_servers, source, target, tmp_path)
    for number in range(kills):
        job.kill_after(PER_BATCH + 7 * number)
        if not old.exists():
            shutil.copytree(job.checkpoint, old)
    assert job.start().wait(_END_SECONDS) == 0, job.log.read_text()[-4000:]
    assert Counter(record.value for record in site.records(target)) == Counter(values)
    assert job.start(old).wait(_END_SECONDS) == 1
    assert "the checkpoint is an old copy" in job.log.read_text()
    assert len(site.records(target)) == len(values)
