"""The produce use case against a producer that remembers."""

import asyncio
import json
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import yaml

from headrace import errors
from headrace.config.kafka import SchemaRegistryConfig
from headrace.config.producer_config import ProducerConfig
from headrace.formats.avro import AvroCodec
from headrace.formats.choice import Codecs, Encoder
from headrace.formats.registry import SchemaRegistry
from headrace.records import OutgoingRecord
from headrace.sidecar.produce.produce import ProduceService, RequestIds
from headrace.sidecar.produce.produce_request import ProduceRequest, choice_of
from headrace.sidecar.produce.produce_response import EncodedResponse
from headrace_devkit.testing import ManualClock
from headrace_devkit.testing.memory_cluster import MemoryCluster

NO_IDS = RequestIds()


def cluster(*outcomes: errors.HeadraceError | None) -> MemoryCluster:
    """Return a cluster that refuses the next records with these errors; None writes one."""
    made = MemoryCluster({"t": 3})
    made.producer.refuse(*outcomes)
    return made


def produce(
    body: Any, kafka: MemoryCluster | None = None, ids: RequestIds = NO_IDS, topic: str = "t", **settings: Any
) -> EncodedResponse:
    kafka = kafka or cluster()
    registry = SchemaRegistry(SchemaRegistryConfig(url="http://127.0.0.1:1"), ManualClock())
    service = ProduceService(ProducerConfig(**settings), Codecs(registry), kafka.producer, kafka)  # type: ignore[arg-type]

    async def main() -> EncodedResponse:
        try:
            text = body if isinstance(body, bytes) else json.dumps(body).encode()
            prepared = await service.load(topic, service.parse(text), ids)
            results: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
            service.do(prepared, results.set_result)
            return service.respond(prepared, await results)
        finally:
            await registry.close()

    return asyncio.run(main())


def sent(body: Any, ids: RequestIds = NO_IDS, **settings: Any) -> list[OutgoingRecord]:
    kafka = cluster()
    produce(body, kafka, ids, "t", **settings)
    return kafka.producer.records


def test_timestamps_not_above_zero_mean_now() -> None:
    """decisions.md 12."""
    records = [{"key": "k", "timestamp": stamp} for stamp in (-1, 0, None, 1)]
    assert [record.timestamp_ms for record in sent({"records": records})] == [0, 0, 0, 1]


def test_unknown_fields_are_ignored_and_listed_where_that_is_set() -> None:
    """Clients of the light-4j sidecar send some; what is wrong beside them is still found."""
    records = [{"value": 1, "colour": "red"}, {"key": "k", "vaule": 1}, {"value": 2, "colour": "blue"}]
    kafka = cluster()
    response = produce({"records": records, "isFoo": True}, kafka, unknown_fields="ignore")
    assert [record.value for record in kafka.producer.records] == [b"1", None, b"2"]
    assert json.loads(response.body)["ignoredFields"] == ["isFoo", "records.colour", "records.vaule"]
    assert "ignoredFields" not in json.loads(produce({"records": [{"value": 1}]}, unknown_fields="ignore").body)
    with pytest.raises(errors.InvalidRequest, match=r"record 1 .*partition"):
        produce({"records": [{"value": 1, "a": 1}, {"value": 1, "partition": "x"}]}, unknown_fields="ignore")
    with pytest.raises(errors.InvalidRequest, match="record 0 has neither key nor value"):
        produce({"records": [{"partition": 1, "colour": "red"}]}, unknown_fields="ignore")


@pytest.mark.parametrize("unknown_fields", ["refuse", "ignore"])
def test_a_body_with_too_many_records_is_refused_before_it_is_decoded(unknown_fields: str) -> None:
    """The rest of the body is not decoded; nested objects do not count as records, and the limit itself is allowed."""
    assert produce({"records": [{"value": 1}] * 10_000}, unknown_fields=unknown_fields).status == 200
    body = b'{"records":[' + b'{"value":1},' * 10_001 + b"5]}"
    with pytest.raises(errors.TooManyRecords, match="more than 10000") as raised:
        produce(body, unknown_fields=unknown_fields)
    assert (raised.value.status, raised.value.parameters) == (413, {"limit_records": 10_000})
    nested = b'{"records":[{"value":[' + b"{}," * 20_000 + b"1]}]}"
    assert len(json.loads(produce(nested, unknown_fields=unknown_fields).body)["offsets"]) == 1


def test_a_misfit_in_a_later_slice_is_named_by_its_number_in_the_request() -> None:
    """Whatever does not fit: partition, format, depth."""
    good: list[Any] = [{"value": "YQ=="}] * 2500
    for bad, kind in (
        ({"value": 7}, errors.EncodeError),
        ({"value": "", "partition": 3}, errors.PartitionNotFound),
        ({"value": json.loads("[" * 65 + "]" * 65)}, errors.InvalidRequest),
    ):
        with pytest.raises(kind) as raised:
            produce({"valueFormat": "BINARY", "records": [*good, bad]})
        assert raised.value.parameters["index"] == 2500
        assert "ecord 2500" in str(raised.value)


IDS = RequestIds(b"http-c", b"http-t")
TRACED = RequestIds(b"c", trace=[("traceparent", b"00-http")])
ORDERED = {
    "value": 1,
    "traceabilityId": "t",
    "correlationId": "c",
    "headers": {"b": "\u00e9", "x-correlation-id": "no", "X-TRACEABILITY-ID": "no", "a": None},
}
LISTED = {"value": 1, "correlationId": "c", "headers": [["b", "1"], ["a", None], ["b", ""], ["X-Correlation-ID", "no"]]}
TRACE, CORRELATION = ("traceparent", b"00-http"), ("X-Correlation-Id", b"c")
OF_HTTP = [("X-Traceability-Id", b"http-t"), ("X-Correlation-Id", b"http-c")]


@pytest.mark.parametrize(
    ("record", "ids", "settings", "headers"),
    [
        (ORDERED, IDS, {}, [("X-Traceability-Id", b"t"), CORRELATION, ("b", "\u00e9".encode()), ("a", None)]),
        (LISTED, NO_IDS, {}, [CORRELATION, ("b", b"1"), ("a", None), ("b", b"")]),
        ({"value": 1}, IDS, {}, OF_HTTP),
        ({"value": 1}, TRACED, {}, [CORRELATION, TRACE]),
        ({"value": 1, "headers": {"a": "1"}}, TRACED, {}, [CORRELATION, TRACE, ("a", b"1")]),
        ({"value": 1, "headers": {"TraceParent": "00-own"}}, TRACED, {}, [CORRELATION, ("TraceParent", b"00-own")]),
    ],
    ids=["all", "a list", "ids of HTTP", "trace", "trace and headers", "own trace"],
)
def test_record_headers_have_the_order_of_the_original(
    record: Any, ids: RequestIds, settings: Any, headers: Any
) -> None:
    """Ids, trace, the record's own; ids are not repeated, null is a null, and a list keeps repeats.

    A record's id goes before that of the request.
    """
    assert sent({"records": [record]}, ids, **settings)[0].headers == headers


REFUSED = yaml.safe_load(Path(__file__).with_name("refused_bodies.yaml").read_text())
REFUSED += [
    [b'{"records":[{"value":"\xff"}]}', "ContentTypeMismatch", "utf-8"],
    [b'{"records":[{"value":' + b"[" * 5000 + b"]" * 5000 + b"}]}", "InvalidRequest", "nested"],
    [{"records": [{"value": 1, "headers": {str(n): "" for n in range(257)}}]}, "InvalidRequest", "<= 256"],
    [{"records": [{"value": 1, "headers": [["a", ""]] * 257}]}, "InvalidRequest", "<= 256"],
]


@pytest.mark.parametrize(("body", "error", "says"), REFUSED)
def test_a_request_that_does_not_fit_sends_nothing_and_says_why(body: Any, error: str, says: str) -> None:
    """Each with its own error, and the index where a record is at fault."""
    kafka = cluster()
    with pytest.raises(errors.HeadraceError) as raised:
        produce(body.encode() if isinstance(body, str) else body, kafka)
    assert type(raised.value).__name__ == error
    assert says in str(raised.value)
    assert kafka.producer.records == []


def test_every_record_that_cannot_be_encoded_is_named_and_none_is_sent() -> None:
    """Also those after the first; a long list is cut; values are not shown."""
    records = [{"value": "YQ==" if index == 1 else f"hunter!{index}"} for index in range(40)]
    kafka = cluster()
    with pytest.raises(errors.EncodeError) as raised:
        produce({"valueFormat": "BINARY", "records": records}, kafka)
    assert "39 of 40 records" in str(raised.value)
    assert raised.value.parameters["indexes"] == [0, *range(2, 21)]
    assert "hunter" not in str(raised.value)
    assert kafka.producer.records == []


def test_null_values_need_no_schema_and_no_registry() -> None:
    """Tombstones pass while the registry is down; values do not."""
    assert produce({"valueFormat": "AVRO", "records": [{"key": "a"}]}).status == 200
    with pytest.raises(errors.RegistryUnavailable):
        produce({"valueFormat": "AVRO", "records": [{"value": 1}]})


def test_a_request_counts_for_what_its_schema_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records without a field have its default: by its body, a request of a kilobyte could write megabytes."""
    schema = {"type": "record", "name": "R", "fields": [{"name": "a", "type": "string", "default": "x" * 1000}]}

    async def for_writing(*_: Any, **__: Any) -> Encoder:
        return Encoder(AvroCodec(json.dumps(schema)), 7)

    monkeypatch.setattr(Codecs, "for_writing", for_writing)
    kafka = cluster()
    send = Mock(side_effect=kafka.producer.send)
    monkeypatch.setattr(kafka.producer, "send", send)
    produce({"valueFormat": "AVRO", "records": [{"value": {}}] * 50}, kafka)
    assert len(kafka.producer.records[0].value or b"") > 1000
    assert send.call_args.args[3] is None  # the producer adds up the records


def test_producing_can_be_switched_off() -> None:
    """With the original's code."""
    with pytest.raises(errors.ProducerNotEnabled):
        produce({"records": []}, enabled=False)


OK = None
TIMEOUT, FATAL = errors.KafkaTimeout("late"), errors.FatalKafkaError("fenced")
DOWN, FULL = errors.KafkaUnavailable("down"), errors.ProducerQueueFull("full")
LARGE, GONE = errors.RecordTooLarge("large"), errors.TopicNotFound("gone")
FORBIDDEN, OTHER = errors.KafkaUnauthorized("no"), errors.KafkaError("odd")


@pytest.mark.parametrize(
    ("results", "status", "request_status"),
    [
        ([OK, TIMEOUT], 200, "OK"),
        ([OK, LARGE], 200, "OK"),
        ([OK, DOWN, FORBIDDEN], 200, "FORBIDDEN"),
        ([DOWN, FULL], 503, None),
        ([DOWN, LARGE], 413, None),
        ([GONE, DOWN], 404, None),
        ([LARGE, TIMEOUT], 504, None),
        ([DOWN, FATAL], 504, None),
        ([FORBIDDEN, DOWN], 403, "FORBIDDEN"),
    ],
)
def test_the_status_is_that_of_the_worst_unless_a_record_is_written(
    results: list[Any], status: int, request_status: str | None
) -> None:
    """An error is `retriable` if to send it again unchanged writes nothing twice."""
    body = {"records": [{"value": 1}] * len(results)}
    response, is_error = produce(body, cluster(*results)), status != 200
    found = json.loads(response.body)
    assert response.status == status
    assert (response.retry_after_seconds is not None) == (status == 503)
    assert ("code" in found, found.get("requestStatus")) == (is_error, request_status)
    if is_error:
        assert found["metadata"]["retriable"] is (status == 503)
        assert ("read the topic before you send it again" in found["description"]) == (status == 504)
    original = produce(body, cluster(*results), always_200=True)
    assert (original.status, "requestStatus" in json.loads(original.body)) == (200, True)


@pytest.mark.parametrize(
    ("result", "code", "outcome"),
    [
        (TIMEOUT, 50004, "unknown"),
        (FATAL, 50004, "unknown"),
        (DOWN, 50003, "fail"),
        (LARGE, 50002, "fail"),
        (OTHER, 50002, "fail"),
        (FORBIDDEN, 40301, "fail"),
        (errors.KafkaUnauthenticated("who"), 40101, "fail"),
    ],
)
def test_each_failed_record_says_whether_it_is_certainly_not_there(
    result: errors.HeadraceError, code: int, outcome: str
) -> None:
    """A record whose fate is not known is never called failed."""
    entry = json.loads(produce({"records": [{"value": 1}, {"value": 1}]}, cluster(None, result)).body)["offsets"][1]
    assert entry == {"errorCode": code, "error": result.description, "outcome": outcome}


DOCUMENTED = ["binary", "avro", "json", "jsonschema", "protobuf", "string"]
LIGHT_4J = ["binary", "json", "avro", "jsonschema", "protobuf", "string"]


@pytest.mark.parametrize(("codes", "names"), [("documented", DOCUMENTED), ("light-4j", LIGHT_4J)])
def test_numbers_mean_what_the_switch_says(codes: Literal["documented", "light-4j"], names: list[str]) -> None:
    """The documented order, or that of the light-4j sidecar's code; a name means the same in both."""
    for number, name in enumerate(names):
        request = ProduceRequest(records=[], key_format=number, value_format=name.upper())
        assert choice_of(request, "key", codes).format == name
        assert choice_of(request, "value", codes).format == name.upper()
    with pytest.raises(errors.InvalidRequest, match="format 6 is not valid: formats as numbers are 0 to 5"):
        choice_of(ProduceRequest(records=[], key_format=6), "key", codes)
