"""What operators and tools use of active consumers, on a real broker: records without an instance, limits, lists."""

from __future__ import annotations

import contextlib
import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from headrace.delivery.dead_letter import origin_of
from headrace.records import OutgoingRecord
from headrace.testing.scene import JsonAnswer, Scene

pytestmark = pytest.mark.xdist_group("active")


@pytest.fixture
def site(kafka: Any, tmp_path: Path) -> Scene:
    return Scene(kafka.bootstrap_servers, tmp_path)


@pytest.fixture
def url(site: Scene, module_headrace: Callable[..., Any]) -> str:
    return module_headrace({**site.config, "audit": {"to": "topic", "topic": "_audit-active"}}).url


@pytest.fixture
def name(kafka: Any) -> str:
    name = f"slices-{uuid.uuid4().hex[:12]}"
    kafka.create_topic(name, 2, {})
    return name


def part(url: str, name: str, partition: int | str = 0, **query: Any) -> JsonAnswer:
    return Scene.ask(f"{url}/topics/{name}/partitions/{partition}/records?{urlencode(query)}")


def transactional(site: Scene, name: str, count: int, *, commit: bool) -> confluent_kafka.Producer:
    """Write records in a transaction of its own."""
    producer = confluent_kafka.Producer({"bootstrap.servers": site.kafka.bootstrap_servers, "transactional.id": name})
    producer.init_transactions()
    producer.begin_transaction()
    for number in range(count):
        producer.produce(name, b'{"t":%d}' % number, partition=0)
    producer.flush()
    if commit:
        producer.commit_transaction()
    else:
        producer.abort_transaction()
    return producer


def test_a_tool_reads_a_whole_partition_in_parts(url: str, site: Scene, name: str) -> None:
    """Past markers and aborted transactions, in the middle and at the end; nothing is joined or committed."""
    site.write(name, *(OutgoingRecord(name, b"k", b'{"n":%d}' % n, None, 0) for n in range(5)))
    transactional(site, name, 3, commit=False)
    transactional(site, name, 2, commit=True)
    site.write(name, OutgoingRecord(name, b"k", b'{"n":5}', None, 0))
    transactional(site, name, 4, commit=False)
    site.wait_until(lambda: part(url, name, count=1).body["end_offset"] == 18, "the last marker")
    found, offset, parts = [], 0, 0
    while True:
        answer = part(url, name, offset=offset, count=2)
        assert answer.status == 200, answer
        if not answer.body["records"]:
            break
        assert answer.body["next_offset"] > offset
        found += answer.body["records"]
        offset, parts = answer.body["next_offset"], parts + 1
    assert [record["offset"] for record in found] == [0, 1, 2, 3, 4, 9, 10, 12]
    assert [record["value"] for record in found][-3:] == [{"t": 0}, {"t": 1}, {"n": 5}]
    assert found[0]["headers"] == {"X-Correlation-Id": f"{name}:0:0"}
    assert (answer.body["next_offset"], answer.body["end_offset"], parts) == (18, 18, 4)
    every = part(url, name, isolation="read_uncommitted", count=100).body["records"]
    assert len(every) == 15
    assert not [
        group
        for group in AdminClient({"bootstrap.servers": site.kafka.bootstrap_servers})
        .list_consumer_groups()
        .result()
        .valid
        if name in group.group_id
    ]


def test_an_open_transaction_ends_a_part_where_others_may_not_read(url: str, site: Scene, name: str) -> None:
    site.write(name, OutgoingRecord(name, None, b"1", None, 0))
    producer = confluent_kafka.Producer({"bootstrap.servers": site.kafka.bootstrap_servers, "transactional.id": name})
    producer.init_transactions()
    producer.begin_transaction()
    for _ in range(3):
        producer.produce(name, b"2", partition=0)
    producer.flush()
    answer = part(url, name)
    assert [record["value"] for record in answer.body["records"]] == [1]
    assert (answer.body["next_offset"], answer.body["end_offset"]) == (1, 1)
    assert part(url, name, offset=3).body["records"] == []
    assert part(url, name, offset=3).body["next_offset"] == 3
    assert len(part(url, name, isolation="read_uncommitted").body["records"]) == 4
    producer.abort_transaction()


def test_a_part_is_bounded_by_records_and_bytes(url: str, site: Scene, name: str) -> None:
    site.write(name, *(OutgoingRecord(name, None, b'"%s"' % (b"x" * 998), None, 1) for _ in range(20)))
    counts = [len(part(url, name, 1, **{limit: 3000}).body["records"]) for limit in ("max_bytes", "maxBytes")]
    assert counts == [3, 3]
    assert part(url, name, 1, max_bytes=1).body["next_offset"] == 1
    assert part(url, name, 1, count=7, offset=2).body["next_offset"] == 9
    last = part(url, name, 1, offset=20).body
    assert (last["records"], last["next_offset"], last["first_offset"], last["end_offset"]) == ([], 20, 0, 20)


def test_records_that_no_format_fits_are_entries_and_formats_are_chosen(url: str, site: Scene, name: str) -> None:
    site.write(name, *(OutgoingRecord(name, b"\x01", value, None, 0) for value in (b"{}", b"\xff", None)))
    good, broken, tombstone = part(url, name).body["records"]
    assert (good["value"], good["key"]) == ({}, "\x01") and "value" not in tombstone
    assert (broken["errorCode"], broken["rawValue"]) == ("ERR40009", "/w==")
    assert [record.get("value") for record in part(url, name, format="BINARY").body["records"]] == [
        "e30=",
        "/w==",
        None,
    ]
    assert part(url, name, valueFormat="string", keyFormat="binary").body["records"][0]["key"] == "AQ=="


def test_offsets_outside_the_log_are_said_with_its_bounds(url: str, site: Scene, name: str) -> None:
    site.write(name, *(OutgoingRecord(name, None, b"0", None, 0) for _ in range(10)))
    client = AdminClient({"bootstrap.servers": site.kafka.bootstrap_servers})
    for future in client.delete_records([confluent_kafka.TopicPartition(name, 0, 4)]).values():
        future.result()
    for offset in (3, 11):
        answer = part(url, name, offset=offset)
        assert (answer.status, answer.body["code"]) == (416, "ERR40071")
        assert (answer.body["metadata"]["first_offset"], answer.body["metadata"]["end_offset"]) == (4, 10)
    assert part(url, name).body["records"][0]["offset"] == 4


def test_parts_are_refused_with_a_code(url: str, name: str) -> None:
    assert part(url, "no-such-topic").body["code"] == "ERR40006"
    assert part(url, name, 7).body["code"] == "ERR40007"
    assert part(url, name, "x").status == part(url, name, count=0).status == part(url, name, format="xml").status == 400
    assert part(url, name, offsett=1).body["description"].endswith("did you mean offset?")
    for internal in ("_audit-active", "__consumer_offsets", "_headrace-control"):
        assert (part(url, internal).status, part(url, internal).body["code"]) == (403, "ERR40063")


def test_waiting_readers_and_producers_do_not_shut_each_other_out(
    site: Scene, headrace: Callable[..., Any], name: str
) -> None:
    """Ten readers against a limit of two: two wait, the others are answered 503, and producing goes through."""
    process = headrace({**site.config, "http": {"max_connections": 4, "reader_share": 0.5}})
    paths = []
    for number in range(10):
        created = site.ask(
            f"{process.url}/consumers/{name}-{number}", {"name": "one", "autoOffsetReset": "earliest"}
        ).body
        paths.append(process.url + created["base_uri"])
        assert site.ask(f"{paths[-1]}/assignments", {"partitions": [{"topic": name, "partition": 0}]}).status == 204
    answers: list[JsonAnswer] = []

    def read(path: str) -> None:
        with contextlib.suppress(ConnectionError):
            answers.append(site.ask(f"{path}/records?timeout=30000"))

    readers = [threading.Thread(target=read, args=(path,)) for path in paths]
    for reader in readers:
        reader.start()
    site.wait_until(lambda: len(answers) == 8, "the other readers to be refused")
    assert {(answer.status, answer.body["code"]) for answer in answers} == {(503, "ERR40031")}
    assert "http.reader_share" in answers[0].body["description"]
    shown = site.ask(f"{process.url}/metrics").body
    assert 'headrace_http_connections{kind="reads"} 2.0' in shown
    assert site.ask(f"{process.url}/health/liveness").status == 200
    assert site.ask(f"{process.url}/producers/{name}", {"records": [{"value": 1, "partition": 0}]}).status == 200
    for reader in readers:
        reader.join()
    assert [answer.status for answer in answers] == [503] * 8 + [200] * 2
    assert [answer.body[0]["value"] for answer in answers[8:]] == [1, 1]


def reading(url: str, site: Scene, name: str, **settings: Any) -> str:
    """Create an instance that reads partition 0, and return its URL."""
    body = {"name": "one", "autoOffsetReset": "earliest", **settings}
    path = url + site.ask(f"{url}/consumers/{name}", body).body["base_uri"]
    assert site.ask(f"{path}/assignments", {"partitions": [{"topic": name, "partition": 0}]}).status == 204
    return path


def value_of(url: str, metric: str) -> float:
    """Return the value of a metric, with its labels as they are shown."""
    lines = Scene.ask(f"{url}/metrics").body.splitlines()
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{metric} "))


def test_operators_see_instances_their_lag_and_their_reads(site: Scene, headrace: Any, name: str) -> None:
    """In `/adm/consumers`, in the command, in metrics and in the audit."""
    url = headrace({**site.config, "audit": {"to": "topic", "topic": "_audit-active"}}).url
    site.write(name, *(OutgoingRecord(name, b"k", b"%d" % n, None, 0) for n in range(7)))
    path = reading(url, site, name)
    site.wait_until(lambda: site.ask(f"{path}/records?max_records=2&timeout=5000").body, "the first records")
    assert len(site.ask(f"{path}/records?max_records=3").body) == 3
    shown = site.ask(f"{url}/adm/consumers?group={name}").body
    (one,) = shown["consumers"]
    assert (one["group"], one["name"], one["topics"], one["lags"], one["lag"]) == (
        name,
        "one",
        [name],
        {f"{name}-0": 2},
        2,
    )
    assert (one["bufferedBytes"], one["isReading"], one["principal"], one["valueFormat"]) == (4, False, "", "json")
    assert one["idleSeconds"] >= 0 and one["lastRead"] > 1_700_000_000 and "(pid " in shown["process"]
    listed = site.cli("consumers", "list", "--url", url, "--group", name).stdout.splitlines()
    assert listed[0].split()[:5] == ["INSTANCE", "PRINCIPAL", "TOPICS", "PARTITIONS", "LAG"]
    assert listed[1].split()[:5] == [f"{name}/one", "-", name, "1", "2"]
    assert json.loads(site.cli("consumers", "list", "--url", url, "--output", "json").stdout)[0]["group"] == name
    assert value_of(url, "headrace_active_instances") == 1
    assert (value_of(url, "headrace_active_reads_total"), value_of(url, "headrace_active_waiting_reads")) == (2, 0)
    assert value_of(url, "headrace_active_delivered_records_total") == 5
    assert value_of(url, "headrace_active_delivered_bytes_total") == 10
    assert value_of(url, f'headrace_consumer_lag_records{{group="{name}",partition="0",topic="{name}"}}') == 2

    assert len(part(url, name, offset=5).body["records"]) == 2

    def notes() -> list[Any]:
        found = [json.loads(record.value or b"") for record in site.records("_audit-active")]
        return [note for note in found if note.get("topic") == name and note["auditType"] == "ACTIVE_CONSUMER"]

    site.wait_until(lambda: sum(note.get("count", 1) for note in notes()) == 7, "the audit of the reads")
    assert {(note["action"], note.get("group"), note["auditStatus"]) for note in notes()} == {
        ("read", name, "SUCCESS"),
        ("read", None, "SUCCESS"),
    }
    control = [json.loads(record.value or b"") for record in site.records("_audit-active")]
    assert [note["action"] for note in control if note.get("target") == f"active consumer {name}/one"] == ["create"]
    assert min(note["offset"] for note in notes()) == 0 and max(note["lastOffset"] for note in notes()) == 6


def test_operators_see_what_they_may(site: Scene, headrace: Callable[..., Any], name: str) -> None:
    """A principal sees its own instances, an administrator all; others are refused."""
    scopes = {"one": ["kafka:w", "kafka:r", "consumers:r"], "two": ["kafka:w", "kafka:r"], "root": ["admin"]}
    principals = {who: {"token": f"${{env:TOKEN_{who}}}", "scopes": given} for who, given in scopes.items()}
    tokens = {f"TOKEN_{who}": f"{who:->16}" for who in scopes}
    process = headrace({**site.config, "security": {"mode": "token", "principals": principals}}, env=tokens)

    def ask(who: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {who:->16}", "Content-Type": "application/json"}
        try:
            with urllib.request.urlopen(urllib.request.Request(process.url + path, data, headers)) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    for who in ("one", "two"):
        assert ask(who, f"/consumers/{name}", {"name": who})[0] == 200
    seen = {who: ask(who, "/adm/consumers") for who in scopes}
    assert [one["principal"] for one in seen["one"][1]["consumers"]] == ["one"]
    assert [one["principal"] for one in seen["root"][1]["consumers"]] == ["one", "two"]
    assert seen["two"][0] == 403
    assert ask("root", f"/topics/{name}/partitions/0/records")[0] == 403
    assert ask("one", f"/topics/{name}/partitions/0/records")[0] == 200


def failed(record: dict[str, Any], **result: Any) -> dict[str, Any]:
    return {"record": record, "processed": False, "key": "alice", **result}


def test_a_dead_letter_is_fetched_until_the_next_call_confirms_it(url: str, site: Scene, name: str) -> None:
    """Not when it was answered: an instance that ends before gives it to the next one."""
    path, where = f"{url}/consumers/deadLetter/active", {"topic": name, "timeout": 5000, "group": name}
    assert site.ask(f"{path}?{urlencode(where)}").body == []  # there is no dead letter topic
    records = [{"topic": name, "partition": 0, "offset": n, "value": {"n": n}, "headers": {"h": "1"}} for n in range(3)]
    assert site.ask(path, [failed(record) for record in records]).status == 200

    def fetch() -> list[int]:
        answer = site.ask(f"{path}?{urlencode(where)}")
        assert answer.status == 200, answer
        return [record["value"]["n"] for record in answer.body]

    def end() -> None:
        instance = f"{url}/consumers/{name}/instances/Active-Replay-1289990"
        urllib.request.urlopen(urllib.request.Request(instance, method="DELETE")).close()

    found: list[int] = []
    site.wait_until(lambda: found.extend(fetch()) or len(found) == 3, "the dead letters")
    end()
    again: list[int] = []
    site.wait_until(lambda: again.extend(fetch()) or len(again) == 3, "the dead letters again")
    assert sorted(found) == sorted(again) == [0, 1, 2]
    assert fetch() == []
    end()
    assert sum(site.committed(name).values()) == 3
    assert fetch() == []
    refused = site.ask(path)
    assert (refused.status, refused.body["code"]) == (400, "ERR30001")


def test_clients_write_dead_letters_in_the_shape_of_light_4j(url: str, site: Scene, name: str) -> None:
    path = f"{url}/consumers/deadLetter/active"
    record = {"topic": name, "partition": 1, "offset": 7, "timestamp": 1_700_000_000_000, "key": "k", "value": {"n": 1}}
    record["headers"] = {"mine": "1", "headrace.redrive.count": "9", "X-Correlation-Id": "old"}
    answer = site.ask(path, [failed(record, stacktrace="boom", correlationId="c", traceabilityId="t")])
    assert answer.status == 200, answer
    (one,) = answer.body
    assert (one["topic"], one["serializeKeySize"], one["serializeValueSize"]) == (f"{name}.dlq", 5, 8)
    assert (
        one["timestamp"] == pytest.approx(time.time(), abs=60) and one["partitionId"] in (0, 1) and one["offset"] == 0
    )
    (stored,) = site.records(f"{name}.dlq")
    headers = dict(stored.headers)
    assert (stored.key, stored.value, len(headers)) == (b"alice", b'{"n": 1}', len(stored.headers))
    assert (headers["StackTrace"], headers["X-Correlation-Id"], headers["X-Traceability-Id"]) == (b"boom", b"c", b"t")
    assert headers["mine"] == b"1" and "headrace.redrive.count" not in headers
    origin = origin_of(stored.headers)
    assert origin and (origin.partition, origin.offset, origin.attempts) == ((name, 1), 7, 1)
    # What was fetched and fails again stays in its topic, and keeps its history.
    fetched = part(url, f"{name}.dlq", stored.partition).body["records"][0]
    again = {"consumerRecord": fetched, "processed": False, "key": "alice", "stacktrace": "boom again"}
    assert site.ask(path, [again]).body[0]["topic"] == f"{name}.dlq"
    second = next(one for one in site.records(f"{name}.dlq") if (one.partition, one.offset) != (stored.partition, 0))
    origin = origin_of(second.headers)
    assert origin and (origin.partition, origin.offset, origin.attempts) == ((name, 1), 7, 2)
    assert (second.value, origin.text("reason")) == (b'{"n": 1}', "boom again")
    raw = {**record, "rawValue": "/w=="}
    assert site.ask(path, [failed(raw), failed({**record, "value": None})]).status == 200
    assert {one.value for one in site.records(f"{name}.dlq")} == {b'{"n": 1}', b"\xff", None}
    for body in ([{"processed": False}], {"record": record}, [failed({**record, "rawValue": "?"})]):
        refused = site.ask(path, body)
        assert (refused.status, refused.body["code"]) == (400, "ERR30003")
    assert site.ask(path, [failed({**record, "topic": "no-such-topic"})]).status == 404
