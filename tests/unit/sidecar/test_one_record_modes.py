"""One record per request: every byte of it survives, and no byte of it breaks the request."""

from __future__ import annotations

import base64
import json
import re
from typing import Any
from urllib.parse import unquote_to_bytes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delivery.dead_letter import REDRIVE_OF
from headrace.delivery.protocols import Delivery
from headrace.errors import DecodeError
from headrace.formats.codecs import Codecs
from headrace.records import Header, Record, TopicPartition
from headrace.sidecar.reactive.cloud_events import binary, structured
from headrace.sidecar.reactive.payload_decoder import PayloadDecoder
from headrace.sidecar.reactive.single import safe, single

DELIVERY = Delivery("g", TopicPartition("orders", 3), 5, [], 2)
PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CODECS = Codecs(None)  # type: ignore[arg-type]
VISIBLE = re.compile(r"[!-~][ -~]*")


def stored(key_format: str = "string", value_format: str = "json") -> PayloadDecoder:
    keys, values = CODECS.for_reading(key_format), CODECS.for_reading(value_format)
    return PayloadDecoder(keys, key_format, values, value_format)


def record(
    value: bytes | None = b"{}", key: bytes | None = None, headers: list[Header] | None = None, timestamp: int = 1234
) -> Record:
    return Record("orders", 3, 7, timestamp, key, value, lambda: headers)


def headers_of(sent: Record, read: PayloadDecoder | None = None, write: Any = single) -> dict[str, str]:
    lines = write(read or stored(), DELIVERY, [sent])[1]
    names = [name.lower() for name, _ in lines]
    assert len(names) == len(set(names))
    assert [line for line in lines if line[1] and not VISIBLE.fullmatch(line[1])] == []
    return dict(lines)


def test_identity_and_place_are_headers() -> None:
    """What a batch has in each entry, a single record has beside its value."""
    assert headers_of(record(key=b"k1")) == {
        "Content-Type": "application/json",
        "Idempotency-Key": "g:orders:3:7",
        "X-Headrace-Attempt": "2",
        "X-Headrace-Epoch": "5",
        "X-Headrace-Topic": "orders",
        "X-Headrace-Partition": "3",
        "X-Headrace-Offset": "7",
        "X-Headrace-Timestamp": "1234",
        "X-Headrace-Key": "k1",
        "X-Correlation-Id": "g:orders:3:7",
    }


@pytest.mark.parametrize(
    ("value_format", "value", "content_type"),
    [
        ("json", b' {"n": 1.0}\n', "application/json"),
        ("string", "\u00e4\x00".encode(), "text/plain; charset=utf-8"),
        ("binary", b"\xff\x00", "application/octet-stream"),
        ("string", b"", "text/plain; charset=utf-8"),
        ("binary", b"", "application/octet-stream"),
    ],
)
def test_the_body_is_the_value_as_it_is_stored(value_format: str, value: bytes, content_type: str) -> None:
    """The format says what it is, and changes no byte."""
    body, lines = single(stored(value_format=value_format), DELIVERY, [record(value)])
    assert (body, dict(lines)["Content-Type"]) == (value, content_type)
    assert "X-Headrace-Tombstone" not in dict(lines)


@pytest.mark.parametrize("value_format", ["json", "string", "binary"])
def test_a_null_value_is_told_from_an_empty_one(value_format: str) -> None:
    """Both have an empty body; the tombstone says so."""
    body, lines = single(stored(value_format=value_format), DELIVERY, [record(None)])
    assert (body, dict(lines)["X-Headrace-Tombstone"]) == (b"", "true")


@pytest.mark.parametrize(("key", "expected"), [(None, None), (b"", ""), (b'"\xc3\xa4 %', "%22%C3%A4%20%25")])
def test_a_null_key_is_told_from_an_empty_one(key: bytes | None, expected: str | None) -> None:
    """No key, no header; any text comes through percent-encoded."""
    assert headers_of(record(key=key)).get("X-Headrace-Key") == expected


@pytest.mark.parametrize(
    ("key_format", "key", "expected"), [("binary", b"\xff\n", "/wo="), ("json", b'{"a":1}', "{%22a%22:1}")]
)
def test_keys_are_written_by_their_format(key_format: str, key: bytes, expected: str) -> None:
    """Bytes as base64, JSON as JSON text."""
    assert headers_of(record(key=key), stored(key_format))["X-Headrace-Key"] == expected


class Decoded:
    """Reads values that are JSON only when they are decoded, as those of a schema format."""

    def decode(self, data: bytes | None) -> bytes | None:
        return None if data is None else b'{"n":1}'


def test_a_value_with_a_schema_is_sent_as_json() -> None:
    """Its stored bytes mean nothing to who has no registry."""
    read = PayloadDecoder(CODECS.for_reading("string"), "string", Decoded(), "avro")  # type: ignore[arg-type]
    body, lines = single(read, DELIVERY, [record(b"\x00\x00\x00\x00\x01\x02")])
    assert (body, dict(lines)["Content-Type"]) == (b'{"n":1}', "application/json")
    assert single(read, DELIVERY, [record(None)])[0] == b""


@pytest.mark.parametrize("sent", [record(b"{"), record(b""), record(b"\xff"), record(key=b"\xff")])
@pytest.mark.parametrize("write", [single, structured, binary])
def test_what_does_not_fit_its_format_is_not_sent(sent: Record, write: Any) -> None:
    """It cannot be delivered to anybody who expects that format."""
    with pytest.raises(DecodeError):
        write(stored(), DELIVERY, [sent])


ANY_HEADERS = st.lists(st.tuples(st.text(st.characters(exclude_categories=["Cs"])), st.none() | st.binary()))


@given(ANY_HEADERS, st.binary(), st.none() | st.binary())
@pytest.mark.parametrize("write", [single, structured, binary])
def test_any_record_makes_a_sound_request(
    write: Any, headers: list[Header], key: bytes | None, value: bytes | None
) -> None:
    """Line breaks, zeros and whatever else of a record never reach a header as they are; no byte gets lost."""
    ids = [("X-Correlation-Id", b"\r\nEvil: 1"), ("X-Traceability-Id", b"\xff\x00"), ("traceparent", PARENT + b"\r\n")]
    for own in (headers, [*ids, *headers], [("\x7f\r\n", b"")]):
        found = headers_of(record(value, key, own), stored("binary", "binary"), write)
        pairs = json.loads(found.get("X-Headrace-Headers", "[]"))
        assert [(name, None if data is None else base64.b64decode(data)) for name, data in pairs] == own


def test_the_ids_of_the_record_go_on_as_ids_of_the_request() -> None:
    """Correlation and traceability in any case, and what was not plain can be read back."""
    sent = record(headers=[("x-correlation-id", b"c 1"), ("X-Traceability-Id", b"t-\xff")])
    found = headers_of(sent)
    assert headers_of(record(headers=[("a", b"")]))["X-Correlation-Id"] == "g:orders:3:7"
    assert found["X-Correlation-Id"] == "c%201"
    assert unquote_to_bytes(found["X-Traceability-Id"]) == b"t-\xff"


@pytest.mark.parametrize("write", [single, structured, binary])
def test_the_trace_goes_on(write: Any) -> None:
    """Parent and state of W3C Trace Context, if they are such."""
    state = b"vendor=a b,other=1"
    found = headers_of(record(headers=[("traceparent", PARENT), ("tracestate", state)]), write=write)
    assert (found["traceparent"], found["tracestate"]) == (PARENT.decode(), state.decode())
    assert "tracestate" not in headers_of(
        record(headers=[("traceparent", PARENT), ("tracestate", b"a=1\nb")]), write=write
    )


@pytest.mark.parametrize(
    "parent", [b"", b"00-1", PARENT.upper(), b"\n" + PARENT, PARENT + b"\n", PARENT[:-1] + b"\xff"]
)
def test_what_is_no_trace_is_left_out(parent: bytes) -> None:
    """The backend's tracing would choke on it, or start another trace."""
    found = headers_of(record(headers=[("traceparent", parent), ("tracestate", b"a=1")]))
    assert not {"traceparent", "tracestate"} & found.keys()


def test_a_redriven_record_keeps_its_key() -> None:
    """`Idempotency-Key` is the same as the first time."""
    assert headers_of(record(headers=[(REDRIVE_OF, b"t:3:9")]))["Idempotency-Key"] == "g:t:3:9"


def test_values_of_headers_are_encoded_as_cloudevents_says() -> None:
    """The example of the HTTP binding."""
    assert safe("Euro \u20ac \U0001f600") == "Euro%20%E2%82%AC%20%F0%9F%98%80"
    assert safe("".join(map(chr, range(0x21, 0x7F)))) == "".join(map(chr, range(0x21, 0x7F))).replace(
        "%", "%25"
    ).replace('"', "%22")
