"""What operators and tools use of active consumers, on a real broker: records without an instance, limits, lists."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any
from urllib.parse import urlencode

import confluent_kafka
import pytest

from active_client import Instance, send
from headrace.delivery.dead_letter import origin_of
from headrace.records import OutgoingRecord
from headrace_devkit.testing import StartHeadrace
from headrace_devkit.testing.scenario import JsonResponse, Scenario

pytestmark = pytest.mark.xdist_group("active")


def part(url: str, source: str, partition: int | str = 0, **query: Any) -> JsonResponse:
    return Scenario.ask(f"{url}/topics/{source}/partitions/{partition}/records?{urlencode(query)}")


def transactional(site: Scenario, source: str, count: int, *, commit: bool) -> None:
    """Write records in a transaction."""
    producer = confluent_kafka.Producer({"bootstrap.servers": site.kafka.bootstrap_servers, "transactional.id": source})
    producer.init_transactions()
    producer.begin_transaction()
    for number in range(count):
        producer.produce(source, b'{"t":%d}' % number, partition=0)
    producer.flush()
    if commit:
        producer.commit_transaction()
    else:
        producer.abort_transaction()


def test_a_tool_reads_a_whole_partition_in_parts(url: str, site: Scenario, source: str) -> None:
    """Past markers and aborted transactions, in the middle and at the end; nothing is joined or committed."""
    site.write(source, *(OutgoingRecord(source, b"k", b'{"n":%d}' % n, None, 0) for n in range(5)))
    transactional(site, source, 3, commit=False)
    transactional(site, source, 2, commit=True)
    site.write(source, OutgoingRecord(source, b"k", b'{"n":5}', None, 0))
    transactional(site, source, 4, commit=False)
    site.wait_until(lambda: part(url, source, count=1).body["end_offset"] == 18, "the last marker")
    found, offset, parts = [], 0, 0
    while True:
        response = part(url, source, offset=offset, count=2)
        assert response.status == 200, response
        if not response.body["records"]:
            break
        assert response.body["next_offset"] > offset
        found += response.body["records"]
        offset, parts = response.body["next_offset"], parts + 1
    assert [record["offset"] for record in found] == [0, 1, 2, 3, 4, 9, 10, 12]
    assert [record["value"] for record in found][-3:] == [{"t": 0}, {"t": 1}, {"n": 5}]
    assert found[0]["headers"] == {"X-Correlation-Id": f"{source}:0:0"}
    assert (response.body["next_offset"], response.body["end_offset"], parts) == (18, 18, 4)
    every = part(url, source, isolation="read_uncommitted", count=100).body["records"]
    assert len(every) == 15
    assert not [group for group in asyncio.run(site.admin.list_groups()) if source in group.name]


def test_a_part_is_bounded_by_records_and_bytes(url: str, site: Scenario, source: str) -> None:
    site.write(source, *(OutgoingRecord(source, None, b'"%s"' % (b"x" * 998), None, 1) for _ in range(20)))
    counts = [len(part(url, source, 1, **{limit: 3000}).body["records"]) for limit in ("max_bytes", "maxBytes")]
    assert counts == [3, 3]
    assert part(url, source, 1, max_bytes=1).body["next_offset"] == 1
    assert part(url, source, 1, count=7, offset=2).body["next_offset"] == 9
    last = part(url, source, 1, offset=20).body
    assert (last["records"], last["next_offset"], last["first_offset"], last["end_offset"]) == ([], 20, 0, 20)


def test_records_that_no_format_fits_are_entries_and_formats_are_chosen(url: str, site: Scenario, source: str) -> None:
    site.write(source, *(OutgoingRecord(source, b"\x01", value, None, 0) for value in (b"{}", b"\xff", None)))
    good, broken, tombstone = part(url, source).body["records"]
    assert (good["value"], good["key"]) == ({}, "\x01") and "value" not in tombstone
    assert (broken["errorCode"], broken["rawValue"]) == ("ERR40009", "/w==")
    assert [record.get("value") for record in part(url, source, format="BINARY").body["records"]] == [
        "e30=",
        "/w==",
        None,
    ]
    found = part(url, source, format="auto").body["records"]
    assert [(record.get("value"), record["valueFormat"]) for record in found] == [
        ("{}", "string"),
        ("/w==", "binary"),
        (None, "null"),
    ]
    assert part(url, source, format="auto", valueFormat="json").status == 400
    assert part(url, source, valueFormat="string", keyFormat="binary").body["records"][0]["key"] == "AQ=="


def test_offsets_outside_the_log_are_refused_with_its_bounds(url: str, site: Scenario, source: str) -> None:
    site.write(source, *(OutgoingRecord(source, None, b"0", None, 0) for _ in range(10)))
    site.remove_before(source, 4)
    for offset in (3, 11):
        response = part(url, source, offset=offset)
        assert (response.status, response.body["code"]) == (416, "ERR40071")
        assert (response.body["metadata"]["first_offset"], response.body["metadata"]["end_offset"]) == (4, 10)
    assert part(url, source).body["records"][0]["offset"] == 4


def test_parts_are_refused_with_a_code(url: str, source: str) -> None:
    assert part(url, "no-such-topic").body["code"] == "ERR40006"
    assert part(url, source, 7).body["code"] == "ERR40007"
    assert (
        part(url, source, "x").status
        == part(url, source, count=0).status
        == part(url, source, format="xml").status
        == 400
    )
    assert part(url, source, offsett=1).body["description"].endswith("did you mean offset?")
    for internal in ("_audit-active", "__consumer_offsets", "_headrace-control"):
        assert (part(url, internal).status, part(url, internal).body["code"]) == (403, "ERR40063")


def value_of(url: str, metric: str) -> float:
    """Return the value of a metric, with its labels as they are shown."""
    lines = Scenario.ask(f"{url}/metrics").body.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric} "))


def test_operators_see_instances_their_lag_and_their_reads(
    site: Scenario, headrace: StartHeadrace, source: str
) -> None:
    """In `/adm/consumers`, in the command, in metrics and in the audit."""
    url = headrace({**site.config, "audit": {"to": "topic", "topic": "_audit-active"}}).url
    site.write(source, *(OutgoingRecord(source, b"k", b"%d" % n, None, 0) for n in range(7)))
    instance = Instance(url, source, name="one")
    instance.ok("POST", "/assignments", {"partitions": [{"topic": source, "partition": 0}]})
    instance.first("&max_records=2")
    assert len(instance.ok("GET", "/records?max_records=3")) == 3
    shown = site.ask(f"{url}/adm/consumers?group={source}").body
    (one,) = shown["consumers"]
    expected = (source, "one", [source], {f"{source}-0": 2}, 2)
    assert (one["group"], one["name"], one["topics"], one["lags"], one["lag"]) == expected
    assert (one["bufferedBytes"], one["isReading"], one["principal"], one["valueFormat"]) == (4, False, "", "json")
    assert one["idleSeconds"] >= 0 and one["lastRead"] > 1_700_000_000 and "(pid " in shown["process"]
    rows = [line.split()[:5] for line in site.cli("status", "--url", url).stdout.splitlines()]
    assert ["NAME", "PRINCIPAL", "TOPICS", "PARTITIONS", "LAG"] in rows
    assert [f"{source}/one", "-", source, "1", "2"] in rows
    assert value_of(url, "headrace_active_instances") == 1
    assert value_of(url, "headrace_active_delivered_records_total") == 5
    assert value_of(url, f'headrace_consumer_lag_records{{group="{source}",partition="0",topic="{source}"}}') == 2

    assert len(part(url, source, offset=5).body["records"]) == 2

    def events() -> list[Any]:
        found = [json.loads(record.value or b"") for record in site.records("_audit-active")]
        return [event for event in found if event.get("topic") == source and event["auditType"] == "ACTIVE_CONSUMER"]

    site.wait_until(lambda: sum(event.get("count", 1) for event in events()) == 7, "the audit of the reads")
    assert {(event["action"], event.get("group"), event["auditStatus"]) for event in events()} == {
        ("read", source, "SUCCESS"),
        ("read", None, "SUCCESS"),
    }
    control = [json.loads(record.value or b"") for record in site.records("_audit-active")]
    assert [event["action"] for event in control if event.get("target") == f"active consumer {source}/one"] == [
        "create"
    ]
    assert min(event["offset"] for event in events()) == 0 and max(event["lastOffset"] for event in events()) == 6


def test_operators_see_what_they_may(site: Scenario, headrace: StartHeadrace, source: str) -> None:
    """A principal sees its own instances, an administrator all; others are refused."""
    scopes = {"one": ["kafka:w", "kafka:r", "consumers:r"], "two": ["kafka:w", "kafka:r"], "root": ["admin"]}
    principals = {who: {"token": f"${{env:TOKEN_{who}}}", "scopes": given} for who, given in scopes.items()}
    tokens = {f"TOKEN_{who}": f"{who:->16}" for who in scopes}
    process = headrace({**site.config, "security": {"mode": "token", "principals": principals}}, env=tokens)

    def ask(who: str, path: str, body: Any = None) -> tuple[int, Any]:
        method, headers = "POST" if body else "GET", {"Authorization": f"Bearer {who:->16}"}
        return send(method, process.url + path, body, headers)

    for who in ("one", "two"):
        assert ask(who, f"/consumers/{source}", {"name": who})[0] == 200
    seen = {who: ask(who, "/adm/consumers") for who in scopes}
    assert [one["principal"] for one in seen["one"][1]["consumers"]] == ["one"]
    assert [one["principal"] for one in seen["root"][1]["consumers"]] == ["one", "two"]
    assert seen["two"][0] == 403
    assert ask("root", f"/topics/{source}/partitions/0/records")[0] == 403
    assert ask("one", f"/topics/{source}/partitions/0/records")[0] == 200


def failed(record: dict[str, Any], **result: Any) -> dict[str, Any]:
    return {"record": record, "processed": False, "key": "alice", **result}


def test_a_dead_letter_is_fetched_until_the_next_call_confirms_it(url: str, site: Scenario, source: str) -> None:
    """Not when it was answered: an instance that ends before gives it to the next one."""
    path, where = f"{url}/consumers/deadLetter/active", {"topic": source, "timeout": 5000, "group": source}
    assert site.ask(f"{path}?{urlencode(where)}").body == []  # there is no dead letter topic
    records = [
        {"topic": source, "partition": 0, "offset": n, "value": {"n": n}, "headers": {"h": "1"}} for n in range(3)
    ]
    assert site.ask(path, [failed(record) for record in records]).status == 200

    def fetch() -> list[int]:
        response = site.ask(f"{path}?{urlencode(where)}")
        assert response.status == 200, response
        return [record["value"]["n"] for record in response.body]

    def end() -> None:
        assert send("DELETE", f"{url}/consumers/{source}/instances/Active-Replay-1289990").status == 204

    found: list[int] = []
    site.wait_until(lambda: found.extend(fetch()) or len(found) == 3, "the dead letters")
    end()
    again: list[int] = []
    site.wait_until(lambda: again.extend(fetch()) or len(again) == 3, "the dead letters again")
    assert sorted(found) == sorted(again) == [0, 1, 2]
    assert fetch() == []
    end()
    assert sum(site.committed(source).values()) == 3
    assert fetch() == []
    refused = site.ask(path)
    assert (refused.status, refused.body["code"]) == (400, "ERR30001")


def test_clients_write_dead_letters_in_the_shape_of_light_4j(url: str, site: Scenario, source: str) -> None:
    path = f"{url}/consumers/deadLetter/active"
    record = {
        "topic": source,
        "partition": 1,
        "offset": 7,
        "timestamp": 1_700_000_000_000,
        "key": "k",
        "value": {"n": 1},
    }
    record["headers"] = {"mine": "1", "headrace.redrive.count": "9", "X-Correlation-Id": "old"}
    response = site.ask(path, [failed(record, stacktrace="boom", correlationId="c", traceabilityId="t")])
    assert response.status == 200, response
    (one,) = response.body
    assert (one["topic"], one["serializeKeySize"], one["serializeValueSize"]) == (f"{source}.dlq", 5, 8)
    assert (
        one["timestamp"] == pytest.approx(time.time(), abs=60) and one["partitionId"] in (0, 1) and one["offset"] == 0
    )
    (stored,) = site.records(f"{source}.dlq")
    headers = dict(stored.headers)
    assert (stored.key, stored.value, len(headers)) == (b"alice", b'{"n": 1}', len(stored.headers))
    assert (headers["StackTrace"], headers["X-Correlation-Id"], headers["X-Traceability-Id"]) == (b"boom", b"c", b"t")
    assert headers["mine"] == b"1" and "headrace.redrive.count" not in headers
    origin = origin_of(stored.headers)
    assert origin and (origin.partition, origin.offset, origin.attempts) == ((source, 1), 7, 1)
    # What was fetched and fails again stays in its topic, and keeps its history.
    fetched = part(url, f"{source}.dlq", stored.partition).body["records"][0]
    again = {"consumerRecord": fetched, "processed": False, "key": "alice", "stacktrace": "boom again"}
    assert site.ask(path, [again]).body[0]["topic"] == f"{source}.dlq"
    second = next(one for one in site.records(f"{source}.dlq") if (one.partition, one.offset) != (stored.partition, 0))
    origin = origin_of(second.headers)
    assert origin and (origin.partition, origin.offset, origin.attempts) == ((source, 1), 7, 2)
    assert (second.value, origin.text("reason")) == (b'{"n": 1}', "boom again")
    raw = {**record, "rawValue": "/w=="}
    assert site.ask(path, [failed(raw), failed({**record, "value": None})]).status == 200
    assert {one.value for one in site.records(f"{source}.dlq")} == {b'{"n": 1}', b"\xff", None}
    for body in ([{"processed": False}], {"record": record}, [failed({**record, "rawValue": "?"})]):
        refused = site.ask(path, body)
        assert (refused.status, refused.body["code"]) == (400, "ERR30003")
    assert site.ask(path, [failed({**record, "topic": "no-such-topic"})]).status == 404
