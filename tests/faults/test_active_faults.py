"""Active consumers are read while processes and brokers die; the ledger of pushes judges.

The recording is a journal of the client, with the responses that it has received completely, and the commits of the
group in the broker's own topic, all with times of one machine.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from active_client import Instance
from headrace_devkit.testing import Cluster, StartHeadrace
from tests.faults.ledger import ANY_TIME, Background
from tests.faults.push_scenario import SHORT_SESSION, PushScenario

pytestmark = pytest.mark.timeout(400)
SETTINGS = {"auto_offset_reset": "earliest", "consumer": SHORT_SESSION}
INSTANCE = {"auto.commit.interval.ms": 100, "keyFormat": "string", "valueFormat": "string"}


class ReadScenario(PushScenario):
    """A topic whose clients keep the journal, and Headrace processes through which they read it."""

    def __init__(self, cluster: Any, start: Any, folder: Path) -> None:
        super().__init__(cluster, start, folder, partitions=2)
        self.settings = {"ordering": "partition"}
        self.faults.append(ANY_TIME)
        self.journal.touch()

    @property
    def config(self) -> dict[str, Any]:
        """The configuration of a process."""
        return {"kafka": super().config["kafka"], "active_consumers": SETTINGS}

    def received(self, entries: list[Any]) -> None:
        """Record a response that a client has received completely."""
        request, at = time.time_ns(), time.time()
        places = [f"read:{one['topic']}:{one['partition']}:{one['offset']}" for one in entries]
        records = [(place, one["key"], one["value"]) for place, one in zip(places, entries, strict=True)]
        lines: list[dict[str, Any]] = [{"records": records}, {"ended": list(range(len(records)))}]
        with self.journal.open("a") as journal:
            journal.write("".join(json.dumps({"request": request, "at": at, **line}) + "\n" for line in lines))


class Reader(Background):
    """A client that reads a topic to its end in a thread, and creates its instance again."""

    def __init__(self, scenario: ReadScenario, url: Callable[[], str], *, auto: bool) -> None:
        super().__init__()
        self.records = self.sessions = 0
        self._scenario, self._url, self._auto = scenario, url, auto

    def wait_more(self, records: int) -> None:
        """Wait until more records than now have arrived, by this number."""
        wanted = self.records + records
        self._scenario.wait_until(lambda: self.records >= wanted, f"{records} more records")

    def _run(self, number: int) -> None:
        instance: Instance | None = None
        while not self._stopped.wait(0.01):
            try:
                if instance is None:
                    self.sessions += 1
                    instance = Instance(self._url(), self._scenario.group, autoCommitEnable=self._auto, **INSTANCE)
                    instance.ok("POST", "/subscriptions", {"topics": [self._scenario.topic]})
                response = instance("GET", "/records?timeout=500&max_records=20")
                if response.status in (404, 410):
                    instance = None
                elif response.status == 200 and response.body:
                    self._scenario.received(response.body)
                    self.records += len(response.body)
                    if not self._auto:
                        instance("POST", "/offsets")
            except (AssertionError, OSError, ValueError, urllib.error.URLError, http.client.HTTPException):
                instance = None


@pytest.fixture
def scenario(cluster: Cluster, headrace: StartHeadrace, tmp_path: Path) -> ReadScenario:
    return ReadScenario(cluster, headrace, tmp_path)


@pytest.mark.parametrize(
    "auto", [pytest.param(False, id="explicit"), pytest.param(True, id="auto", marks=pytest.mark.long)]
)
def test_headrace_is_killed_while_it_is_read(scenario: ReadScenario, auto: bool) -> None:
    """By kill -9: what was not committed is read again, and nothing is passed over."""
    running = [scenario.run()]
    with Reader(scenario, lambda: running[-1].url, auto=auto) as reader:
        scenario.fill(600)
        reader.wait_more(100)
        running[-1].kill()
        running.append(scenario.run())
        scenario.wait_done()
    assert scenario.check() == []
    assert reader.sessions >= 2
    assert running[-1].terminate() == 0
