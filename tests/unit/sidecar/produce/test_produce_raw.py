"""Bodies that are no JSON request: the value of one record; and compressed ones."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

RECORD = b'{"records":[{"key":"k","value":{"n":1}}]}'


def post(body: bytes, *headers: bytes | str) -> bytes:
    lines = [header.encode() if isinstance(header, str) else header for header in headers]
    head = f"POST /producers/t HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n".encode()
    return head + b"".join(line.removesuffix(b"\r\n") + b"\r\n" for line in lines) + b"\r\n" + body


def ask(opened: Any, request: bytes) -> tuple[Any, list[Any]]:
    async def main() -> tuple[Any, list[Any]]:
        async with opened() as server:
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


TEXT = "Content-Type: text/plain"


@pytest.mark.parametrize(
    ("headers", "body", "value"),
    [
        ([TEXT], b"", b""),
        ([TEXT, "X-Headrace-Tombstone: true"], b"", None),
        (["Content-Type: application/x-www-form-urlencoded"], b"payload=%7B%7D", b"payload=%7B%7D"),
    ],
)
def test_the_value_is_null_only_if_a_tombstone_is_asked_for(opened: Any, headers: Any, body: bytes, value: Any) -> None:
    """Empty is not null; the form of a webhook is a value too."""
    response, (record,) = ask(opened, post(body, *headers))
    assert (response.status, record.value, record.key) == (200, value, None)


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
        (post(b"x", TEXT, b"X-Headrace-Key: a\x00b"), 400, "ERR40039", ""),
        (post(b"x", TEXT, "Content-Encoding: gzip"), 415, "ERR40040", "compressed bodies are not supported"),
    ],
)
def test_what_cannot_be_meant_is_refused(opened: Any, request_bytes: bytes, status: int, code: str, says: str) -> None:
    """With what to do instead, and nothing reaches Kafka."""
    response, records = ask(opened, request_bytes)
    assert (response.status, response.json["code"]) == (status, code), response.json
    assert says in response.json["description"]
    assert records == []
