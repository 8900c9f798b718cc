"""Pipelines under attack, on a real broker and a real Spark: strange records, new partitions, Python that fails."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from headrace.config.kafka import KafkaConfig
from headrace.runtime import Deadline, SystemClock
from headrace_devkit.testing import Cluster, MakeTopic
from tests.integration.pipelines.test_pipelines import produce, read, records_of, running, until

pytestmark = [pytest.mark.heavy, pytest.mark.long]


async def committed(servers: str, topic: str) -> list[dict[str, Any]]:
    """Return the values of a topic as a reader at `read_committed` has them."""
    return [json.loads(r.value or b"null") for r in await records_of(KafkaConfig(bootstrap_servers=servers), topic)]


async def test_partitions_that_are_added_during_a_run_are_read_once(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path
) -> None:
    """Their records are in the topic of each sink exactly once, over a driver that is killed; the digest holds."""
    source, out = topic(1), f"{topic()}-out.dotted-name"
    servers = kafka.bootstrap_servers
    exact = {"topic": out, "delivery": "exactly_once", "key": "id"}
    spec = {
        "name": "grown",
        "trigger": {"interval_seconds": 0.1, "max_records": 700},
        "sources": {"a": {"topic": source, "schema": "id INT", "starting": "latest"}},
        "flows": {
            "one": {"sql": "SELECT id, 1 AS flow FROM a", "sink": exact},
            "two": {"sql": "SELECT id, 2 AS flow FROM a", "sink": {**exact, "scope": "task"}},
        },
    }

    def send(numbers: range, partition: int) -> None:
        producer = confluent_kafka.Producer({"bootstrap.servers": servers, "topic.metadata.refresh.interval.ms": 200})
        for number in numbers:
            producer.produce(source, b'{"id": %d}' % number, partition=partition)
        assert producer.flush(60) == 0

    async with running(spec, KafkaConfig(bootstrap_servers=servers), tmp_path) as run:
        await until(lambda: run.readiness().ready, run)
        send(range(1000), 0)
        await until(lambda: run.counts("one")["read"] > 0, run)
        admin = AdminClient({"bootstrap.servers": servers})
        admin.create_partitions([NewPartitions(source, 4)])[source].result(30)
        for partition in (1, 2, 3):
            send(range(partition * 1000, partition * 1000 + 1000), partition)
        os.kill(run.status()["driver_pid"], signal.SIGKILL)
        send(range(4000, 5000), 3)
        await until(lambda: run.status()["restarts"] == 1 and run.readiness().ready, run)
        await until(lambda: all(flow["lag_records"] == 0 for flow in run.status()["flows"].values()), run)
        await run.drain(Deadline(SystemClock(), 60))
    found = Counter((row["flow"], row["id"]) for row in await committed(servers, out))
    assert found == Counter((flow, number) for flow in (1, 2) for number in range(5000))


async def test_partitions_that_are_added_are_read_in_real_time_mode(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path
) -> None:
    """From the next checkpoint on, from their beginning; no record is lost."""
    source, out, settings = topic(1), topic(), KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    spec = {
        "name": "quick",
        "trigger": {"realtime": True, "checkpoint_seconds": 5},
        "sources": {"a": {"topic": source, "schema": "id INT", "starting": "earliest"}},
        "flows": {"f": {"sql": "SELECT id FROM a", "sink": {"topic": out}}},
        "driver": {"cores": 4},
    }
    async with running(spec, settings, tmp_path) as run:
        produce(kafka.bootstrap_servers, source, [b'{"id": %d}' % number for number in range(100)])
        await until(lambda: run.readiness().ready, run)
        admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
        admin.create_partitions([NewPartitions(source, 3)])[source].result(30)
        producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
        for number in range(100, 400):
            producer.produce(source, b'{"id": %d}' % number, partition=number % 3)
        assert producer.flush(60) == 0
        await until(lambda: read(run, "f") >= 400, run)
        assert run.status()["restarts"] == 0
    assert {row["id"] for row in await committed(kafka.bootstrap_servers, out)} == {*range(400)}


@pytest.mark.parametrize("how", ["raise ValueError(number)", "os._exit(3)"])
async def test_python_that_always_fails_ends_its_flow(
    kafka: Cluster, topic: MakeTopic, tmp_path: Path, how: str
) -> None:
    """The rows of the micro-batch come again a bounded number of times. The flow continues when the code is correct."""
    source, out, settings = topic(1), topic(), KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    code = "import os\n\nfrom pyspark.sql.functions import udf\n\n\ndef checked(number):\n{}    return number\n\n\n"
    code += "def view(a):\n    return a.select(udf(checked, 'int')('id').alias('id'))\n"
    (tmp_path / "steps.py").write_text(code.format(f"    if number == 99:\n        {how}\n"))
    spec = {
        "name": "hostile",
        "folder": str(tmp_path),
        "trigger": {"max_records": 100},
        "sources": {"a": {"topic": source, "schema": "id INT"}},
        "views": {"b": {"python": "steps:view", "reads": ["a"]}},
        "flows": {"f": {"sql": "SELECT id FROM b", "sink": {"topic": out}}},
    }
    produce(kafka.bootstrap_servers, source, [b'{"id": %d}' % number for number in range(150)])
    async with running(spec, settings, tmp_path) as run:
        await until(lambda: run.status()["state"] == "failed" or run.status()["restarts"] > 9, run)
        reason = run.readiness().reason
        assert (run.status()["state"], run.status()["restarts"]) == ("failed", 4), run.status()
        assert "flows.f: PYTHON_FAILED: " in reason
        assert "It failed 5 times in the same micro-batch. Correct the code" in reason
        (tmp_path / "steps.py").write_text(code.format(""))
        run.resume()
        await until(lambda: run.readiness().ready and read(run, "f") == 150, run)
        await run.drain(Deadline(SystemClock(), 60))
    found = Counter(row["id"] for row in await committed(kafka.bootstrap_servers, out))
    assert set(found) == set(range(150))
    assert max(found.values()) <= 6
