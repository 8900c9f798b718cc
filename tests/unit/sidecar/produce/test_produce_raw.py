"""Bodies that are no JSON request: the value of one record; and compressed ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

RECORD = b'{"records":[{"key":"k","value":{"n":1}}]}'
JSON = "Content-Type: application/json\r\n"


def post(body: bytes, *headers: bytes | str, topic: str = "t") -> bytes:
    lines = [header.encode() if isinstance(header, str) else header for header in headers]
    head = f"POST /producers/{topic} HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n".encode()
    return head + b"".join(line.removesuffix(b"\r\n") + b"\r\n" for line in lines) + b"\r\n" + body


def ask(opened: Any, request: bytes, **settings: Any) -> tuple[Any, list[Any]]:
    async def main() -> tuple[Any, list[Any]]:
        async with opened(**settings) as server:
            return await server.ask(request), server.kafka.records

    return asyncio.run(main())


def test_the_body_is_the_value_and_headers_say_the_rest(opened: Any) -> None:
    """Every byte as it came, also of the key and of record headers; repeated ones in their order."""
    request = post(
        b"\x00\xff{",
        "Content-Type: image/PNG; q=1",
        b"X-Headrace-Key: k %41\xc3\xa9\xff",
        "X-Headrace-Header-Event: push",
        "X-Headrace-Header-Event:",
        "X-Headrace-Header-X-Correlation-Id: theirs",
        "X-Headrace-Partition: 2",
        "X-Headrace-Timestamp: 1700000000000",
        "X-Correlation-Id: c-1",
        "X-Other: not taken",
    )
    response, (record,) = ask(opened, request)
    assert (response.status, response.json) == (
        200,
        {"offsets": [{"partition": 0, "offset": 0}], "requestStatus": "OK"},
    )
    assert (record.key, record.value) == (b"k %41\xc3\xa9\xff", b"\x00\xff{")
    assert (record.partition, record.timestamp_ms) == (2, 1_700_000_000_000)
    assert record.headers == [
        ("X-Correlation-Id", b"c-1"),
        ("content-type", b"image/PNG; q=1"),
        ("event", b"push"),
        ("event", b""),
    ]


@pytest.mark.parametrize(("more", "value"), [((), b""), (("X-Headrace-Tombstone: true",), None)])
def test_an_empty_body_is_an_empty_value_unless_a_tombstone_is_asked_for(opened: Any, more: Any, value: Any) -> None:
    """Empty is not null."""
    response, (record,) = ask(opened, post(b"", "Content-Type: text/plain", *more))
    assert (response.status, record.value, record.key) == (200, value, None)


TEXT = "Content-Type: text/plain"


@pytest.mark.parametrize(
    ("request_bytes", "status", "code", "says"),
    [
        (post(RECORD, "Content-Type: application/x-www-form-urlencoded"), 400, "ERR10015", "application/json"),
        (post(RECORD, "Content-Type: application/vnd.kafka.json.v2+json"), 400, "ERR10015", "application/json"),
        (post(RECORD, "Content-Type: text/plain; charset=utf-8"), 400, "ERR10015", "application/json"),
        (post(b' {"valueFormat" :1}', TEXT), 400, "ERR10015", "application/json"),
        (post(b"x"), 400, "ERR10015", "is missing"),
        (post(b"x", TEXT, "X-Headrace-Keys: k"), 400, "ERR11004", "X-Headrace-Key?"),
        (post(b"x", TEXT, "X-Headrace-Key: k", "X-Headrace-Key: l"), 400, "ERR11004", "repeated"),
        (post(b"x", TEXT, "X-Headrace-Header-: k"), 400, "ERR11004", "name of the record header"),
        (post(b"x", TEXT, "X-Headrace-Partition: -1"), 400, "ERR11004", "whole number"),
        (post(b"x", TEXT, b"X-Headrace-Partition: \xb2"), 400, "ERR11004", "whole number"),
        (post(b"x", TEXT, "X-Headrace-Partition: 3"), 404, "ERR40007", "partition 3"),
        (post(b"x", TEXT, "X-Headrace-Timestamp: 9223372036854775808"), 400, "ERR11004", "whole number"),
        (post(b"x", TEXT, "X-Headrace-Tombstone: yes"), 400, "ERR11004", "true or false"),
        (post(b"x", TEXT, "X-Headrace-Tombstone: true"), 400, "ERR11004", "no body"),
        (post(b"x" * 2000, TEXT), 413, "ERR10068", "1000 bytes"),
        (post(b"x", TEXT, topic="missing"), 404, "ERR40006", ""),
        (post(b"x", TEXT, b"X-Headrace-Key: a\x00b"), 400, "ERR40039", ""),
        (post(b"x", TEXT, "Content-Encoding: gzip"), 415, "ERR40040", "compressed bodies are not supported"),
    ],
)
def test_what_cannot_be_meant_is_refused(opened: Any, request_bytes: bytes, status: int, code: str, says: str) -> None:
    """With what to do instead, and nothing reaches Kafka."""
    response, records = ask(opened, request_bytes, max_body_bytes=1000)
    assert (response.status, response.json["code"]) == (status, code), response.json
    assert says in response.json["description"]
    assert records == []


def test_form_posts_of_webhooks_are_values(opened: Any) -> None:
    """Only what looks like JSON is a forgotten header."""
    kind = "Content-Type: application/x-www-form-urlencoded"
    response, (record,) = ask(opened, post(b"payload=%7B%7D", kind))
    assert (response.status, record.value) == (200, b"payload=%7B%7D")
