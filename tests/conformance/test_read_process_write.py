"""Records and the offsets they were made from, in one transaction over HTTP: both or neither, on a real broker."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

import pytest

from active_client import Instance, Response, send
from headrace.records import OutgoingRecord
from headrace_devkit.testing import MakeTopic, StartHeadrace
from headrace_devkit.testing.scenario import Scenario

pytestmark = pytest.mark.xdist_group("active")
SETTINGS = {"auto_offset_reset": "earliest", "consumer": {"properties": {"session.timeout.ms": 3000}}}


class Worker(Instance):
    """Reads one topic, and writes to another in the transaction that commits what was read."""

    def __init__(self, url: str, source: str, target: str, name: str = "one") -> None:
        super().__init__(url, source, name=name)
        self.process, self.source, self.target, self.name = url, source, target, name

    def write(self, values: list[Any], *offsets: dict[Any, Any], key: str = "", **changes: Any) -> Response:
        """Write a transaction: the offset of the last processed record by partition, or entries as in the body."""
        entries = [one for one in offsets if "offset" in one]
        places = [place for one in offsets if "offset" not in one for place in one.items()]
        entries += [{"topic": self.source, "partition": p, "offset": offset} for p, offset in places]
        consumer = {"group": self.source, "instanceId": self.name, "offsets": entries, **changes}
        part = {"topic": self.target, "records": [{"value": value} for value in values]}
        headers = {"Idempotency-Key": key} if key else {}
        return send("POST", f"{self.process}/transactions", {"topics": [part], "consumer": consumer}, headers)


def test_records_and_offsets_are_committed_together(url: str, site: Scenario, topic: MakeTopic) -> None:
    """The instance knows what was committed, so committing what was delivered sets nothing back.

    A repeated key gets the same response, even without the instance: the transaction was committed.
    """
    source, target = topic(), topic()
    site.write_json(source, *range(6))
    worker = Worker(url, source, target).subscribe(source)
    worker.read(6)
    response = worker.write(["a", "b"], {0: 3}, key="k")
    assert (response.status, len(response.body["topics"][0]["offsets"])) == (200, 2)
    site.wait_committed(source, source, 4)
    site.wait_until(lambda: [json.loads(r.value) for r in site.records(target)] == ["a", "b"], "the records")
    again = worker.write(["a", "b"], {0: 3})
    assert (again.status, again.body["code"]) == (409, "ERR40066")
    entry = {"topic": source, "partition": 0, "offset": 6, "metadata": ""}
    assert [worker.ok("POST", "/offsets?offsets=true") for _ in range(2)] == [[entry], []]
    assert worker.write(["c"], {0: 5}).body["code"] == "ERR40066"
    worker.ok("DELETE")
    assert worker.write(["a", "b"], {0: 3}, key="k") == response
    assert worker.write(["c"], {0: 5}, key="other").code == "ERR12200"
    assert site.committed(source) == {(source, 0): 6}
    assert len(site.records(target)) == 2


def test_only_what_was_delivered_may_be_committed(url: str, site: Scenario, topic: MakeTopic) -> None:
    """Not what is beyond it, not of another partition, not without membership, and not where reads commit."""
    source, target = topic(2), topic()
    site.write_json(source, *range(4))
    worker = Worker(url, source, target).subscribe(source)
    assert len(worker.first("&max_records=2")) == 2
    Instance(url, source, name="other")
    Instance(url, f"{source}-x", name="auto", autoCommitEnable=True).subscribe(source)
    by_hand = Instance(url, f"{source}-y", name="by-hand")
    by_hand.ok("POST", "/assignments", {"partitions": [{"topic": source, "partition": 0}]})
    for response, status, code in (
        (worker.write([1], {0: 2}), 409, "ERR40066"),
        (worker.write([1], {1: 0}), 409, "ERR40066"),
        (worker.write([1], {0: 0, 7: 0}), 409, "ERR12207"),
        (worker.write([1], {0: 0}, instanceId="other"), 409, "ERR40066"),
        (worker.write([1], {0: 0}, group=f"{source}-x", instanceId="auto"), 409, "ERR40066"),
        (worker.write([1], {0: 0}, group=f"{source}-y", instanceId="by-hand"), 409, "ERR40066"),
        (worker.write([1], {0: 0}, instanceId="none"), 404, "ERR12200"),
        (worker.write([1], {0: 0}, group="none"), 404, "ERR12200"),
        (worker.write([1], {}), 400, "ERR11004"),
        (worker.write([1], {0: 0}, instance_id="one"), 400, "ERR11004"),
        (worker.write([], {0: 0}), 400, "ERR11004"),
    ):
        assert (response.status, response.body["code"]) == (status, code), response
    assert (site.committed(source), site.records(target)) == ({}, [])


def test_an_assignment_that_is_over_is_refused_also_when_the_partition_is_back(
    url: str, site: Scenario, topic: MakeTopic
) -> None:
    """By a commit, a transaction, a seek and a stream; the other partition continues with its new records."""
    source, target = topic(2), topic()
    for partition in range(2):
        site.write(source, OutgoingRecord(source, None, b"1", None, partition))
    worker = Worker(url, source, target).subscribe(source)
    names = {entry["partition"]: entry["assignment"] for entry in worker.read(2)}
    other = Worker(url, source, target, "two").subscribe(source)
    [moved] = (entry["partition"] for entry in other.ok("GET", "/assignments")["partitions"])
    other.ok("DELETE")
    site.wait_until(lambda: len(worker.ok("GET", "/assignments")["partitions"]) == 2, "the partition to come back")
    old = {"topic": source, "partition": moved, "offset": 0, "assignment": names[moved]}
    kept = {**old, "partition": 1 - moved, "assignment": names[1 - moved]}
    received = json.dumps({source: {moved: [1, names[moved]]}})
    for response in (
        worker.write([1], old, kept),
        worker("POST", "/positions", {"offsets": [old, kept]}),
        send("GET", f"{worker.url}/records", None, {"Accept": "text/event-stream", "Last-Event-ID": received}),
        worker("POST", "/offsets", {"offsets": [old, kept]}),
    ):
        assert (response.status, response.body["code"]) == (409, "ERR12207")
        assert response.body["metadata"]["refused"] == [
            {name: old[name] for name in ("topic", "partition", "assignment")}
        ]
    assert response.body["metadata"]["committed"] == [{"topic": source, "partition": 1 - moved, "offset": 1}]
    assert site.committed(source) == {(source, 1 - moved): 1}
    [again] = worker.read(1)
    assert (again["partition"], again["offset"]) == (moved, 0)
    assert worker.write([1], {**old, "assignment": again["assignment"]}).status == 200


def test_an_instance_whose_process_was_away_is_fenced(
    site: Scenario, topic: MakeTopic, headrace: StartHeadrace
) -> None:
    """Another process has its partitions and its records; what it wrote for them is never visible."""
    source, target = topic(), topic()
    site.write_json(source, 1, 2)
    zombie, heir = (headrace({**site.config, "active_consumers": SETTINGS}) for _ in range(2))
    worker = Worker(zombie.url, source, target).subscribe(source)
    worker.read(2)
    zombie.server.signal(signal.SIGSTOP)
    try:
        other = Worker(heir.url, source, target, "two").subscribe(source)
        other.read(2)
    finally:
        zombie.server.signal(signal.SIGCONT)
    responses = [worker.write(["zombie"], {0: 1})]
    end = time.monotonic() + 60
    while responses[-1].status == 503:  # the group is rebalancing, and the request may be repeated
        assert time.monotonic() < end
        responses.append(worker.write(["zombie"], {0: 1}))
    assert (responses[-1].status, responses[-1].body["code"]) == (409, "ERR12207")
    assert site.committed(source) == {}
    site.wait_until(lambda: other.write(["heir"], {0: 1}).status == 200, "the heir to write")
    site.wait_committed(source, source, 2)
    site.wait_until(lambda: [json.loads(r.value) for r in site.records(target)] == ["heir"], "one record")
