"""Pipelines on a real broker and a real Spark: exact results over crashes, bad records, clean ends."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import signal
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest

from headrace.config.kafka import KafkaConfig, SchemaRegistryConfig
from headrace.control.lag import lag_of
from headrace.kafka import Admin, read_records
from headrace.lifecycle import Deadline, Service, SystemClock
from headrace.pipelines.connector import ConnectorSecurity
from headrace.pipelines.driver.plan import DriverPlan, FolderInUse
from headrace.pipelines.process import DriverProcess, find_toolchain
from headrace.pipelines.runs import PipelineRun
from headrace.pipelines.spec import PipelineSpec

pytestmark = pytest.mark.heavy

LIMIT_SECONDS = 180.0
FLIGHTS = 12_000
SCHEMA = "id INT, carrier STRING, hour INT, arr_delay DOUBLE"
BAD = [b"{bad", b"[]", b'{"id": "many"}', b"", b'"text"']


def flight(number: int) -> dict[str, Any]:
    delay = number % 200 if number % 30 else None
    return {"id": number, "carrier": f"C{number % 16}", "hour": number // 1000, "arr_delay": delay}


def produce(servers: str, topic: str, values: Iterable[bytes | None]) -> None:
    producer = confluent_kafka.Producer({"bootstrap.servers": servers, "queue.buffering.max.messages": 1_000_000})
    for number, value in enumerate(values):
        producer.produce(topic, key=f"k{number}", value=value)
        producer.poll(0)
    assert producer.flush(120) == 0


def produce_flights(servers: str, topic: str, numbers: range) -> None:
    produce(servers, topic, (json.dumps(flight(number)).encode() for number in numbers))


async def rows(kafka: KafkaConfig, topic: str) -> list[tuple[bytes | None, dict[str, Any]]]:
    """Return everything in a topic: key and value, in order within each partition."""
    offsets = await Admin(kafka).topic_offsets(topic)
    starts = {where: start for where, (start, _) in offsets.items()}
    ends = {where: end for where, (_, end) in offsets.items()}
    return [
        (record.key, json.loads(record.value or b"null"))
        async for batch in read_records(kafka, starts, ends)
        for record in batch
    ]


async def until(there: Callable[[], object], run: PipelineRun, limit_seconds: float = LIMIT_SECONDS) -> None:
    end = time.monotonic() + limit_seconds
    while not there():
        assert time.monotonic() < end, run.status()
        await asyncio.sleep(0.02)


def in_group(leader: int) -> list[int]:
    """Return the processes of a process group that have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, group = (entry / "stat").read_text().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if int(group) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def gone(leader: int, limit_seconds: float = 60.0) -> bool:
    end = time.monotonic() + limit_seconds
    while in_group(leader):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@asynccontextmanager
async def running(
    spec: Mapping[str, Any], kafka: KafkaConfig, folder: Path, registry: str = "http://localhost:8081"
) -> AsyncIterator[PipelineRun]:
    settings = SchemaRegistryConfig(url=registry)
    run = PipelineRun(PipelineSpec.model_validate(spec), kafka, folder, SystemClock(), Admin(kafka), settings)
    await run.start()
    try:
        yield run
    finally:
        await run.stop()


def read(run: PipelineRun, flow: str) -> int:
    return run.counts(flow)["read"]


def test_results_are_exact_over_a_killed_driver(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """An aggregate's newest row per key and a filter's rows are exact although the driver was killed in between;
    records that are no rows are counted and stop nothing; a drain leaves no process and no lag."""
    source, totals, late = topic(3), f"{topic()}-totals", f"{topic()}-late"
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    spec = {
        "name": "exact",
        "trigger": {"interval_seconds": 0.1, "max_records": 4000},
        "sources": {"flights": {"topic": source, "schema": SCHEMA}},
        "flows": {
            "totals": {
                "sql": "SELECT carrier, hour, count(*) AS flights, max(arr_delay) AS worst FROM flights "
                "GROUP BY carrier, hour",
                "sink": {"topic": totals, "key": "concat(carrier, '|', hour)"},
            },
            "late": {"sql": "SELECT * FROM flights WHERE arr_delay >= 120", "sink": {"topic": late, "key": "id"}},
        },
    }

    async def main() -> None:
        async with running(spec, settings, tmp_path) as run:
            await until(lambda: 0 < read(run, "totals") < FLIGHTS, run)
            first = run.status()["driver_pid"]
            os.kill(first, signal.SIGKILL)
            await until(lambda: "exit code -9" in run.readiness().reason, run)
            assert gone(first)
            await until(lambda: run.readiness().ready, run)
            await until(lambda: all(flow["lag_records"] == 0 for flow in run.status()["flows"].values()), run)
            before = {flow: read(run, flow) for flow in ("totals", "late")}
            produce(kafka.bootstrap_servers, source, [*BAD, None])
            await until(lambda: all(read(run, flow) == before[flow] + 6 for flow in before), run)
            for flow in before:
                assert run.counts(flow) | {"read": 0} == {"read": 0, "corrupt": len(BAD), "tombstone": 1}
            assert run.status()["restarts"] == 1
            last = run.status()["driver_pid"]
            await run.drain(Deadline(SystemClock(), 100))
            assert gone(last)
        newest = dict(await rows(settings, totals))
        wanted = Counter((flight(n)["carrier"], flight(n)["hour"]) for n in range(FLIGHTS))
        assert {(row["carrier"], row["hour"]): row["flights"] for row in newest.values()} == dict(wanted)
        assert all(key == f"{row['carrier']}|{row['hour']}".encode() for key, row in newest.items())
        delayed = {str(n).encode(): flight(n) for n in range(FLIGHTS) if (flight(n)["arr_delay"] or 0) >= 120}
        assert dict(await rows(settings, late)) == delayed
        admin = Admin(settings)
        assert len((await admin.describe_topic(late)).partitions) == 3
        for flow in ("totals", "late"):
            lag = await lag_of(admin, f"headrace.exact.{flow}")
            assert len(lag) == 3
            assert sum(entry.lag for entry in lag) == 0
            assert sum(entry.committed or 0 for entry in lag) == FLIGHTS + 6

    produce_flights(kafka.bootstrap_servers, source, range(FLIGHTS))
    asyncio.run(main())


@pytest.mark.long
def test_once_takes_what_is_there_and_goes_on_later(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """Views, the key and timestamp columns and a watermark work; a second run reads only what is new; nulls stay."""
    source, out = topic(), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    spec = {
        "name": "once",
        "trigger": {"once": True},
        "sources": {
            "flights": {"topic": source, "schema": SCHEMA, "key_column": "k", "timestamp_column": "written_at"}
        },
        "views": {"known": "SELECT * FROM early WHERE id <> 3", "early": "SELECT * FROM flights WHERE hour < 10"},
        "flows": {
            "copy": {"sql": "SELECT id, arr_delay, k FROM known", "sink": {"topic": out, "mode": "append"}},
            "windows": {
                "sql": "SELECT window(written_at, '1 second') AS w, count(*) AS n "
                "FROM STREAM known WATERMARK written_at DELAY OF INTERVAL 1 SECOND GROUP BY 1",
                "sink": {"topic": topic(), "mode": "append"},
            },
        },
    }

    async def main() -> None:
        async with running(spec, settings, tmp_path) as run:
            await until(lambda: run.status()["state"] == "finished", run)
            assert run.readiness().ready
            await until(lambda: run.status()["driver_pid"] is None, run)
        wanted = [(None, {"id": n, "arr_delay": flight(n)["arr_delay"], "k": f"k{n}"}) for n in (0, 1, 2, 4)]
        assert await rows(settings, out) == wanted
        produce(kafka.bootstrap_servers, source, [json.dumps(flight(7)).encode()])
        async with running(spec, settings, tmp_path) as run:
            await until(lambda: run.status()["state"] == "finished", run)
            assert read(run, "copy") == 1
        assert (await rows(settings, out))[4:] == [(None, {"id": 7, "arr_delay": 7.0, "k": "k0"})]

    produce_flights(kafka.bootstrap_servers, source, range(5))
    asyncio.run(main())


@pytest.mark.long
def test_a_backlog_of_ten_millions_is_read_in_bounded_batches(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """No micro-batch takes more than `max_records`, each record counts once, and the driver with its JVM stays below
    2 GiB whatever waits."""
    backlog, most = 10_000_000, 500_000
    source, out = topic(4), topic()
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    spec = {
        "name": "backlog",
        "trigger": {"once": True, "max_records": most},
        "sources": {"flights": {"topic": source, "schema": "id INT"}},
        "flows": {
            "f": {"sql": "SELECT id, count(*) AS n FROM flights GROUP BY id", "sink": {"topic": out, "key": "id"}}
        },
    }

    async def main() -> None:
        seen = {-1: 0}
        most_bytes = 0
        async with running(spec, settings, tmp_path) as run:
            end = time.monotonic() + 540
            while run.status()["state"] != "finished":
                assert time.monotonic() < end, run.status()
                flow = run.status()["flows"]["f"]
                seen[flow["batch_id"]] = flow["input_records"]
                if pid := run.status()["driver_pid"]:
                    most_bytes = max(most_bytes, sum(map(resident_bytes, in_group(pid))))
                await asyncio.sleep(0.1)
            assert read(run, "f") == backlog
        batches = sorted(seen.items())
        assert len(batches) > backlog / most / 2
        assert all(
            records - before <= most * (batch - last)
            for (last, before), (batch, records) in itertools.pairwise(batches)
        )
        assert 0 < most_bytes < 2 << 30
        newest = {row["id"]: row["n"] for _, row in await rows(settings, out)}
        assert (len(newest), sum(newest.values())) == (10, backlog)

    values = [b'{"id": %d}' % number for number in range(10)]
    for _ in range(20):  # each fits the producer's queue
        produce(kafka.bootstrap_servers, source, (values[number % 10] for number in range(backlog // 20)))
    asyncio.run(main())


def resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


@pytest.mark.long
async def test_wrong_sql_is_told_and_not_tried_again(kafka: Any, topic: Any, tmp_path: Path) -> None:
    """Spark's own name of the error and the part of the file stand in readiness."""
    settings = KafkaConfig(bootstrap_servers=kafka.bootstrap_servers)
    spec = {
        "name": "wrong",
        "sources": {"flights": {"topic": topic(), "schema": SCHEMA}},
        "flows": {"f": {"sql": "SELECT carier FROM flights", "sink": {"topic": topic()}}},
    }
    async with running(spec, settings, tmp_path) as run:
        await until(lambda: run.status()["state"] == "failed", run)
        assert "flows.f: UNRESOLVED_COLUMN.WITH_SUGGESTION" in run.readiness().reason
        assert "`carrier`" in run.readiness().reason
        assert "View" not in run.readiness().reason


@pytest.mark.long
async def test_a_driver_waits_for_the_one_before_it(kafka: Any, tmp_path: Path) -> None:
    """Two drivers never use one folder at the same time; one that waits ends at once when told."""
    spec = PipelineSpec.model_validate(
        {
            "name": "p",
            "sources": {"a": {"topic": "a", "schema": "x INT"}},
            "flows": {"f": {"sql": "SELECT * FROM a", "sink": {"topic": "b"}}},
        }
    )
    owner = Service("test")
    toolchain = await find_toolchain()
    plan = DriverPlan(spec=spec, bootstrap_servers=kafka.bootstrap_servers, folder=tmp_path, jars=toolchain.jars)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        driver = await DriverProcess.start(owner, plan, toolchain, ConnectorSecurity({}, {}, frozenset()))
        assert await anext(driver.events()) == FolderInUse("another process")
        await driver.stop(Deadline(SystemClock(), 60))
        assert await driver.exit_code() == 0
    assert gone(driver.pid)


@pytest.mark.long
def test_a_missing_topic_keeps_headrace_alive_and_its_death_leaves_nothing(
    kafka: Any, topic: Any, headrace: Any, tmp_path: Path
) -> None:
    """Readiness names the missing topic, the run begins when it is there; kill -9 of the parent ends Spark too."""
    source = f"{topic()}-later"
    file = tmp_path / "late.yaml"
    file.write_text(
        f"name: late\nsources:\n  a: {{topic: {source}, schema: x INT}}\n"
        f"flows:\n  f: {{sql: SELECT * FROM a, sink: {{topic: {source}-out}}}}\n"
    )
    process = headrace({"kafka": {"bootstrap_servers": kafka.bootstrap_servers}, "pipelines": [str(file)]}, wait=False)
    end = time.monotonic() + 120
    while f"topic {source} does not exist" not in readiness(process.url):
        assert time.monotonic() < end, process.output
        time.sleep(0.05)
    kafka.create_topic(source, 2)
    process.wait_ready(LIMIT_SECONDS)
    assert len(working_below(tmp_path)) >= 3  # Headrace, driver, JVM
    process.kill()
    end = time.monotonic() + 60
    while left := working_below(tmp_path):
        assert time.monotonic() < end, left
        time.sleep(0.05)


def readiness(url: str) -> str:
    try:
        with urllib.request.urlopen(f"{url}/health/readiness", timeout=60) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as refusal:
        return str(refusal.read().decode())
    except OSError:
        return ""


def working_below(folder: Path) -> list[int]:
    """Return the processes whose working folder lies in a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and (entry / "cwd").readlink().is_relative_to(folder):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
