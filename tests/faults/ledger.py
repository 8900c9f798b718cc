"""What fault tests share: clients that write a history, and a cluster whose topics and offsets are the recording.

The checks read the topics and the group's offsets themselves and believe nothing that Headrace says of its own work.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import math
import os
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from confluent_kafka.admin import AdminClient

from headrace.consumers.lag import lag_of
from headrace.delivery.dead_letter import headers_of
from headrace.delivery.outcomes import DeadLetter, Reply
from headrace.records import OutgoingRecord, Record, TopicPartition
from headrace_devkit.testing import Fault, RecordingBackend, Sent, check_produced
from headrace_devkit.testing.scenario import Scenario

ANY_TIME = Fault(-math.inf, math.inf)
_PACE_SECONDS = 0.01


class Background:
    """Works in threads from entry to exit, or to its stop."""

    def __init__(self, threads: int = 1) -> None:
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(threads)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Begin nothing more, and wait for what is going on."""
        self._stopped.set()
        for thread in self._threads:
            thread.join(240)
        assert not any(thread.is_alive() for thread in self._threads), "a request was never answered"

    def _run(self, number: int) -> None:
        raise NotImplementedError


class Poster(Background):
    """Posts records with running ids, one request at a time of each client, and keeps the outcome of each record."""

    def __init__(self, url: str, topic: str, batch: int = 20, *, clients: int = 1, keyed: bool = False) -> None:
        """Post batches to a topic; `keyed` gives each a key, so that it is written in a transaction."""
        super().__init__(clients)
        self.history: list[Sent] = []
        self._address, self._path = url.removeprefix("http://"), f"/producers/{topic}"
        self._batch, self._keyed = batch, keyed
        self._ids = itertools.count()

    def with_outcome(self, outcome: str = "ok") -> list[Sent]:
        """Return the records that have had an outcome."""
        return [sent for sent in list(self.history) if sent.outcome == outcome]

    @property
    def not_written(self) -> list[Sent]:
        """Return the records that were not acknowledged."""
        return [*self.with_outcome("fail"), *self.with_outcome("unknown")]

    def wait_for_more(self, records: int = 200, outcome: str = "ok") -> None:
        """Wait until this many more records have an outcome than now."""
        wanted = len(self.with_outcome(outcome)) + records
        Scenario.wait_until(lambda: len(self.with_outcome(outcome)) >= wanted, f"{records} records {outcome}")

    def _run(self, number: int) -> None:
        server = http.client.HTTPConnection(self._address, timeout=120)
        while not self._stopped.wait(_PACE_SECONDS):  # else a slow machine gets more and more to do
            ids = list(itertools.islice(self._ids, self._batch))
            records = [{"key": str(one % 50), "value": {"id": one}} for one in ids]
            headers = {"Content-Type": "application/json"}
            if self._keyed:
                headers["Idempotency-Key"] = f"ids-from-{ids[0]}"
            sent_at = time.monotonic()
            outcomes = self._post(server, json.dumps({"records": records}, separators=(",", ":")), headers)
            times = sent_at, time.monotonic()
            self.history += [
                Sent(number, str(one % 50).encode(), b'{"id":%d}' % one, *times, *entry)
                for one, entry in zip(ids, outcomes, strict=True)
            ]
            if outcomes[0][0] != "ok":
                self._stopped.wait(0.05)
        server.close()

    def _post(self, server: http.client.HTTPConnection, body: str, headers: dict[str, str]) -> Sequence[Any]:
        try:
            server.request("POST", self._path, body, headers)
            response = server.getresponse()
            said = json.load(response)
        except (OSError, ValueError, http.client.HTTPException):
            server.close()
            return [("unknown",)] * self._batch
        if "offsets" not in said:  # refused as a whole, or a defect, which must not happen
            return [("fail" if response.status in (403, 404, 429, 503) else "unknown",)] * self._batch
        return [self._entry(**entry) for entry in said["offsets"]]

    @staticmethod
    def _entry(partition: int = -1, offset: int | None = -1, outcome: Any = "ok", **_: Any) -> tuple[Any, ...]:
        return (outcome, partition, -1 if offset is None else offset)


class Ledger(Scenario):
    """A cluster that tests break, its topics and its committed offsets."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        super().__init__(cluster.bootstrap_servers, folder)
        self.cluster, self.folder = cluster, folder
        self.client = AdminClient({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0})

    def changed(self, code: str) -> dict[str, str]:
        """Return the environment of a process that runs this code when it starts."""
        (self.folder / "sitecustomize.py").write_text(code)
        return {"PYTHONPATH": os.pathsep.join([str(self.folder), *sys.path])}

    def new_topic(self, partitions: int = 1, **configs: str) -> str:
        """Create a topic, with two in-sync replicas where there are three brokers."""
        name = f"fault-{uuid.uuid4().hex[:8]}"
        replicas = {"min.insync.replicas": "2"} if len(self.cluster.ports) > 1 else {}
        self.cluster.create_topic(name, partitions, {**replicas, **configs})
        return name

    def behind(self, topic: str, group: str) -> int:
        """Return how many records of a topic a group has not committed."""
        return sum(entry.lag for entry in asyncio.run(lag_of(self.admin, group, [topic])))

    def wait_committed_all(self, topic: str, group: str) -> None:
        """Wait until a group has committed the end of every partition."""
        self.wait_until(lambda: self.behind(topic, group) == 0, f"{group} to commit the end of {topic}")

    def offsets_of(self, topic: str) -> dict[str, dict[TopicPartition, int]]:
        """Return what the groups with the topic's name in theirs have committed."""
        names = [group.name for group in asyncio.run(self.admin.list_groups()) if topic in group.name]
        return {name: found for name in names if (found := self.committed(name))}

    def members(self, group: str) -> int:
        """Return how many members a group has."""
        groups = asyncio.run(self.admin.list_groups())
        return next((found.members for found in groups if found.name == group), 0)

    def state(self, group: str) -> str:
        """Return the state of a group, in Kafka's word; empty if there is no such group."""
        groups = asyncio.run(self.admin.list_groups())
        return next((found.state for found in groups if found.name == group), "")

    def leader_of(self, topic: str) -> int:
        """Return the broker that leads partition 0, once there is one."""
        leaders: list[int] = []

        def found() -> bool:
            leaders[:] = [self.client.list_topics(topic, timeout=60).topics[topic].partitions[0].leader]
            return leaders[0] > 0

        self.wait_until(found, f"a leader of {topic}")
        return leaders[0]

    @contextmanager
    def paused(self, *brokers: int) -> Iterator[None]:
        """Pause brokers until this ends, and wait until they have caught up."""
        for broker in brokers:
            self.cluster.pause(broker)
        try:
            yield
        finally:
            for broker in brokers:
                self.cluster.resume(broker)
        self.cluster.wait_in_sync()

    @contextmanager
    def killed(self, broker: int) -> Iterator[None]:
        """Kill a broker; when this ends, it is started again and catches up."""
        self.cluster.kill(broker)
        yield
        self.cluster.restart(broker)
        self.cluster.wait_in_sync()

    def check_acknowledged(self, topic: str, poster: Poster, faults: Sequence[Fault] = (ANY_TIME,)) -> None:
        """Each acknowledged record is at its place; none is there twice, was certainly refused, or is from nowhere.

        A commit is answered before its markers are written, so what is missing is looked for again.
        """
        wrong: list[str] = []

        def is_complete() -> bool:
            wrong[:] = check_produced(poster.history, self.records(topic), faults)
            return not any(text.startswith("lost: ") for text in wrong)

        with suppress(AssertionError):
            self.wait_until(is_complete, "acknowledged records")
        assert not wrong

    def missing(self, topic: str, delivered: set[tuple[int, int]]) -> set[tuple[int, int]]:
        """Return what is in the topic now and was not delivered; a record whose outcome is unknown may come late."""
        return {(record.partition, record.offset) for record in self.records(topic)} - delivered


def delivered_by(backend: RecordingBackend) -> set[tuple[int, int]]:
    """Return the places of all records the backend said it had processed."""
    return {(record["partition"], record["offset"]) for record in list(backend.accepted)}


def dead_letter(topic: str, dead: str, number: int) -> OutgoingRecord:
    """Return a dead letter of a record whose value is its number."""
    origin = Record(topic, number % 2, number, 1, None, b"%d" % number)
    letter = DeadLetter(origin, "group", 5, Reply("E", "no", permanent=True), 1.0, 2.0)
    return OutgoingRecord(dead, None, origin.value, headers_of(letter), number % 2)
