"""Bodies that are no JSON request: the value of one record; and compressed ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.running_server import RunningServer
from yaml_table import table


def post(body: bytes, *headers: str) -> bytes:
    head = f"POST /producers/t HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n".encode()
    return head + "".join(f"{header}\r\n" for header in headers).encode("latin-1") + b"\r\n" + body


async def test_the_body_is_the_value_and_headers_say_the_rest(server: RunningServer) -> None:
    """Every byte as it came, also of the key and of record headers; repeated ones in their order."""
    request = post(
        b"\x00\xff{",
        "Content-Type: image/PNG; q=1",
        "X-Headrace-Key: k %41\xc3\xa9\xff",
        "X-Headrace-Header-Event: push",
        "X-Headrace-Header-Event:",
        "X-Headrace-Header-X-Correlation-Id: theirs",
        "X-Headrace-Partition: 2",
        "X-Headrace-Timestamp: 1700000000000",
        "X-Correlation-Id: c-1",
        "X-Other: not taken",
    )
    response, (record,) = await server.ask(request), server.kafka.producer.records
    assert (response.status, response.json) == (
        200,
        {"offsets": [{"partition": 2, "offset": 0}], "requestStatus": "OK"},
    )
    assert (record.key, record.value) == (b"k %41\xc3\xa9\xff", b"\x00\xff{")
    assert (record.partition, record.timestamp_ms) == (2, 1_700_000_000_000)
    assert record.headers == [
        ("X-Correlation-Id", b"c-1"),
        ("content-type", b"image/PNG; q=1"),
        ("event", b"push"),
        ("event", b""),
    ]


TEXT = "Content-Type: text/plain"


@pytest.mark.parametrize(
    ("headers", "body", "value"),
    [
        ([TEXT], b"", b""),
        ([TEXT, "X-Headrace-Tombstone: true"], b"", None),
        (["Content-Type: application/x-www-form-urlencoded"], b"payload=%7B%7D", b"payload=%7B%7D"),
    ],
)
async def test_the_value_is_null_only_if_a_tombstone_is_asked_for(
    server: RunningServer, headers: Any, body: bytes, value: Any
) -> None:
    """Empty is not null; the form of a webhook is a value too."""
    response, (record,) = await server.ask(post(body, *headers)), server.kafka.producer.records
    assert (response.status, record.value, record.key) == (200, value, None)


@pytest.mark.parametrize(("body", "headers", "status", "code", "says"), table(__file__, "a_wrong_request"))
async def test_a_wrong_request_is_refused(
    server: RunningServer, body: str, headers: list[str], status: int, code: str, says: str
) -> None:
    """With what to do instead, and nothing reaches Kafka."""
    response = await server.ask(post(body.encode(), *headers))
    assert (response.status, response.json["code"]) == (status, code), response.json
    assert says in response.json["description"]
    assert server.kafka.producer.records == []


EVENT = {"ce-specversion": "1.0", "ce-id": "e", "ce-source": "/s", "ce-type": "t"}


def event(more: dict[str, str], kind: str, body: str) -> bytes:
    headers = {**EVENT, **more, "Content-Type": kind}
    return post(body.encode(), *(f"{name}: {text}" for name, text in headers.items() if text))


@pytest.mark.parametrize(("more", "kind", "body", "says"), table(__file__, "an_event_that_is_refused"))
async def test_an_event_that_is_not_whole_is_refused(
    server: RunningServer, more: dict[str, str], kind: str, body: str, says: list[str]
) -> None:
    """With what is missing or wrong, and nothing reaches Kafka."""
    response = await server.ask(event(more, kind, body))
    assert (response.status, server.kafka.producer.records) == (400, []), response.json
    assert all(words in response.json["description"] for words in says), response.json


@pytest.mark.parametrize(("more", "kind", "body", "key", "attributes"), table(__file__, "an_event"))
async def test_the_headers_of_an_event_are_those_of_its_record(
    server: RunningServer, more: dict[str, str], kind: str, body: str, key: str | None, attributes: dict[str, str]
) -> None:
    """The body is its data, also if it looks like a request; a second request with this head is the same."""
    for _ in range(2):
        assert (await server.ask(event(more, kind, body))).status == 200
    is_whole = "cloudevents" in kind  # in structured mode, headers only repeat what the body says
    usual = {} if is_whole else {name.replace("-", "_"): text for name, text in EVENT.items()}
    assert len(server.kafka.producer.records) == 2
    for record in server.kafka.producer.records:
        found = {name: (value or b"").decode() for name, value in record.headers or () if name != "X-Correlation-Id"}
        assert found == {"content-type": kind, **usual, **attributes}
        assert (record.value, record.key) == (body.encode(), key.encode() if key else None)
