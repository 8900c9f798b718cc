"""Active consumers are read while processes and brokers die: no commit passes a record that its client has not got.

The recording is a journal of the client, with the responses that it has received completely, and the commits of the
group in the broker's own topic, all with times of one machine.
"""

from __future__ import annotations

import http.client
import signal
import threading
import time
import urllib.error
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from active_client import Instance

from headrace.records import OutgoingRecord
from headrace.testing.history import TICK_SECONDS, Commit
from headrace.testing.recording import OFFSETS_TOPIC, by_partition, decode_commit
from tests.faults.ledger import Ledger

PARTITIONS = 2
SETTINGS = {"auto_offset_reset": "earliest", "consumer": {"properties": {"session.timeout.ms": 3000}}}
OFTEN = {"auto.commit.interval.ms": 100}


class Got(NamedTuple):
    """An entry of a response that its client has received completely."""

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
                    instance = Instance(self._url(), self._topic, autoCommitEnable=self._auto, **OFTEN)
                    instance.ok("POST", "/subscriptions", {"topics": [self._topic]})
                response = instance("GET", "/records?timeout=500&max_records=20")
                if response.status in (404, 410):
                    instance = None
                if response.status == 200:
                    now = time.time()
                    self.got += [Got(now, self.sessions, r["partition"], r["offset"]) for r in response.body]
                    if not self._auto and response.body:
                        self.commits += instance("POST", "/offsets").status == 200
            except (AssertionError, OSError, ValueError, urllib.error.URLError, http.client.HTTPException):
                instance = None


class Bench(Ledger):
    """A topic on a cluster, and what is known of its group."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        super().__init__(cluster, folder)
        self.topic, self.written = self.new_topic(PARTITIONS), 0

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


@pytest.fixture
def bench(cluster: Any, tmp_path: Path) -> Bench:
    return Bench(cluster, tmp_path)


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
        bench.wait_committed_all(bench.topic, bench.topic)
    assert bench.check(reader) == []
    assert reader.sessions >= 2
    assert bench.commits()
    assert running[-1].terminate() == 0


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
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
            bench.wait_committed_all(bench.topic, bench.topic)
    first.got = sorted([*first.got, *(one._replace(session=one.session + 1000) for one in second.got)])
    found = [text for text in bench.check(first) if not text.startswith("passed")]  # the other member has those between
    assert found == []
    for process in (paused, peer):
        assert process.terminate() == 0


@pytest.mark.parametrize(
    ("wrong", "got", "committed"),
    [
        ([], [(1, 1, 0), (2, 1, 1), (3, 1, 2)], 3),
        ([], [(1, 1, 0), (2, 2, 0), (3, 2, 1), (3, 2, 2)], 3),
        (["ahead"], [(1, 1, 0), (2, 1, 1), (4, 1, 2)], 3),
        (["passed"], [(1, 1, 0), (2, 1, 2), (3, 2, 1)], 3),
        (["lost"], [(1, 1, 0), (2, 1, 1)], 2),
        (["ahead", "lost"], [(1, 1, 0), (2, 1, 1)], 3),
    ],
)
def test_the_checker_finds_what_is_wrong(wrong: list[str], got: list[tuple[int, int, int]], committed: int) -> None:
    """Second, session and offset of each record that arrived; the commit is made between the third and the fourth."""
    arrived = [Got(at, session, 0, offset) for at, session, offset in got]
    found = check_active([(0, n) for n in range(3)], arrived, {0: [Commit(3.5, committed)]})
    assert [text.partition(":")[0] for text in found] == wrong


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.heavy
@pytest.mark.parametrize("auto", [False, True], ids=["explicit", "auto"])
@pytest.mark.parametrize("victim", ["leader", "coordinator"])
def test_a_broker_is_killed_while_its_group_reads(
    kafka_three: Any, bench: Bench, headrace: Any, victim: str, auto: bool
) -> None:
    """The instance lives on, and reads and commits to the end."""
    process = headrace(bench.settings)
    with Reader(lambda: process.url, bench.topic, auto=auto) as reader:
        bench.append(300)
        bench.wait_until(lambda: bench.committed(bench.topic), "a commit")
        number = bench.leader_of(bench.topic) if victim == "leader" else bench.coordinator_of(bench.topic)
        kafka_three.kill(number)
        bench.append(300)
        bench.wait_read(reader)
        bench.wait_committed_all(bench.topic, bench.topic)
        kafka_three.restart(number)
    assert bench.check(reader) == []
    assert process.terminate() == 0
