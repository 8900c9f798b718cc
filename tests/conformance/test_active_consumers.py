"""Every operation on active consumers, by the document of the light-4j kafka-sidecar, on a real broker."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from active_client import Instance, offsets_of, send, write
from headrace.records import OutgoingRecord
from headrace_devkit.testing import Cluster
from headrace_devkit.testing.scenario import Scenario

pytestmark = pytest.mark.xdist_group("active")


def written(site: Scenario, source: str, count: int, partition: int = 0) -> None:
    write(site, source, *(b'{"n":%d}' % n for n in range(count)), partition=partition)


def test_a_life_from_creation_to_deletion(url: str, site: Scenario, source: str) -> None:
    written(site, source, 3)
    instance = Instance(url, source, name="one")
    assert instance.created.body["instanceId"] == instance.created.body["instance_id"] == "one"
    assert instance.created.body["baseUri"] == f"/consumers/{source}/instances/one"
    assert instance("GET", "/records").code == "ERR40066"
    instance.ok("POST", "/subscriptions", {"topics": [source]})
    records = instance.read(3)
    assert [(r["topic"], r["partition"], r["offset"], r["key"], r["value"]) for r in records] == [
        (source, 0, n, "k", {"n": n}) for n in range(3)
    ]
    assert instance.ok("GET", "/subscriptions") == {"topics": [source]}
    assert instance.ok("GET", "/assignments") == {"partitions": [{"topic": source, "partition": p} for p in (0, 1)]}
    place = {"topic": source, "partition": 0}
    processed = {**place, "offset": 1, "metadata": "mine"}
    assert instance.ok("POST", "/offsets?offsets=true", {"offsets": [processed]}) == [{**processed, "offset": 2}]
    assert instance.ok("POST", "/offsets") == [{**place, "offset": 3, "metadata": ""}]
    for name in ("offsets", "partitions"):
        found = instance.ok("PUT", "/offsets", {name: [place, {**place, "partition": 1}]})
        assert found == {"offsets": [{**place, "offset": 3, "metadata": ""}]}
    instance.ok("DELETE")
    assert instance("GET", "/records").code == "ERR12200"
    assert site.committed(source)


def test_positions_are_sought_exactly(url: str, site: Scenario, source: str) -> None:
    for partition in (0, 1):
        records = (OutgoingRecord(source, None, b"%d" % n, None, partition, 1_000_000 + n) for n in range(10))
        site.write(source, *records)
    instance = Instance(url, source).subscribe(source)
    one, other = {"topic": source, "partition": 0}, {"topic": source, "partition": 1}
    instance.ok(
        "POST", "/positions", {"offsets": [{**one, "offset": 4.0}], "timestamps": [{**other, "timestamp": 1_000_007}]}
    )
    found = instance.read(9)
    assert (offsets_of(found), offsets_of(found, 1)) == ([4, 5, 6, 7, 8, 9], [7, 8, 9])
    missing = {"timestamps": [{**one, "partition": 7, "timestamp": 1}]}
    assert instance("POST", "/positions", missing).code == "ERR40007"
    instance.ok("POST", "/positions/first", {"partitions": [one]})
    assert offsets_of(instance.read(10)) == list(range(10))
    instance.ok("POST", "/positions", {"timestamps": [{**one, "timestamp": "1970-01-01T00:16:40.003Z"}]})
    assert offsets_of(instance.read(7)) == list(range(3, 10))
    instance.ok("POST", "/positions", {"timestamps": [{**one, "timestamp": "2999-01-01T00:00:00Z"}]})
    instance.ok("POST", "/positions/first", {})
    instance.ok("POST", "/positions/last", {})
    instance.read(0)


def test_partitions_are_assigned_without_membership(url: str, site: Scenario, source: str) -> None:
    written(site, source, 2)
    written(site, source, 3, 1)
    instance = Instance(url, source)
    other = {"topic": source, "partition": 1}
    instance.ok("POST", "/assignments", {"partitions": [other]})
    assert instance.ok("GET", "/assignments") == {"partitions": [other]}  # at once
    assert offsets_of(instance.read(3), 1) == [0, 1, 2]
    assert instance("POST", "/subscriptions", {"topics": [source]}).code == "ERR40066"
    refused = instance(
        "POST", "/positions", {"offsets": [{**other, "offset": 0}, {**other, "partition": 0, "offset": 0}]}
    )
    assert refused.code == "ERR40066" and f"no position has changed: {source}-0;" in refused.body["description"]
    assert instance.ok("GET", "/records?timeout=300") == []
    instance.ok("POST", "/assignments", {"partitions": [{"topic": source, "partition": 0}]})
    assert offsets_of(instance.read(2)) == [0, 1]
    instance.ok("POST", "/offsets")
    instance.ok("DELETE", "/subscriptions")
    instance.ok("POST", "/subscriptions", {"topics": [source]})
    assert offsets_of(instance.read(3), 1) == [0, 1, 2]


def test_with_auto_commit_the_next_read_confirms(url: str, site: Scenario, source: str) -> None:
    written(site, source, 4)
    instance = Instance(url, source, autoCommitEnable="true").subscribe(source)
    while not (first := instance.ok("GET", "/records?timeout=-1&maxBytes=-1&max_bytes=-1&max_records=2")):
        pass
    second = instance.ok("GET", "/records?timeout=2000&max_records=1")
    assert (offsets_of(first), offsets_of(second)) == ([0, 1], [2])
    instance.ok("DELETE")
    assert site.committed(source) == {(source, 0): 2}


def test_illegal_requests_have_codes(url: str, source: str) -> None:
    instance = Instance(url, source, id="mine")
    create = f"{url}/consumers/{source}"
    assert send("POST", create, {"id": "mine"}).code == "ERR12202"
    assert send("POST", create, {"format": "xml"}).status == 400
    assert send("POST", create, {"autoOffsetReset": "sometimes"}).status == 400
    assert (
        send("POST", create, {"autoOfsetReset": "latest"}).body["description"].endswith("did you mean autoOffsetReset?")
    )
    assert send("POST", create, {"name": "../x"}).code == "ERR12201"
    assert instance("GET", "/records?timeout=x").status == 400
    assert (
        instance("POST", "/offsets", {"offsets": [{"topic": source, "partition": 0, "offset": 1}]}).code == "ERR12207"
    )
    assert instance("POST", "/subscriptions", {}).status == 204
    assert send("DELETE", f"{create}/instances/other").code == "ERR12200"


def test_a_key_and_a_value_are_decoded_apart(url: str, site: Scenario, source: str) -> None:
    headers = [("a", b"1"), ("a", b"2"), ("none", None)]
    pairs = [(b"\xff", b'{"a":1}'), (b"good", b"{"), (b"\xff", b"{"), (b"good", b"null"), (b"", b'""'), (b"null", None)]
    site.write(source, *(OutgoingRecord(source, key, value, headers, 0, 1_000) for key, value in pairs))
    instance = Instance(url, source).subscribe(source)
    bad_key, bad_value, bad, null, empty, tombstone = instance.read(6)
    assert base64.b64decode(bad_key["rawKey"]) == b"\xff" and bad_key["value"] == {"a": 1} and "key" not in bad_key
    assert bad_value["key"] == "good" and base64.b64decode(bad_value["rawValue"]) == b"{"
    assert bad["error"].startswith("key: ") and "; value: " in bad["error"] and {"rawKey", "rawValue"} < bad.keys()
    assert null["value"] is None and (empty["key"], empty["value"]) == ("", "")
    assert tombstone["key"] == "null" and "value" not in tombstone and "error" not in tombstone
    assert bad_key["timestamp"] == 1_000 and bad_value["errorCode"] == "ERR40009"
    assert bad_key["headers"] == {"a": "2", "none": None, "X-Correlation-Id": f"{source}:{source}:0:0"}
    assert bad_key["headerList"][:2] == [{"name": "a", "value": "MQ=="}, {"name": "a", "value": "Mg=="}]


def test_a_group_without_an_offset_and_a_reset_must_seek(url: str, site: Scenario, source: str) -> None:
    written(site, source, 3)
    instance = Instance(url, source, autoOffsetReset="none").subscribe(source)
    refused = instance("GET", "/records?timeout=20000")
    assert refused.code == "ERR40069", refused
    assert {"topic": source, "partition": 0} in refused.body["metadata"]["partitions"]
    assert "seek it, with POST .../positions" in refused.body["description"]
    both = [{"topic": source, "partition": n} for n in (0, 1)]
    assert instance.ok("GET", "/assignments") == {"partitions": both}
    instance.ok("POST", "/positions", {"offsets": [{**both[0], "offset": 1}]})
    found: list[Any] = []
    while len(found) < 2:  # the other partition is reported at most once more
        response = instance("GET", "/records?timeout=2000")
        assert response.status == 200 or response.body["metadata"]["partition"] == 1
        found += response.body if response.status == 200 else []
    assert offsets_of(found) == [1, 2]
    assert instance("GET", "/records?timeout=100").body["metadata"]["partitions"] == [both[1]]
    instance.ok("POST", "/positions/first", {})
    assert offsets_of(instance.read(3)) == [0, 1, 2]


def test_a_position_out_of_range_is_reported_and_stops_no_other_partition(
    url: str, site: Scenario, source: str
) -> None:
    written(site, source, 3)
    written(site, source, 3, 1)
    instance = Instance(url, source).subscribe(source)
    instance.read(6)
    one, other = {"topic": source, "partition": 0}, {"topic": source, "partition": 1}
    instance.ok("POST", "/positions", {"offsets": [{**one, "offset": 1_000}, {**other, "offset": 0}]})
    responses = []
    while sum(len(response.body) for response in responses if response.status == 200) < 3 or len(responses) < 2:
        responses.append(instance("GET", "/records?timeout=5000"))
    [refused] = [response for response in responses if response.status != 200][:1]
    assert (refused.status, refused.code) == (409, "ERR40069")
    assert refused.body["metadata"]["partitions"] == [one]
    assert "offsets 3 to 999 (997)" in refused.body["description"]
    site.remove_before(source, 2)
    instance.ok("POST", "/positions", {"offsets": [{**one, "offset": 0}]})
    assert "removed before they were read" in instance("GET", "/records?timeout=20000").body["description"]
    instance.ok("POST", "/positions/first", {"partitions": [one]})
    assert offsets_of(instance.read(1)) == [2]


def test_a_topic_that_is_missing_or_created_again_is_reported(
    url: str, site: Scenario, source: str, kafka: Cluster
) -> None:
    instance = Instance(url, source)
    again = f"{source}-again"
    instance.ok("POST", "/subscriptions", {"topics": [again]})
    site.wait_until(lambda: instance("GET", "/records?timeout=10").code == "ERR40006", "the topic is missing")
    kafka.create_topic(again, 1, {})
    written(site, again, 5)
    found: list[Any] = []

    def read() -> int:
        response = instance("GET", "/records?timeout=2000")
        found.extend(response.body if response.status == 200 else [])
        return len(found)

    site.wait_until(lambda: read() == 5, "the records of the topic")
    site.wait_until(lambda: instance("GET", "/records?timeout=10").status == 200, "the topic is known")
    site.delete_topic(again)
    site.wait_until(lambda: instance("GET", "/records?timeout=10").code == "ERR40006", "the topic is gone")
    kafka.create_topic(again, 1, {})
    written(site, again, 2)
    codes = set[str]()

    def reported() -> bool:
        response = instance("GET", "/records?timeout=500")
        codes.add(response.code)
        found.extend(response.body if response.status == 200 else [])
        return "ERR40070" in codes and len(found) == 7

    site.wait_until(reported, "the topic is another one, and is read")
    assert offsets_of(found) == [0, 1, 2, 3, 4, 0, 1]


def test_an_instance_is_created_with_kafkas_names(url: str, site: Scenario, source: str) -> None:
    written(site, source, 2)
    create = f"{url}/consumers/{source}"
    settings = {
        "name": "named",
        "format": "BINARY",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": "false",
        "session.timeout.ms": "12000",
        "heartbeat.interval.ms": 5000,
        "max.poll.interval.ms": 60_000,
        "group.instance.id": "static-one",
        "isolation.level": "read_uncommitted",
        "fetch.min.bytes": -1,
        "consumer.request.timeout.ms": "5000",
    }
    created = send("POST", create, settings)
    assert created.status == 200
    instance = Instance(url, source, name="other", **{"group.protocol": "consumer"})
    assert "warnings" not in instance.created.body
    instance.ok("DELETE")
    instance.url = url + created.body["base_uri"]
    instance.ok("POST", "/subscriptions", {"topics": [source]})
    assert [record["value"] for record in instance.read(2)] == [
        base64.b64encode(b'{"n":%d}' % n).decode() for n in range(2)
    ]
    refusals = {
        "heartbeat.interval.ms": (20_000, "ERR12201"),
        "isolation.level": ("none", "ERR12201"),
        "isolation_level": ("read_committed", "ERR11004"),
        "auto.commit.enable": ("perhaps", "ERR11004"),
        "partition.assignment.strategy": ("sticky", "ERR12201"),
    }
    floors = {"fetch.max.wait.ms": 9, "heartbeat.interval.ms": 499, "auto.commit.interval.ms": 99}
    for name, (value, code) in [*refusals.items(), *((name, (at, "ERR11004")) for name, at in floors.items())]:
        refused = send("POST", create, {name: value})
        assert (refused.status, refused.code) == (400, code), (name, refused)
    assert "did you mean isolation.level?" in send("POST", create, {"isolation_level": 1}).body["description"]
