"""NDJSON in, receipts out, on one connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from headrace.runtime.telemetry.metrics import text_of
from tests.ndjson_client import NdjsonClient
from tests.raw_server import until
from tests.running_server import OpenServer, RunningServer
from yaml_table import table


@contextlib.asynccontextmanager
async def streaming(server: Any, *arguments: str) -> AsyncIterator[NdjsonClient]:
    client = NdjsonClient(*await server.connect())
    client.begin(*arguments)
    assert (await client.head()).startswith("HTTP/1.1 200 ")
    yield client


async def test_each_line_has_its_receipt_while_the_stream_goes_on(opened: OpenServer) -> None:
    """The response comes before the end; formats come in the query; blank lines are none; the last needs no newline."""
    async with opened() as server, streaming(server, "/producers/t?valueFormat=binary&keyFormat=5") as client:
        client.send({"key": "a", "value": "AAE=", "partition": 1, "headers": [["h", None]], "correlationId": "c"})
        assert await client.receipt() == {"partition": 1, "offset": 0}
        client.chunk(b'\n \r\n{"value":')
        client.chunk(b'null}\r\n{"key":"b"}')
        client.finish()
        assert await client.receipts() == [{"partition": 0, "offset": 0}, {"partition": 2, "offset": 0}]
        first, second, third = server.kafka.producer.records
        assert (first.key, first.value, first.partition) == (b"a", b"\x00\x01", 1)
        assert first.headers == [("X-Correlation-Id", b"c"), ("h", None)]
        assert (second.value, third.key, third.value) == (None, b"b", None)
        assert len({second.headers[0][1], third.headers[0][1]}) == 2
        counted = text_of(server.metrics.snapshot()).decode()
        assert 'headrace_produce_records_total{result="acknowledged"} 3.0' in counted


async def test_a_bad_line_fails_alone_and_says_which_it_is(opened: OpenServer) -> None:
    """Whatever is wrong with it; the lines around it are written, in one go with it."""
    bad = [
        b"{",
        b'{"value":NaN}',
        b'{"key":1,"partition":"0"}',
        b'{"value":"\xff"}',
        b"{}{}",
        b"[" * 5000,
        b'{"key":1,"partition":3}',
    ]
    bad += [b'{"vaule":"1"}', b"{}", b'{"value":1}']
    async with opened() as server, streaming(server, "/producers/t?valueFormat=string") as client:
        client.send({"value": "first"}, b"", b"")
        assert (await client.receipt())["offset"] == 0
        client.send(*bad, {"value": "last"})
        client.finish()
        *receipts, last = await client.receipts()
        assert last["offset"] == 1
        assert [(r["line"], r["outcome"]) for r in receipts] == [(4 + n, "fail") for n in range(len(bad))]
        assert {r["code"] for r in receipts} == {"ERR11004", "ERR40007", "ERR12206"}
        assert "STRING takes a JSON string" in receipts[-1]["error"]
        assert all(r["errorCode"] for r in receipts)
        assert [record.value for record in server.kafka.producer.records] == [b"first", b"last"]


NESTED = ["/producers/t?valueSchemaReferences=" + 8000 * "[", 400, "ERR11004", ""]


@pytest.mark.parametrize(
    ("path", "status", "code", "says"), [*table(__file__, "what_is_known_before_the_first_line"), NESTED]
)
async def test_what_is_known_before_the_first_line_is_an_ordinary_error(
    server: RunningServer, path: str, status: int, code: str, says: str
) -> None:
    """With the one error body, while the client has sent nothing yet."""
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\nContent-Type: application/x-ndjson\r\n"
    response = await server.ask(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
    assert (response.status, response.json["code"]) == (status, code)
    assert says in response.json["description"]


@pytest.mark.parametrize(
    ("header", "status"), [("Content-Encoding: gzip", 415), ("Idempotency-Key: k", 400), ("X: y\r\nHost: h", 400)]
)
async def test_heads_that_do_not_go_with_a_stream_are_refused(server: RunningServer, header: str, status: int) -> None:
    """Nothing is taken that could not be held."""
    client = NdjsonClient(*await server.connect())
    client.begin("/producers/t", header)
    assert (await client.head()).startswith(f"HTTP/1.1 {status} ")


def hold(server: Any) -> list[tuple[Sequence[Any], Any]]:
    """Have Kafka keep what it gets; the test calls `done`."""
    sent: list[tuple[Sequence[Any], Any]] = []
    server.kafka.producer.send = lambda records, done, *_: sent.append((records, done)) if records else done([])
    return sent


async def still(read: Any) -> Any:
    """Return a number once it has not moved for a while."""
    seen, since = read(), 0
    while since < 20:
        await asyncio.sleep(0.01)
        seen, since = (seen, since + 1) if read() == seen else (read(), 0)
    return seen


@pytest.mark.parametrize("whole", [True, False])
async def test_a_line_over_the_limit_ends_the_stream(opened: OpenServer, whole: bool) -> None:
    """Those before it are written; whether its end ever comes does not matter."""
    async with opened(max_body_bytes=1000) as server, streaming(server) as client:
        client.send({"value": 1}, {"value": 1})
        client.chunk(b'{"value":"%s"%s' % (b"x" * 1000, b'}\n{"value":2}\n' if whole else b""))
        *receipts, last = await client.receipts()
        assert len(receipts) == 2
        assert (last["line"], last["end"], last["code"], last["outcome"]) == (3, True, "ERR10068", "fail")
        assert len(server.kafka.producer.records) == 2


@pytest.mark.parametrize("is_broken", [False, True])
async def test_a_client_that_leaves_leaves_nothing_behind(opened: OpenServer, is_broken: bool) -> None:
    """Or that breaks the grammar of chunks. What it has sent is written; the half line is not; no stream stays open."""
    async with opened() as server, streaming(server) as client:
        server.kafka.producer.hold()
        client.send({"value": 1})
        client.chunk(b'{"value":2}')
        await server.kafka.producer.taken.wait()
        streams = server.streams._open
        assert len(streams) == 1
        if is_broken:
            client.writer.write(b"zz\r\n")
        else:
            client.writer.transport.abort()
        server.kafka.producer.release()
        await until(lambda: not streams)
        assert [record.value for record in server.kafka.producer.records] == [b"1"]
        assert not server.web._application.gate._in_progress


async def test_a_defect_ends_the_stream_with_a_line_and_not_the_server(
    opened: OpenServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the trace."""

    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("inner secret")

    async with opened() as server, streaming(server) as client:
        server.kafka.producer.send = broken
        client.send({"value": 1})
        last = await client.receipt()
        assert last["code"] == "ERR10010" and "secret" not in str(last)
        assert (await server.get("/live")).status == 200

    assert "ZeroDivisionError" in caplog.text
