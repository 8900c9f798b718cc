"""Row H5: what JSON may hold is written as it was sent or refused, and never changed on its way."""

from __future__ import annotations

import asyncio

import pytest

from tests.running_server import RunningServer


def post(body: bytes, kind: str = "application/json", query: str = "") -> bytes:
    head = (
        f"POST /producers/t{query} HTTP/1.1\r\nHost: h\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def deep(levels: int) -> bytes:
    return b'{"a":[' * (levels // 2) + b"[" * (levels % 2) + b"]" * (levels % 2) + b"]}" * (levels // 2)


DIGITS = b"123456789012345678901234567890"
AS_SENT = [deep(64), b'["%s"]' % (b"[" * 199), b'["\\"%s"]' % (b"{" * 199), DIGITS, b"9" * 10_000, b"-0", b"1e999"]
AS_SENT += [b"0.10", b'{"a":1,"a":2}', b'"\\ud83d\\ude00"', b'"\\u0000\\r\\n"', b"[%s]" % (b"{}," * 50_000 + b"{}")]
REFUSED = [deep(65), deep(901), deep(100_000), b"[" * 100_000, b"NaN", b"-Infinity", b"01", b"1.", b"+1", b'"\n"']
REFUSED += [b'"\\ud800"', b'{"\\udc00":1}', b'"\xed\xa0\x80"', b'"\\q"', b"[1,]", b"'a'"]
STRICT = [b'{"partition":1e999}', b'{"timestamp":%s}' % DIGITS, b'{"partition":1.0}', b'{"correlationId":"\\ud800"}']
STRICT += [b'{"headers":{"a":"\\udc00"}}', b'{"headers":{"\\udc00":"a"}}', b'{"headers":{"a":1}}']


@pytest.mark.parametrize("value", AS_SENT, ids=lambda value: value[:20])
async def test_values_are_written_byte_for_byte(server: RunningServer, value: bytes) -> None:
    """Numbers of any size, fields that stand twice, escapes; and brackets in strings are no levels."""
    assert (await server.ask(post(b'{"records":[{"value":%s},{"value":1}]}' % value))).status == 200
    assert server.kafka.producer.records[0].value == value


BAD_RECORDS = [*(b'{"value":%s}' % value for value in REFUSED), b'{"key":%s}' % deep(65), *STRICT]


@pytest.mark.parametrize("record", BAD_RECORDS, ids=lambda record: record[:40])
async def test_a_wrong_value_is_refused(server: RunningServer, record: bytes) -> None:
    """400 at once for the whole request; as a line of a stream it fails alone."""
    response = await server.ask(post(b'{"keyFormat":"json","records":[{"value":1},%s]}' % record))
    assert (response.status, response.json["code"] in ("ERR11004", "ERR10015")) == (400, True)
    assert server.kafka.producer.records == []
    reader, writer = await server.connect()
    lines = b'{"value":1}\n%s\n{"value":2}' % record
    writer.write(post(lines, "application/x-ndjson", "?keyFormat=json"))
    text = (await asyncio.wait_for(reader.read(), 60)).decode()
    assert (text.count('"line":2'), text.count('"offset":')) == (1, 2)
    assert [record.value for record in server.kafka.producer.records] == [b"1", b"2"]
