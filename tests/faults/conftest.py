"""What fault tests share: a client that writes a history, a watch on commits, and the checks, all apart from Headrace.

The checks read the topics and the group's offsets themselves and believe nothing that Headrace says of its own work.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from headrace.control.lag import lag_of
from headrace.errors import HeadraceError, NotFound
from headrace.records import Record
from headrace.testing import RecordingBackend
from headrace.testing.scene import Scene
from tests.faults.push_scene import PushScene

_LONG_REPETITIONS = 3
_PATIENCE_SECONDS = 150.0
_PACE_SECONDS = 0.01


class Acknowledged(NamedTuple):
    """What a client was told: this id is at this place."""

    id: int
    partition: int
    offset: int


class Poster:
    """Posts records with running ids, in a thread, and keeps what was acknowledged."""

    def __init__(self, url: str, topic: str, batch: int = 20, *, keyed: bool = False) -> None:
        """Post batches to a topic; `keyed` gives each a key, so that it is written in a transaction."""
        self.acknowledged: list[Acknowledged] = []
        self.refused: list[int] = []
        self.unknown: list[int] = []
        self._url = f"{url}/producers/{topic}"
        self._batch = batch
        self._keyed = keyed
        self._ids = itertools.count()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Poster:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "a request was never answered"

    def wait_for(self, acknowledged: int, limit_seconds: float = _PATIENCE_SECONDS) -> None:
        """Wait until so many records are acknowledged."""
        wait_until(lambda: len(self.acknowledged) >= acknowledged, limit_seconds, "acknowledgements")

    def wait_for_more(self, records: int = 200) -> None:
        """Wait until so many more are acknowledged than now."""
        self.wait_for(len(self.acknowledged) + records)

    def _run(self) -> None:
        while not self._stop.wait(_PACE_SECONDS):  # else a slow machine gets more and more to do
            ids = list(itertools.islice(self._ids, self._batch))
            records = [{"key": str(number % 50), "value": {"id": number}} for number in ids]
            body = json.dumps({"records": records}).encode()
            request = urllib.request.Request(self._url, body, {"Content-Type": "application/json"})
            if self._keyed:
                request.add_header("Idempotency-Key", f"ids-from-{ids[0]}")
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    self._note(ids, json.load(answer)["offsets"])
            except urllib.error.HTTPError as error:
                with error:
                    self._note(ids, json.load(error).get("offsets"))
            except (OSError, ValueError, http.client.HTTPException):
                self.unknown += ids
                self._stop.wait(0.05)

    def _note(self, ids: list[int], offsets: list[dict[str, Any]] | None) -> None:
        if offsets is None:  # refused as a whole: nothing was sent
            self.refused += ids
            self._stop.wait(0.05)
            return
        for number, entry in zip(ids, offsets, strict=True):
            if "offset" in entry:
                self.acknowledged.append(Acknowledged(number, entry["partition"], entry["offset"]))
            elif entry["outcome"] == "fail":
                self.refused.append(number)
            else:
                self.unknown.append(number)


class Ledger(Scene):
    """Reads topics and committed offsets."""

    def __init__(self, bootstrap_servers: str) -> None:
        super().__init__(bootstrap_servers, Path())

    def lag(self, group: str) -> int:
        """Return how far a group is behind, over all partitions of its topics; -1 before its first commit."""
        try:
            found = asyncio.run(lag_of(self.admin, group))
        except NotFound:
            found = []
        return sum(entry.lag for entry in found) if found else -1

    def check_acknowledged(self, topic: str, poster: Poster) -> None:
        """Every acknowledged id is at its place, no id twice, none that was refused for certain, none from nowhere."""
        records = self.records(topic)
        place_of = {id_of(record): (record.partition, record.offset) for record in records}
        wrong = [ack for ack in poster.acknowledged if place_of.get(ack.id) != (ack.partition, ack.offset)]
        assert wrong == [], f"{len(wrong)} acknowledged records are not at their place"
        assert len(place_of) == len(records), "a record is in the topic twice"
        ghosts = set(place_of) & set(poster.refused)
        assert not ghosts, f"{len(ghosts)} records that were refused for certain are there"
        known = {ack.id for ack in poster.acknowledged} | set(poster.unknown)
        assert set(place_of) <= known

    def missing(self, topic: str, delivered: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return what is in the topic now and was not delivered; a record whose outcome is unknown may come late."""
        return {(record.partition, record.offset) for record in self.records(topic)} - delivered

    def check_delivered(self, topic: str, delivered: set[tuple[int, int]]) -> None:
        """Every record of the topic was delivered at least once."""
        missing = self.missing(topic, delivered)
        assert not missing, f"{len(missing)} records were never delivered: {sorted(missing)[:5]}"


class CommitWatch:
    """Looks at a group's commits all the time: below each of them everything must have been delivered."""

    def __init__(self, ledger: Ledger, group: str, backend: RecordingBackend) -> None:
        self.looks = 0
        self.violations: list[str] = []
        self._ledger, self._group, self._backend = ledger, group, backend
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> CommitWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(_PATIENCE_SECONDS)

    def wait_for_more(self, looks: int = 3) -> None:
        """Wait until it has looked so many times more."""
        wanted = self.looks + looks
        wait_until(lambda: self.looks >= wanted, _PATIENCE_SECONDS, "looks at the commits")

    def _run(self) -> None:
        while not self._stop.wait(0.1):
            try:
                committed = self._ledger.committed(self._group)
            except HeadraceError:
                continue  # a broker is down just now
            # Read after the commit, so what it covers must be in it already.
            delivered = delivered_by(self._backend)
            self.looks += 1
            for partition, offset in committed.items():
                passed = [o for o in range(offset) if (partition.partition, o) not in delivered]
                if passed:
                    self.violations.append(f"{partition}: {offset} is committed, {passed[:3]} are not delivered")


def delivered_by(backend: RecordingBackend) -> set[tuple[int, int]]:
    """Return the places of all records the backend said it had processed."""
    return {(record["partition"], record["offset"]) for record in list(backend.accepted)}


def id_of(record: Record) -> int:
    """Return the id a poster gave to a record."""
    return int(json.loads(record.value or b"")["id"])


def wait_until(condition: Callable[[], object], limit_seconds: float, what: str) -> None:
    """Wait for a condition; the limit allows for a busy machine."""
    Scene.wait_until(condition, what, limit_seconds)


class Bed:
    """The pieces, for tests that cannot import this file by name."""

    Poster, Ledger, CommitWatch = Poster, Ledger, CommitWatch
    delivered_by, id_of, wait_until = staticmethod(delivered_by), staticmethod(id_of), staticmethod(wait_until)

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def copy_function(self, source: str, target: str, workers: int = 2) -> str:
        """Write a function that copies its events to a topic. Returns its file."""
        folder = self.folder / "copy"
        folder.mkdir()
        (folder / "copy_event.py").write_text("def handler(context, event):\n    return event.body\n")
        (folder / "function.yaml").write_text(
            f"""\
metadata: {{name: copy}}
spec:
  handler: copy_event:handler
  triggers:
    source:
      kind: kafka-cluster
      numWorkers: {workers}
      attributes:
        topics: [{source}]
        consumerGroup: {source}-copy
        valueFormat: json
        outputTopic: {target}
"""
        )
        return str(folder / "function.yaml")


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    """The workload, the checks and the watch of fault tests."""
    yield Bed(tmp_path)


@pytest.fixture
def scene(kafka: Any, headrace: Any, tmp_path: Path) -> Iterator[PushScene]:
    """A topic, a backend with a journal, and what starts processes of the group."""
    made = PushScene(kafka, headrace, tmp_path)
    made.backend.start()
    yield made
    made.backend.stop()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """With `--all` run every short fault test several times: each time the fault hits another moment."""
    if metafunc.config.getoption("--all") and not metafunc.definition.get_closest_marker("long"):
        metafunc.fixturenames.append("repetition")
        metafunc.parametrize("repetition", range(1, _LONG_REPETITIONS + 1))
