"""Active consumers are read while processes and brokers die: no commit passes a record that its client has not got.

The evidence is a journal of the client, with the answers that it has received completely, and the commits of the
group in the broker's own topic, all with times of one machine.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import confluent_kafka.admin
import pytest
from active_client import Instance

from headrace.records import OutgoingRecord
from headrace.testing.evidence import OFFSETS_TOPIC, by_partition, decode_commit
from headrace.testing.history import TICK_SECONDS, Commit
from headrace.testing.scene import Scene

PARTITIONS = 2
SETTINGS = {
    "wait_seconds": 0.2,
    "auto_commit_seconds": 0.05,
    "auto_offset_reset": "earliest",
    "consumer": {"session_timeout_seconds": 3},
}


class Got(NamedTuple):
    """An entry of an answer that its client has received completely."""

    at: float
    session: int
    """Number of the instance."""
    partition: int
    offset: int


def check_active(log: Sequence[tuple[int, int]], got: Sequence[Got], commits: dict[int, list[Commit]]) -> list[str]:
    """Return the violated promises, a sentence each.

    `ahead`: a commit passes a record that the client had not received; `passed`: a read of an instance passed over a
    record; `lost`: a record was never received.

    Args:
        log: Partition and offset of every record.
        got: In order of arrival.
        commits: Of each partition, in the order of the broker.
    """
    found = []
    first: dict[tuple[int, int], float] = {}
    last: dict[tuple[int, int], int] = {}
    for one in got:
        first.setdefault((one.partition, one.offset), one.at)
        before = last.get((one.session, one.partition))
        if before is not None and one.offset > before + 1:
            found.append(f"passed: {one.partition}:{one.offset} follows {before} in instance {one.session}")
        last[one.session, one.partition] = one.offset
    for partition, made in commits.items():
        for commit in made:
            late = [o for p, o in log if p == partition and o < commit.offset and not _is_before(first, p, o, commit)]
            if late:
                found.append(f"ahead: {partition}:{commit.offset} is committed, {late[:3]} had not arrived")
    missing = [record for record in log if record not in first]
    return [*found, *([f"lost: {missing[:3]} and in all {len(missing)}"] if missing else [])]


def _is_before(first: dict[tuple[int, int], float], partition: int, offset: int, commit: Commit) -> bool:
    return first.get((partition, offset), float("inf")) <= commit.at + TICK_SECONDS


class Reader:
    """A client that reads a topic to its end in a thread, creates its instance again, and keeps a journal."""

    def __init__(self, url: Callable[[], str], topic: str, *, auto: bool) -> None:
        self.got: list[Got] = []
        self.commits = 0
        self.sessions = 0
        self._url, self._topic, self._auto = url, topic, auto
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(100)
        assert not self._thread.is_alive(), "a request was never answered"

    def places(self) -> set[tuple[int, int]]:
        """Return what has arrived."""
        return {(one.partition, one.offset) for one in list(self.got)}

    def _run(self) -> None:
        instance: Instance | None = None
        while not self._stop.wait(0.01):
            try:
                if instance is None:
                    self.sessions += 1
                    instance = Instance(self._url(), self._topic, autoCommitEnable=self._auto)
                    instance.ok("POST", "/subscriptions", {"topics": [self._topic]})
                answer = instance("GET", "/records?timeout=500&max_records=20")
                if answer.status in (404, 410):
                    instance = None
                if answer.status == 200:
                    now = time.time()
                    self.got += [Got(now, self.sessions, r["partition"], r["offset"]) for r in answer.body]
                    if not self._auto and answer.body:
                        self.commits += instance("POST", "/offsets").status == 200
            except (AssertionError, OSError, ValueError, urllib.error.URLError, http.client.HTTPException):
                instance = None


class Bench(Scene):
    """A topic on a cluster, and what is known of its group."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        super().__init__(cluster.bootstrap_servers, folder)
        self.cluster, self.topic = cluster, f"active-{uuid.uuid4().hex[:8]}"
        self.written = 0
        cluster.create_topic(self.topic, PARTITIONS, {})

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration of a process."""
        return {**self.config, "active_consumers": SETTINGS}

    def append(self, count: int) -> None:
        """Write records to both partitions in turn."""
        numbers = range(self.written, self.written + count)
        self.written += count
        self.write(self.topic, *(OutgoingRecord(self.topic, None, b"%d" % n, None, n % PARTITIONS) for n in numbers))

    def commits(self) -> dict[int, list[Commit]]:
        """Return the commits of the group from the broker's topic."""
        found = (decode_commit(record) for record in self.records(OFFSETS_TOPIC))
        own = ((one.partition, one.commit) for one in found if one and one.group == one.partition.topic == self.topic)
        return {partition.partition: made for partition, made in by_partition(own).items()}

    def check(self, reader: Reader) -> list[str]:
        """Return the violated promises."""
        log = [(record.partition, record.offset) for record in self.records(self.topic)]
        assert len(log) == self.written
        return check_active(log, reader.got, self.commits())

    def wait_read(self, reader: Reader) -> None:
        """Wait until everything has arrived."""
        self.wait_until(lambda: len(reader.places()) >= self.written, "every record")

    def wait_committed_all(self) -> None:
        """Wait until the commits reach the end."""
        self.wait_until(lambda: sum(self.committed(self.topic).values()) == self.written, "the last commit")


@pytest.fixture
def bench(kafka: Any, tmp_path: Path) -> Bench:
    return Bench(kafka, tmp_path)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "auto", [pytest.param(False, id="explicit"), pytest.param(True, id="auto", marks=pytest.mark.long)]
)
def test_headrace_is_killed_while_it_is_read(bench: Bench, headrace: Any, auto: bool) -> None:
    """By kill -9: what was not committed is read again, and nothing is passed over."""
    running = [headrace(bench.settings)]
    with Reader(lambda: running[-1].url, bench.topic, auto=auto) as reader:
        bench.append(600)
        bench.wait_until(lambda: len(reader.places()) > 100, "records")
        running[-1].kill()
        running.append(headrace(bench.settings))
        bench.wait_read(reader)
        bench.wait_committed_all()
    assert bench.check(reader) == []
    assert reader.sessions >= 2
    assert bench.commits()
    assert running[-1].terminate() == 0


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "auto", [pytest.param(False, id="explicit"), pytest.param(True, id="auto", marks=pytest.mark.long)]
)
def test_a_paused_process_comes_back_after_its_session(bench: Bench, headrace: Any, auto: bool) -> None:
    """Another process takes over meanwhile; what the first one still commits counts for nothing."""
    paused, peer = headrace(bench.settings), headrace(bench.settings)
    bench.append(600)
    with Reader(lambda: paused.url, bench.topic, auto=auto) as first:
        bench.wait_until(lambda: len(first.places()) > 100, "records")
        paused.server.signal(signal.SIGSTOP)
        with Reader(lambda: peer.url, bench.topic, auto=auto) as second:
            bench.wait_until(lambda: len(second.places()) > 50, "the other member to read")
            bench.append(100)
            paused.server.signal(signal.SIGCONT)
            bench.wait_until(lambda: len(first.places() | second.places()) >= bench.written, "every record")
            bench.wait_committed_all()
    first.got = sorted([*first.got, *(one._replace(session=one.session + 1000) for one in second.got)])
    found = [text for text in bench.check(first) if not text.startswith("passed")]  # the other member has those between
    assert found == []
    for process in (paused, peer):
        assert process.terminate() == 0


COMMITS_WHAT_WAS_FETCHED = """
from headrace.sidecar.active.instance import ActiveInstance

arrived, commit = ActiveInstance.on_records, ActiveInstance.commit
fetched = {}

def on_records(self, partition, epoch, records):
    arrived(self, partition, epoch, records)
    fetched[partition] = records[-1].offset + 1

async def commit_fetched(self, *offsets, **how):
    self.positions.update(fetched)
    return await commit(self, *offsets, **how)

ActiveInstance.on_records, ActiveInstance.commit = on_records, commit_fetched
"""
CONFIRMS_AT_THE_READ = """
from headrace.sidecar.active.instance import ActiveInstance

real = ActiveInstance.read

async def read(self, **limits):
    found = await real(self, **limits)
    if found.records:
        self._confirmed.update({r.topic_partition: r.offset + 1 for r in found.records})
    return found

ActiveInstance.read = read
"""


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("mutant", "auto"),
    [("", False), ("", True), (COMMITS_WHAT_WAS_FETCHED, False), (CONFIRMS_AT_THE_READ, True)],
    ids=["right", "right-auto", "commits-what-was-fetched", "confirms-at-the-read"],
)
def test_the_checker_catches_a_headrace_that_is_broken(
    bench: Bench, headrace: Any, tmp_path: Path, mutant: str, auto: bool
) -> None:
    """A client reads some records, and does not receive its second answer; a process that is right commits less."""
    (tmp_path / "sitecustomize.py").write_text(mutant)
    process = headrace(
        bench.settings, env={"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])} if mutant else {}
    )
    large = [OutgoingRecord(bench.topic, None, json.dumps("\x01" * 20_000).encode(), None, 0) for _ in range(90)]
    bench.write(bench.topic, *large)
    bench.written += 90
    instance = Instance(process.url, bench.topic, autoCommitEnable=auto)
    instance.ok("POST", "/subscriptions", {"topics": [bench.topic]})
    reader = Reader(lambda: process.url, bench.topic, auto=auto)
    read = instance.first("&max_records=3")
    reader.got += [Got(time.time(), 1, one["partition"], one["offset"]) for one in read]
    if not auto:
        instance.ok("POST", "/offsets")
    stuck = instance.open(query="?timeout=20000&max_bytes=2000000", receive_bytes=4096)
    stuck.until(lambda data: len(data) > 10_000)
    bench.wait_until(lambda: bench.committed(bench.topic), "a commit")
    if mutant and auto:
        bench.wait_until(lambda: sum(bench.committed(bench.topic).values()) > 3, "the commit of what is read")
    found = {text.partition(":")[0] for text in bench.check(reader)}
    assert ("ahead" in found) == bool(mutant)
    stuck.cut()
    process.kill()


@pytest.mark.timeout(400)
@pytest.mark.heavy
@pytest.mark.parametrize(
    ("victim", "auto"),
    [
        ("leader", False),
        ("coordinator", True),
        pytest.param("leader", True, marks=pytest.mark.long),
        pytest.param("coordinator", False, marks=pytest.mark.long),
    ],
)
def test_a_broker_is_killed_while_its_group_reads(
    kafka_three: Any, headrace: Any, tmp_path: Path, victim: str, auto: bool
) -> None:
    """The instance lives on, and reads and commits to the end."""
    bench = Bench(kafka_three, tmp_path)
    process = headrace(bench.settings)
    with Reader(lambda: process.url, bench.topic, auto=auto) as reader:
        bench.append(300)
        bench.wait_until(lambda: bench.committed(bench.topic), "a commit")
        admin = confluent_kafka.admin.AdminClient({"bootstrap.servers": kafka_three.bootstrap_servers})
        if victim == "leader":
            number = int(admin.list_topics(bench.topic, timeout=60).topics[bench.topic].partitions[0].leader)
        else:
            number = int(admin.describe_consumer_groups([bench.topic])[bench.topic].result(60).coordinator.id)
        kafka_three.kill(number)
        bench.append(300)
        bench.wait_read(reader)
        bench.wait_committed_all()
        kafka_three.restart(number)
    assert bench.check(reader) == []
    assert process.terminate() == 0
