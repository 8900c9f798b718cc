"""`/consumers/deadLetter/reactive` on a real broker: a caller loops, and no group is joined."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest

from headrace.kafka import Admin
from headrace.records import Header, OutgoingRecord
from headrace_devkit.testing import Cluster, HeadraceProcess, MakeTopic, RecordingBackend
from headrace_devkit.testing.scenario import Scenario
from tests.dead_letter_records import bury

OWN: list[Header] = [("own", b"h")]


class RedeliveryScenario:
    """A topic with dead letters of a group, and the consumer that they are delivered to again."""

    def __init__(self, site: Any, push: Any, kafka: Any, name: str) -> None:
        self.site, self.name, self.dlq, self.group = site, name, f"{name}.dlq", f"{name}-push"
        self._push = push
        kafka.create_topic(self.dlq, 2, {})

    def write(self, count: int) -> None:
        self.site.write(self.name, *(OutgoingRecord(self.name, b"k%d" % n, b'{"n":%d}' % n, OWN) for n in range(count)))

    def bury(self, group: str = "") -> None:
        """Write a dead letter for every record."""
        bury(self.site, self.name, group or self.group)

    def start(self, max_records: int = 4) -> None:
        """Start a consumer that reads later records only."""
        given = {
            "auto_offset_reset": "latest",
            "batch": {"max_records": max_records},
            "backend": {"timeout_seconds": 20},
        }
        self._url = self._push(self.name, **given).url + "/consumers/deadLetter/reactive"

    def call(self, body: Any = None, **query: Any) -> Any:
        """Request some batches, and return the body of the response."""
        return self.site.ask(f"{self._url}?{urlencode(query)}", body).body


@pytest.fixture
def redelivery(
    site: Scenario, push: Callable[..., HeadraceProcess], kafka: Cluster, topic: MakeTopic
) -> RedeliveryScenario:
    return RedeliveryScenario(site, push, kafka, topic(2))


def test_a_caller_loops_until_nothing_is_left(redelivery: RedeliveryScenario, backend: RecordingBackend) -> None:
    """Empty, processed, empty again: each letter once, as the record it was, under the identity it had at first."""
    redelivery.write(10)
    redelivery.start(max_records=1)
    empty = redelivery.call()
    assert (empty["records"], empty["status"], empty["group"]) == (0, "empty", redelivery.group)
    assert empty["topics"] == [redelivery.dlq]
    assert set(empty) == {"group", "instance", "topics", "records", "description", "status"}
    redelivery.bury()
    counts = []
    while (response := redelivery.call(topic=redelivery.name))["records"]:
        assert response["status"] == "processed"
        assert "success" in response["description"]
        assert "| offset:" in response["description"]
        counts.append(response["records"])
    assert sum(counts) == 10
    assert max(counts) <= 4, "four batches"
    origins = {(r.partition, r.offset): r for r in redelivery.site.records(redelivery.name)}
    assert sorted((r["partition"], r["offset"]) for r in backend.accepted) == sorted(origins)
    for record in backend.accepted:
        assert record["topic"] == redelivery.name
        assert record["deliveryId"] == f"{redelivery.group}:{redelivery.name}:{record['partition']}:{record['offset']}"
        assert record["headers"]["own"] == "h"
        assert record["timestamp"] == origins[record["partition"], record["offset"]].timestamp_ms
    assert not any("headrace.dlq" in name for record in backend.accepted for name in record["headers"])
    assert backend.requests[-1].headers["host"].startswith("127.0.0.1:")
    assert len(redelivery.site.records(redelivery.dlq)) == 10


def test_no_group_is_joined_and_letters_of_others_are_left(
    redelivery: RedeliveryScenario, backend: RecordingBackend
) -> None:
    """The live group stays as it is, and its consumer gets the dead letters of its own group only."""
    redelivery.write(2)
    redelivery.bury()
    redelivery.bury("another")
    redelivery.start()
    admin = Admin(redelivery.site.kafka)
    groups = {group.name for group in asyncio.run(admin.list_groups())}
    before = asyncio.run(admin.committed(redelivery.group))
    while redelivery.call()["records"]:
        pass
    assert [entry["deliveryId"].split(":")[0] for entry in backend.accepted] == [redelivery.group] * 2
    after = {group.name for group in asyncio.run(admin.list_groups())} - groups
    made = {name for name in after if name.startswith((redelivery.name, "headrace"))}  # not those of other tests
    assert {name for name in made if not name.startswith("headrace.lease.")} == set()
    assert asyncio.run(admin.committed(redelivery.group)) == before
