"""Produce as the seed document and sidecar.md 5 say it: formats x schema inputs, headers, partial failure, statuses."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer, TopicPartition

from headrace.testing import HeadraceProcess

QUICK = {"fetch.wait.max.ms": 10}
FIELDS = [{"name": "name", "type": "string"}, {"name": "n", "type": "long"}]
AVRO = json.dumps({"type": "record", "name": "Thing", "fields": FIELDS})
JSON_SCHEMA = json.dumps({"type": "object", "required": ["name"], "properties": {"n": {"type": "integer"}}})
PROTO = 'syntax = "proto3"; message Thing { string name = 1; int64 n = 2; }'
THING = {"name": "é", "n": 2**53 + 1}
THING_JSON = json.dumps(THING).encode()


class Format(NamedTuple):
    """A format: its code in the seed document, a value, the bytes it must become, and its schema."""

    code: int
    value: Any
    stored: bytes
    misfit: Any
    schema: str = ""
    registry_type: str = ""


FORMATS = {
    "binary": Format(0, "AAH/", b"\x00\x01\xff", "no base64!"),
    "string": Format(5, "é", "é".encode(), 1),
    "json": Format(2, THING, THING_JSON, None),
    "avro": Format(1, THING, b"\x04\xc3\xa9\x82\x80\x80\x80\x80\x80\x80\x20", {"name": 1}, AVRO, "AVRO"),
    "jsonschema": Format(3, THING, THING_JSON, {"n": 1}, JSON_SCHEMA, "JSON"),
    "protobuf": Format(
        4, THING, b"\x00\x0a\x02\xc3\xa9\x10\x81\x80\x80\x80\x80\x80\x80\x10", {"name": 1}, PROTO, "PROTOBUF"
    ),
}
"""The bytes are written by hand from the specifications of the encodings."""
PARTS = ("key", "value")
WITH_SCHEMA = [name for name, form in FORMATS.items() if form.schema]


class Produce:
    """A running Headrace, a topic, registered schemas, and a client that keeps its connection."""

    def __init__(self, process: HeadraceProcess, kafka: Any, registry_url: str) -> None:
        self.process = process
        self._registry = registry_url
        self._connection = http.client.HTTPConnection(process.url.removeprefix("http://"), timeout=120)
        self._consumer = Consumer({"bootstrap.servers": kafka.bootstrap_servers, "group.id": "test-reader", **QUICK})

    def post(self, topic: str, body: Any, **headers: str) -> tuple[int, Any]:
        """Send a request, and check that its response is one of ours."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        path = topic if topic.startswith("/") else f"/producers/{topic}"
        self._connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
        response = self._connection.getresponse()
        assert response.getheader("Content-Type") == "application/json"
        return response.status, json.loads(response.read())

    def read(self, topic: str, place: dict[str, int]) -> Any:
        """Return the record that a response speaks of."""
        self._consumer.assign([TopicPartition(topic, place["partition"], place["offset"])])
        (record,) = self._consumer.consume(1, timeout=120)
        assert not record.error()
        assert (record.partition(), record.offset()) == (place["partition"], place["offset"])
        return record

    def register(self, subject: str, name: str) -> int:
        """Register a format's schema and return its id."""
        body = {"schema": FORMATS[name].schema, "schemaType": FORMATS[name].registry_type}
        headers = {"Content-Type": "application/vnd.schemaregistry.v1+json"}
        url = f"{self._registry}/subjects/{subject}/versions"
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as response:
            return int(json.load(response)["id"])

    def close(self) -> None:
        self._connection.close()
        self._consumer.close()


@pytest.fixture(scope="module")
def produce(kafka: Any, schema_registry: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Produce]:
    """One process for the whole file, with what the original writes into records switched on."""
    config = {
        "kafka": {"bootstrap_servers": kafka.bootstrap_servers},
        "schema_registry": {"url": schema_registry.url, "timeout_seconds": 60},
    }
    process = HeadraceProcess(config, tmp_path_factory.mktemp("conformance"))
    process.start()
    process.wait_ready()
    client = Produce(process, kafka, schema_registry.url)
    yield client
    client.close()
    process.kill()


@pytest.fixture(scope="module")
def place(kafka: Any) -> str:
    """A topic of two partitions."""
    name = f"conformance-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, 2, {"max.message.bytes": "2000"})
    return name


class Subject(NamedTuple):
    """A topic whose subjects hold a format's schema, and one more subject that does."""

    topic: str
    other: str
    schema_id: int


@pytest.fixture(scope="module")
def subjects(kafka: Any, produce: Produce) -> dict[str, Subject]:
    """Everything registered that the schema inputs of a request name."""
    found = {}
    for name in WITH_SCHEMA:
        topic = f"conformance-{name}-{uuid.uuid4().hex[:8]}"
        kafka.create_topic(topic, 1, {})
        ids = {produce.register(f"{topic}-{end}", name) for end in ("key", "value", "other")}
        assert len(ids) == 1
        found[name] = Subject(topic, f"{topic}-other", ids.pop())
    return found


def stored(name: str, schema_id: int | None) -> bytes:
    """Return what a format's value must be in Kafka."""
    head = b"" if schema_id is None else b"\x00" + schema_id.to_bytes(4, "big")
    return head + FORMATS[name].stored


@pytest.mark.parametrize(("key", "value"), [*itertools.product(FORMATS, FORMATS)])
def test_every_format_for_key_and_value(produce: Produce, place: str, key: str, value: str) -> None:
    """6 x 6, as names and as codes of the seed document, with schema text, byte for byte."""
    parts = {"key": key, "value": value}
    body: dict[str, Any] = {"records": [{"key": FORMATS[key].value, "value": FORMATS[value].value}]}
    for part, name in parts.items():
        if FORMATS[name].schema:
            body |= {f"{part}Schema": FORMATS[name].schema, f"{part}SchemaSubject": f"{place}-{name}"}
    responses = []
    for spell in (str.upper, lambda name: FORMATS[name].code):
        status, response = produce.post(place, body | {f"{part}Format": spell(name) for part, name in parts.items()})
        assert status == 200, response
        record = produce.read(place, response["offsets"][0])
        assert record.key() == stored(key, response.get("key_schema_id"))
        assert record.value() == stored(value, response.get("value_schema_id"))
        responses.append({name: response[name] for name in response if name != "offsets"})
    assert responses[0] == responses[1]
    assert ("key_schema_id" in responses[0], "value_schema_id" in responses[0]) == (
        bool(FORMATS[key].schema),
        bool(FORMATS[value].schema),
    )


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_named_in_any_case(produce: Produce, place: str, name: str) -> None:
    """As the original's code does, although its document has capitals only; anything else is refused in words."""
    schema = {"valueSchema": FORMATS[name].schema, "valueSchemaSubject": f"{place}-{name}"}
    for spelled in (name, name.upper(), name.title(), name[0] + name[1:].upper()):
        body = {"valueFormat": spelled, "records": [{"value": FORMATS[name].value}]}
        status, response = produce.post(place, body | (schema if FORMATS[name].schema else {}))
        assert status == 200, response
        record = produce.read(place, response["offsets"][0])
        assert record.value() == stored(name, response.get("value_schema_id"))
    for spelled in (f"{name} ", f" {name}", f"{name}s", 6, -1, 2**70, 1.5, True, [name], {"name": name}):
        status, response = produce.post(place, {"valueFormat": spelled, "records": [{"value": FORMATS[name].value}]})
        assert (status, response["code"]) == (400, "ERR11004"), spelled


INPUTS: dict[str, Callable[[str, Subject], dict[str, Any]]] = {
    "none": lambda part, subject: {},
    "text": lambda part, subject: {f"{part}Schema": ...},
    "id": lambda part, subject: {f"{part}SchemaId": subject.schema_id},
    "version": lambda part, subject: {f"{part}SchemaVersion": 1},
    "subject": lambda part, subject: {f"{part}SchemaSubject": subject.other},
    "subject and text": lambda part, subject: {f"{part}SchemaSubject": subject.other, f"{part}Schema": ...},
    "subject and id": lambda part, subject: {
        f"{part}SchemaSubject": subject.other,
        f"{part}SchemaId": subject.schema_id,
    },
    "subject and version": lambda part, subject: {f"{part}SchemaSubject": subject.other, f"{part}SchemaVersion": 1},
}
CONFLICTS: dict[str, tuple[str, Callable[[str, Subject], dict[str, Any]]]] = {
    "id and version": (
        "ERR12210",
        lambda part, subject: {f"{part}SchemaId": subject.schema_id, f"{part}SchemaVersion": 1},
    ),
    "id and text": ("ERR12211", lambda part, subject: {f"{part}SchemaId": subject.schema_id, f"{part}Schema": ...}),
    "version and text": ("ERR12213", lambda part, subject: {f"{part}SchemaVersion": 1, f"{part}Schema": ...}),
    "all three": (
        "ERR12210",
        lambda part, subject: {f"{part}SchemaId": subject.schema_id, f"{part}SchemaVersion": 1, f"{part}Schema": ...},
    ),
    "text and no format": ("ERR12214", lambda part, subject: {f"{part}Schema": ..., f"{part}Format": None}),
    "unknown id": ("ERR12208", lambda part, subject: {f"{part}SchemaId": 2**31 - 1}),
    "unknown version": ("ERR12208", lambda part, subject: {f"{part}SchemaVersion": 7}),
    "unknown subject": ("ERR12208", lambda part, subject: {f"{part}SchemaSubject": "nobody"}),
    "version of an unknown subject": (
        "ERR12208",
        lambda part, subject: {f"{part}SchemaSubject": "nobody", f"{part}SchemaVersion": 1},
    ),
    "id of another subject": (
        "ERR12208",
        lambda part, subject: {f"{part}SchemaSubject": "nobody", f"{part}SchemaId": subject.schema_id},
    ),
}


def asked(part: str, name: str, given: dict[str, Any], value: Any = ...) -> dict[str, Any]:
    """Return a request whose keys or values are in a format, and which names its schema so."""
    given = {field: FORMATS[name].schema if text is ... else text for field, text in given.items()}
    records = [{part: FORMATS[name].value if value is ... else value}]
    return {f"{part}Format": name, "records": records, **given}


@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("name", WITH_SCHEMA)
@pytest.mark.parametrize("part", PARTS)
def test_every_schema_input(produce: Produce, subjects: dict[str, Subject], part: str, name: str, given: str) -> None:
    """Each way to name a schema finds the same one, and the response says its id."""
    subject = subjects[name]
    status, response = produce.post(subject.topic, asked(part, name, INPUTS[given](part, subject)))
    assert (status, response.get(f"{part}_schema_id")) == (200, subject.schema_id), response
    record = produce.read(subject.topic, response["offsets"][0])
    assert (record.key() if part == "key" else record.value()) == stored(name, subject.schema_id)
    assert (record.value() if part == "key" else record.key()) is None


@pytest.mark.parametrize("given", CONFLICTS)
@pytest.mark.parametrize("name", WITH_SCHEMA)
@pytest.mark.parametrize("part", PARTS)
def test_every_conflict_of_schema_inputs(
    produce: Produce, subjects: dict[str, Subject], part: str, name: str, given: str
) -> None:
    """400 with the code of the case, for keys as for values; and nothing was sent."""
    subject = subjects[name]
    code, make = CONFLICTS[given]
    status, response = produce.post(subject.topic, asked(part, name, make(part, subject)))
    assert (status, response["code"], "offsets" in response) == (400, code, False), response


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.misfit])
@pytest.mark.parametrize("part", PARTS)
def test_what_does_not_fit_its_format_names_its_records(
    produce: Produce, place: str, subjects: dict[str, Subject], part: str, name: str
) -> None:
    """Code, part and every index; the good records of the request are not sent either."""
    topic = subjects[name].topic if name in subjects else place
    body = asked(part, name, {})
    good, bad = body["records"][0], {part: FORMATS[name].misfit}
    good["partition"] = bad["partition"] = 0
    _, before = produce.post(topic, body)
    status, response = produce.post(topic, {**body, "records": [good, bad, bad]})
    assert (status, response["code"]) == (400, "ERR12206")
    assert {"part": part, "index": 1, "indexes": [1, 2]}.items() <= response["metadata"].items()
    _, after = produce.post(topic, body)
    assert after["offsets"][0]["offset"] == before["offsets"][0]["offset"] + 1


def test_record_headers_in_the_order_of_the_original(produce: Produce, place: str) -> None:
    """Traceability, correlation, the record's own; repeats and null stay."""
    own = [["b", "1"], ["a", ""], ["b", None], ["X-CORRELATION-ID", "no"], ["x-traceability-id", "no"], ["é", "ü"]]
    records = [{"value": 1, "traceabilityId": "t", "correlationId": "c", "headers": own}, {"value": 2}]
    records.append({"value": 3, "headers": {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "z": None}})
    ids = {"X-Correlation-Id": "http-c", "X-Traceability-Id": "http-t"}
    status, response = produce.post(place, {"records": records}, **ids)
    assert status == 200, response
    first, second, third = (produce.read(place, entry).headers() for entry in response["offsets"])
    assert first[:2] == [("X-Traceability-Id", b"t"), ("X-Correlation-Id", b"c")]
    assert first[2:] == [("b", b"1"), ("a", b""), ("b", None), ("é", "ü".encode())]
    assert second == [("X-Traceability-Id", b"http-t"), ("X-Correlation-Id", b"http-c")]
    assert [name for name, _ in third[2:]] == ["traceparent", "z"]
    _, response = produce.post(place, {"records": [{"value": 1}]})
    made = dict(produce.read(place, response["offsets"][0]).headers())
    assert set(made) == {"X-Correlation-Id"}
    assert len(base64.urlsafe_b64decode(made["X-Correlation-Id"] + b"==")) == 16


def test_one_record_fails_and_the_others_are_there(produce: Produce, place: str) -> None:
    """200; entries in the order of the request, each with a place or with a code, a reason and an outcome."""
    values = ["first", "x" * 5000, None, "last"]
    # The large one stands alone in its partition: Kafka refuses whole batches.
    records = [{"key": str(n), "value": value, "partition": int(n == 1)} for n, value in enumerate(values)]
    status, response = produce.post(place, {"valueFormat": "string", "records": records})
    assert (status, response["requestStatus"]) == (200, "OK")
    first, failed, third, last = response["offsets"]
    assert (set(failed), failed["errorCode"], failed["outcome"]) == ({"errorCode", "error", "outcome"}, 50002, "fail")
    for entry, value in ((first, b"first"), (third, None), (last, b"last")):
        assert set(entry) == {"partition", "offset"}
        assert produce.read(place, entry).value() == value
    assert [entry["offset"] - first["offset"] for entry in (third, last)] == [1, 2]


def test_tombstones_and_records_without_a_key(produce: Produce, subjects: dict[str, Subject]) -> None:
    """Null and absent are null bytes in every format and ask for no schema; an empty string is not null."""
    topic = subjects["avro"].topic
    for key, value in itertools.product(FORMATS, FORMATS):
        records = [{"value": None}, {"key": None, "value": None}]
        status, response = produce.post(topic, {"keyFormat": key, "valueFormat": value, "records": records})
        assert (status, "value_schema_id" in response) == (200, False)
    for entry in response["offsets"]:
        record = produce.read(topic, entry)
        assert (record.key(), record.value()) == (None, None)
    _, response = produce.post(topic, {"valueFormat": "string", "records": [{"key": "", "value": ""}]})
    record = produce.read(topic, response["offsets"][0])
    assert (record.key(), record.value()) == (b"", b"")


@pytest.mark.parametrize("timestamp", [1, 1_700_000_000_123, 0, -1, None])
def test_timestamps(produce: Produce, place: str, timestamp: int | None) -> None:
    """Milliseconds above zero are kept; anything else is now."""
    began = int(time.time() * 1000)
    _, response = produce.post(place, {"records": [{"value": 1, "timestamp": timestamp}]})
    kept = produce.read(place, response["offsets"][0]).timestamp()[1]
    if timestamp and timestamp > 0:
        assert kept == timestamp
    else:
        assert began <= kept <= int(time.time() * 1000)


def test_an_explicit_partition_wins_over_the_key(produce: Produce, place: str) -> None:
    """The same key lands where each record says."""
    records = [{"key": "k", "value": n, "partition": n % 2} for n in range(6)]
    _, response = produce.post(place, {"records": records})
    assert [entry["partition"] for entry in response["offsets"]] == [0, 1, 0, 1, 0, 1]


def test_a_compacted_topic_wants_keys(produce: Produce, kafka: Any) -> None:
    """Kafka refuses what has none, and the request is at fault."""
    name = f"conformance-compact-{uuid.uuid4().hex[:8]}"
    kafka.create_topic(name, 1, {"cleanup.policy": "compact"})
    status, response = produce.post(name, {"records": [{"value": 1}]})
    assert (status, response["code"], response["offsets"][0]["outcome"]) == (400, "ERR40045", "fail")
    status, response = produce.post(name, {"records": [{"key": "k", "value": 1}]})
    assert (status, response["offsets"]) == (200, [{"partition": 0, "offset": 0}])


NUMBERS = ["-1", "0", "-0", "1e0", "1.5", "2147483648", "9223372036854775807", "9223372036854775808", "9" * 30]
NUMBERS += ["1e308", "-1e308", "1e400", '"1"', '"text"', "true", "[]", "{}", "0x1", "01", "NaN", "Infinity", "-"]
SERVED = {"partition": ["0", "-0"], "timestamp": ["-1", "0", "-0", "2147483648"]}
NOT_THERE = {"partition": ["2147483648", "9223372036854775807", "9223372036854775808", "9" * 30]}
REFUSED_BY_KAFKA = {"timestamp": ["9223372036854775807"]}
NUMBER_FIELDS = ["partition", "timestamp", *(f"{part}Schema{end}" for part in PARTS for end in ("Id", "Version"))]


@pytest.mark.parametrize("field", NUMBER_FIELDS)
def test_numbers_out_of_range(produce: Produce, subjects: dict[str, Subject], field: str) -> None:
    """Row H9: taken as they are, or refused with the code of the case; never changed, and never our fault."""
    part = "key" if field.startswith("key") else "value"
    of_record = field in ("partition", "timestamp")
    for number in NUMBERS:
        record = f'"{part}":{THING_JSON.decode()}' + (f',"{field}":{number}' if of_record else "")
        given = "" if of_record else f',"{field}":{number}'
        body = f'{{"{part}Format":"avro"{given},"records":[{{{record}}}]}}'
        status, response = produce.post(subjects["avro"].topic, body.encode())
        if number in SERVED.get(field, ()):
            assert status == 200, number
        elif number in NOT_THERE.get(field, ()):
            assert (status, response["code"]) == (404, "ERR40007"), number
        elif number in REFUSED_BY_KAFKA.get(field, ()):
            assert (status, response["code"], response["offsets"][0]["outcome"]) == (400, "ERR40045", "fail")
        else:
            assert (status, response["code"]) in ((400, "ERR11004"), (400, "ERR10015")), number


VALID = {"records": [{"value": 1}]}
STATUSES: dict[str, tuple[str, Any, dict[str, str], int, str, str]] = {
    "no such path": ("/nowhere", VALID, {}, 404, "ERR10007", "INVALID_REQUEST_PATH"),
    "method of no use": ("/metrics", VALID, {}, 405, "ERR10008", "METHOD_NOT_ALLOWED"),
    "no JSON": ("", b"{", {}, 400, "ERR10015", "CONTENT_TYPE_MISMATCH"),
    "no body": ("", b"", {}, 400, "ERR11014", "VALIDATOR_REQUEST_BODY_MISSING"),
    "wrong type": ("", {"records": 1}, {}, 400, "ERR11004", "VALIDATOR_SCHEMA"),
    "no records": ("", {}, {}, 400, "ERR11004", "VALIDATOR_SCHEMA"),
    "misfit": ("", {"valueFormat": "binary", **VALID}, {}, 400, "ERR12206", "SERIALIZE_SCHEMA_EXCEPTION"),
    "no schema": ("", {"valueFormat": "avro", **VALID}, {}, 400, "ERR12208", "FAILED_TO_GET_SCHEMA"),
    "no topic": ("nowhere", VALID, {}, 404, "ERR40006", "KAFKA_TOPIC_NOT_FOUND"),
    "no partition": ("", {"records": [{"key": "a", "partition": 2}]}, {}, 404, "ERR40007", "KAFKA_PARTITION_NOT_FOUND"),
    "too large": ("", VALID, {"Content-Length": "999999999"}, 413, "ERR10068", "PAYLOAD_TOO_LARGE"),
    'a "quote" and a \\ in a name': ("%22%5c%22", VALID, {}, 400, "ERR11004", "VALIDATOR_SCHEMA"),
}


@pytest.mark.parametrize("case", STATUSES)
def test_the_status_body_of_every_refusal(produce: Produce, place: str, case: str) -> None:
    """Fields in their order, severity, the code and name of sidecar.md 14, correct JSON whatever is quoted."""
    topic, body, headers, status, code, message = STATUSES[case]
    given, response = produce.post(topic or place, body, **headers)
    assert list(response) == ["statusCode", "code", "message", "description", "severity", "metadata"]
    assert (given, response["statusCode"], response["code"]) == (status, status, code), response
    assert (response["message"], response["severity"]) == (message, "ERROR")
    assert response["metadata"]["reason"] == message.lower()
    assert response["description"]
