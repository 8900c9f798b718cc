"""`/consumers/deadLetter/reactive` on a real broker: every row of sidecar.md 8.3, and defects 26 and 46."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest

from headrace.delivery.dead_letter import origin_of
from headrace.devcluster import Received
from headrace.kafka import Admin
from headrace.records import Header, OutgoingRecord
from headrace.testing import PlannedResponse
from tests.dead_letter_records import bury

OWN: list[Header] = [("own", b"h")]


class Letters:
    """A topic with dead letters of a group."""

    def __init__(self, site: Any, kafka: Any, name: str, partitions: int = 2) -> None:
        self.site, self.name, self.dlq, self.group = site, name, f"{name}.dlq", f"{name}-push"
        kafka.create_topic(self.dlq, partitions, {})

    def bury(self, count: int = 0, group: str = "") -> None:
        """Write records and a letter of every record; what comes before the process, its consumer does not read."""
        self.site.write(self.name, *(OutgoingRecord(self.name, b"k%d" % n, b'{"n":%d}' % n, OWN) for n in range(count)))
        bury(self.site, self.name, group or self.group)


@pytest.fixture
def letters(site: Any, kafka: Any, topic: Any) -> Letters:
    return Letters(site, kafka, topic(2))


@pytest.fixture
def again(site: Any, push: Any, letters: Letters) -> Callable[..., Callable[..., Any]]:
    """Have a consumer that reads what comes from now on: `again(**settings)`; what comes back asks for one batch."""

    def start(**settings: Any) -> Callable[..., Any]:
        given = {"auto_offset_reset": "latest", "batch": {"max_records": 4}, "backend": {"timeout_seconds": 20}}
        url = push(letters.name, **given, **settings).url + "/consumers/deadLetter/reactive"

        def ask(body: Any = None, **query: Any) -> Any:
            return site.ask(f"{url}?{urlencode(query)}", body)

        return ask

    return start


def test_a_caller_loops_until_nothing_is_left(again: Any, letters: Letters, backend: Any) -> None:
    """Empty, processed, empty again: each letter once, as the record it was, under the identity it had at first."""
    letters.site.write(
        letters.name, *(OutgoingRecord(letters.name, b"k%d" % n, b'{"n":%d}' % n, OWN) for n in range(10))
    )
    call = again()
    empty = call().body
    assert (empty["records"], empty["status"], empty["group"]) == (0, "empty", letters.group)
    assert empty["topics"] == [letters.dlq]
    assert set(empty) == {"group", "instance", "topics", "records", "description", "status"}
    letters.bury()
    counts = []
    while (response := call(topic=letters.name).body)["records"]:
        assert response["status"] == "processed"
        assert "success" in response["description"]
        assert "| offset:" in response["description"]
        counts.append(response["records"])
    assert sum(counts) == 10
    assert max(counts) <= 4
    origins = {(r.partition, r.offset): r for r in letters.site.records(letters.name)}
    assert sorted((r["partition"], r["offset"]) for r in backend.accepted) == sorted(origins)
    for record in backend.accepted:
        assert record["topic"] == letters.name
        assert record["deliveryId"] == f"{letters.group}:{letters.name}:{record['partition']}:{record['offset']}"
        assert record["attempt"] == 4
        assert record["headers"]["own"] == "h"
        assert record["timestamp"] == origins[record["partition"], record["offset"]].timestamp_ms
    assert not any("headrace.dlq" in name for record in backend.accepted for name in record["headers"])
    assert backend.requests[-1].headers["host"].startswith("127.0.0.1:")
    assert len(letters.site.records(letters.dlq)) == 10


def test_what_fails_again_is_a_letter_again_unless_it_was_the_last_retry(
    again: Any, letters: Letters, backend: Any
) -> None:
    """`lastretry` is of its own call: the next one without it keeps what fails (defect 26)."""
    letters.bury(3)
    backend.response = PlannedResponse(
        fails=lambda record: record["value"]["n"] == 1, stacktrace="ValueError: still no"
    )
    call = again()
    last = call({"group": letters.group, "topic": letters.name, "lastretry": True, "unknown": 1}).body
    assert (last["records"], last["status"]) == (3, "processed")
    assert "1 of them dropped at their last retry" in last["description"]
    assert call().body["status"] == "empty"
    letters.bury()
    first = call().body
    assert (first["records"], first["status"]) == (3, "processed")
    assert "1 of them as dead letters again" in first["description"]
    records = letters.site.records(letters.dlq)
    assert len(records) == 7
    (repeated,) = [origin for r in records if (origin := origin_of(r.headers)) and origin.attempts == 4]
    assert (repeated.error, repeated.group) == ("ValueError", letters.group)
    assert repeated.text("first_failure") == "1970-01-01T00:00:01.000+00:00"
    assert call(lastretry="true").body["records"] == 1
    assert call().body["status"] == "empty"


def test_too_many_failures_roll_the_batch_back(again: Any, letters: Letters, backend: Any) -> None:
    """By the consumer's threshold: nothing has ended, and the next call has the same letters."""
    letters.bury(16)
    backend.response = PlannedResponse(fails=lambda record: True)
    call = again(retry={"rollback_threshold_percent": 30})
    for _ in range(2):
        response = call()
        assert (response.status, response.body["status"], response.body["records"]) == (200, "rolledBack", 4)
        assert "rollback" in response.body["description"]
        assert "| offset:" in response.body["description"]
    assert len(letters.site.records(letters.dlq)) == 16
    backend.response = PlannedResponse()
    assert call().body["status"] == "processed"


def test_two_calls_at_a_time_share_nothing(again: Any, letters: Letters, backend: Any) -> None:
    """One delivers, the other is told to come back."""
    letters.bury(2)
    came, go = threading.Event(), threading.Event()

    def answer(request: Received) -> PlannedResponse:
        came.set()
        go.wait(120)
        return PlannedResponse()

    backend.response = answer
    call = again()
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(call()))
    first.start()
    letters.site.wait_until(lambda: came.is_set() or found, "the first delivery")
    second = call(lastretry=True)
    go.set()
    first.join(120)
    assert (second.status, second.body["code"]) == (409, "ERR40048")
    assert "another call is delivering dead letters" in second.body["description"]
    assert (found[0].body["records"], found[0].body["status"]) == (2, "processed")
    assert len(backend.accepted) == 2


def test_no_group_is_joined_and_letters_of_others_are_left(again: Any, letters: Letters, backend: Any) -> None:
    """The live group stays as it is; a letter is the one's whose group it has, when that group is known here."""
    letters.bury(2)
    letters.bury(0, "another")
    call = again()
    admin = Admin(letters.site.kafka)
    groups = {group.name for group in asyncio.run(admin.list_groups())}
    before = asyncio.run(admin.committed(letters.group))
    assert call().body["records"] == 4
    assert {entry["deliveryId"].split(":")[0] for entry in backend.accepted} == {letters.group, "another"}
    after = {group.name for group in asyncio.run(admin.list_groups())} - groups
    assert {name for name in after if not name.startswith("headrace.lease.")} == set()
    assert asyncio.run(admin.committed(letters.group)) == before
