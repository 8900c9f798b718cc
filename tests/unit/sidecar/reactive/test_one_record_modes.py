"""One record per request, also as a CloudEvent: every byte of it survives, and no byte of it breaks the request."""

from __future__ import annotations

import base64
import json
import re
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.outcomes import Delivery
from headrace.errors import DecodeError
from headrace.formats.choice import Codecs
from headrace.records import Header, Record, RecordBatch, TopicPartition
from headrace.sidecar.reactive.cloud_events import binary, structured
from headrace.sidecar.reactive.delivery_lines import DeliveryLines
from headrace.sidecar.reactive.envelope import PayloadDecoder
from headrace.sidecar.reactive.http_destination import single
from yaml_table import table

DELIVERY = Delivery("g", TopicPartition("orders", 3), 5, [], 2)
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CODECS = Codecs(None)  # type: ignore[arg-type]
EVENT = {"specversion": "1.0", "id": "e 1", "source": "/shop/\u00e4", "type": "sold", "level": "7"}
STRUCTURED: list[Header] = [("content-type", b"application/cloudevents+json; charset=UTF-8")]
ANY_HEADERS = st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.none() | st.binary()))
VISIBLE = re.compile(r"[!-~][ -~]*")


def stored(key_format: str = "string", value_format: str = "json") -> PayloadDecoder:
    keys, values = CODECS.for_reading(key_format), CODECS.for_reading(value_format)
    return PayloadDecoder(keys, key_format, values, value_format)


def record(
    value: bytes | None = b"{}", headers: list[Header] | None = None, key: bytes | None = None, at: int = 1234
) -> Record:
    return Record("orders", 3, 7, at, key, value, lambda: headers)


def headers_of(sent: Record, read: PayloadDecoder | None = None, write: Any = single) -> dict[str, str]:
    lines = sent_by(write, sent, read)[1]
    names = [name.lower() for name, _ in lines]
    assert len(names) == len(set(names))
    assert [line for line in lines if line[1] and not VISIBLE.fullmatch(line[1])] == []
    return dict(lines)


def joined(lines: Any) -> bytes:
    return "".join([f"{name}\0{value}\1" for name, value in lines]).encode()


def sent_by(
    write: Any, sent: Record, read: PayloadDecoder | None = None, delivery: Delivery = DELIVERY
) -> tuple[bytes, list[tuple[str, str]]]:
    """Return body and headers of the request that a mode makes."""
    body, text = write(read or stored(), DeliveryLines(joined), delivery, RecordBatch.of([sent]))
    found = [tuple(line.split("\0")) for line in text.decode().split("\1")[:-1]]
    return body, [(name, value) for name, value in found]


def test_identity_and_place_are_headers() -> None:
    """What a batch has in each entry is in headers of a single record."""
    assert headers_of(record(key=b"k1")) == table(__file__, "identity_and_place")


@pytest.mark.parametrize(("value_format", "value", "content_type"), table(__file__, "bodies"))
def test_the_body_is_the_value_as_it_is_stored(value_format: str, value: str, content_type: str) -> None:
    """The format says what it is, and changes no byte; a null value differs from an empty one."""
    body, lines = sent_by(single, record(value.encode("latin-1")), stored(value_format=value_format))
    assert (body, dict(lines)["Content-Type"]) == (value.encode("latin-1"), content_type)
    assert "X-Headrace-Tombstone" not in dict(lines)
    body, lines = sent_by(single, record(None), stored(value_format=value_format))
    assert (body, dict(lines)["X-Headrace-Tombstone"]) == (b"", "true")


@pytest.mark.parametrize(("key_format", "key", "expected"), table(__file__, "keys"))
def test_keys_are_written_by_their_format(key_format: str, key: str | None, expected: str | None) -> None:
    """No key, no header; text is percent-encoded, bytes are base64, JSON is JSON text."""
    sent, read = record(key=None if key is None else key.encode("latin-1")), stored(key_format)
    assert headers_of(sent, read).get("X-Headrace-Key") == expected


@given(ANY_HEADERS, st.none() | st.text(), st.text(min_size=1), st.integers(1, 3), st.sampled_from(["", "job %d"]))
def test_what_records_share_is_in_a_template(
    headers: list[Header], key: str | None, group: str, attempt: int, replay: str
) -> None:
    """Lines from a template that earlier records have filled are those of a new one."""
    lines = DeliveryLines(joined)
    marked = f'{group}"offset"%d'
    for number in range(3):
        sent = RecordBatch.of([Record("orders", 3, number, number, None, b"{}", lambda: headers)])
        delivery = Delivery(marked, TopicPartition("orders", 3), number % 2, [], attempt, replay)
        found = lines.of_record(delivery, sent, key)
        assert found == DeliveryLines(joined).of_record(delivery, sent, key)
        assert b"X-Headrace-Offset\0%d\1" % number in found


class Decoded:
    """Reads values that are JSON only when they are decoded, as those of a schema format."""

    def decode(self, data: bytes | None) -> bytes | None:
        return None if data is None else b'{"n":1}'


def test_a_value_with_a_schema_is_sent_as_json() -> None:
    """Its stored bytes mean nothing to who has no registry."""
    read = PayloadDecoder(CODECS.for_reading("string"), "string", Decoded(), "avro")  # type: ignore[arg-type]
    body, lines = sent_by(single, record(b"\x00\x00\x00\x00\x01\x02"), read)
    assert (body, dict(lines)["Content-Type"]) == (b'{"n":1}', "application/json")
    assert sent_by(single, record(None), read)[0] == b""


@pytest.mark.parametrize("sent", [record(b"{"), record(b""), record(b"\xff"), record(key=b"\xff")])
@pytest.mark.parametrize("write", [single, structured, binary])
def test_what_does_not_fit_its_format_is_not_sent(sent: Record, write: Any) -> None:
    """It cannot be delivered to a backend that expects that format, or it would break the request."""
    with pytest.raises(DecodeError):
        sent_by(write, sent, stored())
    with pytest.raises(DecodeError):
        sent_by(structured, record(b'1, "x": 2', as_binary()), stored())


@given(ANY_HEADERS, st.binary(), st.none() | st.binary())
@pytest.mark.parametrize("write", [single, structured, binary])
def test_any_record_makes_a_sound_request(write: Any, headers: list[Header], key: Any, value: Any) -> None:
    """Line breaks, zeros and whatever else of a record never reach a header as they are; no byte gets lost."""
    ids = [("X-Correlation-Id", b"\r\nEvil: 1"), ("X-Traceability-Id", b"\xff\x00"), ("traceparent", PARENT + b"\r\n")]
    for own in (headers, [*ids, *headers], [("\x7f\r\n", b"")]):
        found = headers_of(record(value, own, key), stored("binary", "binary"), write)
        pairs = json.loads(found.get("X-Headrace-Headers", "[]"))
        assert [(name, None if data is None else base64.b64decode(data)) for name, data in pairs] == own


def test_the_ids_of_the_record_go_on_as_ids_of_the_request() -> None:
    """Correlation and traceability in any case, and what was not plain can be read back."""
    found = headers_of(record(headers=[("x-correlation-id", b"c 1"), ("X-Traceability-Id", b"t-\xff")]))
    assert headers_of(record(headers=[("a", b"")]))["X-Correlation-Id"] == "g:orders:3:7"
    assert (found["X-Correlation-Id"], unquote_to_bytes(found["X-Traceability-Id"])) == ("c%201", b"t-\xff")


@pytest.mark.parametrize("write", [single, structured, binary])
def test_the_trace_goes_on(write: Any) -> None:
    """Parent and state of W3C Trace Context, if they are valid: any other would start another trace, or fail."""
    for state, kept in ((b"vendor=a b,other=1", "vendor=a b,other=1"), (b"a=1\nb", None)):
        found = headers_of(record(headers=[("traceparent", PARENT), ("tracestate", state)]), write=write)
        assert (found["traceparent"], found.get("tracestate")) == (PARENT.decode(), kept)
    for parent in (b"", b"00-1", PARENT.upper(), b"\n" + PARENT, PARENT + b"\n", PARENT[:-1] + b"\xff"):
        found = headers_of(record(headers=[("traceparent", parent), ("tracestate", b"a")]), write=write)
        assert not {"traceparent", "tracestate"} & found.keys()


def as_binary(content_type: bytes | None = b"application/json") -> list[Header]:
    attributes: list[Header] = [(f"ce_{name}", text.encode()) for name, text in EVENT.items()]
    return [*attributes, *([("content-type", content_type)] if content_type else [])]


def event(sent: Record, read: PayloadDecoder | None = None) -> Any:
    body, lines = sent_by(structured, sent, read or stored())
    assert lines[0] == ("Content-Type", "application/cloudevents+json")
    return json.loads(body)


def request(sent: Record, read: PayloadDecoder | None = None) -> tuple[bytes, dict[str, str]]:
    body, lines = sent_by(binary, sent, read or stored())
    return body, {name: value for name, value in lines if name.startswith("ce-") or name == "Content-Type"}


WRAPPED = table(__file__, "wrapped")


def test_a_record_is_wrapped_into_an_event() -> None:
    """Its id is the delivery's, its data the value, digits and all."""
    sent = record(b'{"n": 1.00}', [("a", b"\xff")], b"k", 1767225600001)
    expected = {**WRAPPED, "recordheaders": '[["a","/w=="]]', "datacontenttype": "application/json", "data": {"n": 1.0}}
    assert event(sent) == expected
    assert b'"data":{"n": 1.00}' in sent_by(structured, sent, stored())[0]
    body, found = request(sent)
    assert body == b'{"n": 1.00}'
    assert found["Content-Type"] == "application/json"
    assert {name: found[f"ce-{name}"] for name in WRAPPED} == {name: str(value) for name, value in WRAPPED.items()}


@pytest.mark.parametrize(("value_format", "value", "data"), table(__file__, "data_by_format"))
def test_data_is_written_by_the_value_format(value_format: str, value: str | None, data: dict[str, Any]) -> None:
    """Bytes as base64; a tombstone has no data, which is not the same as empty or `null` data."""
    sent = record(None if value is None else value.encode("latin-1"))
    found = event(sent, stored(value_format=value_format))
    assert {name: found[name] for name in ("datacontenttype", "data", "data_base64") if name in found} == data
    assert request(sent, stored(value_format=value_format))[0] == (sent.value or b"")


@pytest.mark.parametrize(("content_type", "value", "data"), table(__file__, "data_by_content_type"))
def test_the_data_of_an_event_is_what_its_content_type_says(content_type: str, value: str, data: Any) -> None:
    """The consumer's `value_format` is for records that are not events."""
    sent = record(value.encode("latin-1"), as_binary(content_type.encode()))
    assert event(sent) == {**EVENT, "datacontenttype": content_type, **data}
    assert request(sent)[0] == sent.value


@pytest.mark.parametrize("content_type", [None, b"", b"a\r\nEvil: 1", b"\xff"])
def test_an_event_without_a_usable_content_type_has_that_of_the_format(content_type: bytes | None) -> None:
    """And no byte of it comes into a header."""
    sent = record(b"1", as_binary(content_type))
    assert event(sent) == {**EVENT, "datacontenttype": "application/json", "data": 1}
    assert request(sent)[1]["Content-Type"] == "application/json"


def test_a_wrong_name_of_an_attribute_is_left_out() -> None:
    """Names that CloudEvents does not know or keeps for itself, and attributes without a value."""
    names = ("ce_no name", "ce_Upper", "ce_data", "ce_datacontenttype", "ce_" + "a" * 101)
    assert event(record(None, [*as_binary(), *((name, b"1") for name in names), ("ce_empty", b"")])) == EVENT


@pytest.mark.parametrize(
    ("name", "value"),
    [("ce_specversion", b""), ("ce_id", b""), ("ce_source", b""), ("ce_type", b""), ("ce_specversion", b"0.3")],
)
def test_a_record_that_lacks_a_required_attribute_is_wrapped(name: str, value: bytes) -> None:
    """Also one of another version of the specification; its headers go along."""
    found = event(record(b"1", [(each, value if each == name else data) for each, data in as_binary()]))
    assert (found["type"], found["specversion"]) == ("headrace.record", "1.0")
    assert len(json.loads(found["recordheaders"])) == len(EVENT) + 1


@pytest.mark.parametrize(("data", "body"), table(__file__, "structured_data"))
def test_the_data_of_a_structured_event_is_unpacked(data: dict[str, Any], body: str) -> None:
    """The body of the binary mode is the data itself."""
    sent = record(json.dumps({**EVENT, **data}).encode(), STRUCTURED)
    assert request(sent)[0] == body.encode("latin-1")
    found = event(sent)
    if "data_base64" in found:
        assert base64.b64decode(found["data_base64"]) == body.encode("latin-1")


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"{}",
        *(json.dumps({**EVENT, **more}).encode() for more in table(__file__, "what_makes_an_event_none")),
        json.dumps({**EVENT, "data_base64": "\u00e4"}, ensure_ascii=False).encode(),
        json.dumps(EVENT).encode()[:-1] + b',"more":' + b"[" * 60_000,
    ],
)
def test_a_value_that_is_not_the_event_it_claims_to_be_is_not_sent(value: bytes) -> None:
    """The reason names no value."""
    for write in (structured, binary):
        with pytest.raises(DecodeError, match="content-type says application/cloudevents") as raised:
            sent_by(write, record(value, STRUCTURED), stored())
        assert "shop" not in raised.value.description


def test_a_tombstone_among_structured_events_is_wrapped() -> None:
    """It has no attributes of its own."""
    assert event(record(None, STRUCTURED, b"k"))["partitionkey"] == "k"


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789", min_size=1, max_size=20).filter(
    lambda name: name not in (*EVENT, "data", "datacontenttype")
)


@given(st.dictionaries(NAMES, TEXTS), st.fixed_dictionaries(dict.fromkeys(("id", "source", "type"), TEXTS)), TEXTS)
def test_an_event_is_the_same_however_it_is_stored(more: dict[str, str], own: dict[str, str], data: str) -> None:
    """From either mode of Kafka it becomes the same requests, and every attribute can be read back."""
    attributes = {**more, **own, "specversion": "1.0"}
    value = json.dumps(data).encode()
    one = record(
        value, [*((f"ce_{n}", t.encode()) for n, t in attributes.items()), ("content-type", b"application/json")]
    )
    other = record(json.dumps({**attributes, "data": data}).encode(), STRUCTURED)
    assert event(one) == event(other) == {**attributes, "datacontenttype": "application/json", "data": data}
    (body, found), (second, _) = request(one), request(other)
    assert json.loads(body) == json.loads(second) == data
    assert {f"ce-{n}": t for n, t in attributes.items()} == {
        n: unquote(t) for n, t in found.items() if n != "Content-Type"
    }
