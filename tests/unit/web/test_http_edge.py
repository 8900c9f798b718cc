"""What comes over a real socket, good and bad, and what is answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
from typing import Any

import pytest
import uvloop

from headrace import errors

RECORD = b'{"records":[{"key":"k","value":{"n":1}}]}'


def post(body: bytes, kind: str | None = "application/json", more: str = "", path: str = "/producers/t") -> bytes:
    typed = f"Content-Type: {kind}\r\n" if kind else ""
    head = f"POST {path} HTTP/1.1\r\nHost: h\r\n{typed}Content-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def chunked(*chunks: bytes, end: bytes = b"0\r\n\r\n") -> bytes:
    head = (
        "POST /producers/t HTTP/1.1\r\nHost: h\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    return head.encode() + b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + end


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(RECORD),
        post(RECORD, "Application/JSON; charset=utf-8"),
        chunked(RECORD[:5], RECORD[5:]),
        post(RECORD, path="/producers/%74"),
    ],
)
def test_records_are_taken(opened: Any, request_bytes: bytes) -> None:
    """Whole or in chunks, in any spelling of the media type, the path decoded."""

    async def main() -> None:
        async with opened() as house:
            answer = await house.ask(request_bytes)
            assert answer.status == 200
            assert answer.headers["content-type"] == "application/json"
            assert answer.json == {"offsets": [{"partition": 0, "offset": 0}], "requestStatus": "OK"}
            assert [(record.topic, record.value) for record in house.kafka.records] == [("t", b'{"n":1}')]

    asyncio.run(main())


BAD = [
    (post(RECORD, None), 400, "ERR10015"),
    (post(b""), 400, "ERR11014"),
    (post(b"", None), 400, "ERR11014"),
    (post(b"{"), 400, "ERR10015"),
    (post(b"\xef\xbb\xbf{}"), 400, "ERR10015"),
    (post(b'{"records":[{"value":NaN}]}'), 400, "ERR10015"),
    (post(b'{"records":[{"value":"\xff"}]}'), 400, "ERR10015"),
    (post(b'{"records":[{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}]}"), 400, "ERR11004"),
    (post(b"[]"), 400, "ERR11004"),
    (post(b'{"records":[{"partition":"0"}]}'), 400, "ERR11004"),
    (post(b'{"valueFormat":"yaml","records":[{"value":1}]}'), 400, "ERR11004"),
    (post(b'{"valueFormat":"string","records":[{"value":1}]}'), 400, "ERR12206"),
    (post(b'{"valueFormat":"avro","valueSchemaId":1,"valueSchema":"x","records":[{"value":1}]}'), 400, "ERR12211"),
    (post(b'{"valueFormat":"avro","records":[{"value":1}]}'), 503, "ERR40010"),
    (post(b'{"records":[{"partition":3}]}'), 404, "ERR40007"),
    (post(RECORD, path="/producers/missing"), 404, "ERR40006"),
    (post(RECORD, path="/producers/"), 404, "ERR10007"),
    (post(RECORD, path="/producers"), 404, "ERR10007"),
    (post(RECORD, path="/producers/t/"), 404, "ERR10007"),
    (post(RECORD, path="/producers/a%2Fb"), 404, "ERR10007"),
    (post(RECORD, path='/no"quotes'), 404, "ERR10007"),
    (b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", 404, "ERR10007"),
    (b"GET /producers/t HTTP/1.1\r\nHost: h\r\n\r\n", 405, "ERR10008"),
    (b"DELETE /health/liveness HTTP/1.1\r\nHost: h\r\n\r\n", 405, "ERR10008"),
]


def test_what_does_not_fit_is_answered_with_the_one_error_body(opened: Any) -> None:
    """Correct JSON with the code of the case and an id, and nothing reaches Kafka; the server goes on."""

    async def main() -> None:
        async with opened() as house:
            for request_bytes, status, code in BAD:
                answer = await house.ask(request_bytes)
                assert (answer.status, answer.json["code"]) == (status, code), request_bytes[:200]
                assert list(answer.json) == ["statusCode", "code", "message", "description", "severity", "metadata"]
                assert answer.json["statusCode"] == status
                assert answer.headers["content-type"] == "application/json"
                assert len(answer.headers["x-correlation-id"]) == 22
                assert "Traceback" not in answer.body.decode()
            assert house.kafka.records == []
            assert (await house.ask(post(RECORD))).status == 200

    asyncio.run(main())


def test_a_wrong_method_says_which_are_right(opened: Any) -> None:
    """RFC 9110 section 15.5.6 asks for Allow."""

    async def main() -> None:
        async with opened() as house:
            assert (await house.get("/producers/t")).headers["allow"] == "POST"
            assert (await house.get("/live", "PUT")).headers["allow"] == "GET, HEAD"

    asyncio.run(main())


@pytest.mark.parametrize(
    "value", [b"12345678901234567890123", b"0.10", b'{"a":1,"a":2}', b"-0", b'"\\ud83d\\ude00"', b"1e400"]
)
def test_values_are_not_touched_on_their_way(opened: Any, value: bytes) -> None:
    """Huge integers, decimals, repeated fields, escapes."""

    async def main() -> None:
        async with opened() as house:
            assert (await house.ask(post(b'{"records":[{"value":%s}]}' % value))).status == 200
            assert house.kafka.records[0].value == value

    asyncio.run(main())


@pytest.mark.parametrize(
    "request_bytes",
    [post(b'{"records":[' + b" " * 2000), chunked(*[b"x" * 500] * 4, end=b"")],
)
def test_a_body_over_the_limit_is_refused_and_the_connection_ends(opened: Any, request_bytes: bytes) -> None:
    """By its announced length or by counting; the answer arrives, and 413 is not waited for by the whole body."""

    async def main() -> None:
        async with opened(max_body_bytes=1000) as house:
            reader, writer = await house.connect()
            writer.write(request_bytes)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
            assert head.startswith(b"HTTP/1.1 413 ")
            assert b"connection: close" in head
            rest = await asyncio.wait_for(reader.read(), 60)
            assert json.loads(rest)["code"] == "ERR10068"
            assert house.kafka.records == []

    asyncio.run(main())


def test_a_large_body_is_refused_before_it_is_sent_when_the_client_asks(opened: Any) -> None:
    """With Expect: 100-continue nothing of the body travels."""

    async def main() -> None:
        async with opened(max_body_bytes=1000) as house:
            head = post(b"", more="Expect: 100-continue\r\n").replace(b"Length: 0", b"Length: 5000")
            assert (await house.ask(head)).status == 413

    asyncio.run(main())


def test_a_body_of_exactly_the_limit_is_taken(opened: Any) -> None:
    """The limit itself is allowed."""

    async def main() -> None:
        async with opened(max_body_bytes=len(RECORD)) as house:
            assert (await house.ask(post(RECORD))).status == 200

    asyncio.run(main())


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(opened: Any) -> None:
    """A truncated body is not produced, and the next request is served."""

    async def main() -> None:
        async with opened() as house:
            reader, writer = await house.connect()
            writer.write(post(RECORD)[:-3])
            await writer.drain()
            writer.close()
            await reader.read()
            assert (await house.ask(post(RECORD))).status == 200
            assert len(house.kafka.records) == 1

    asyncio.run(main())


def test_ids_of_the_client_come_back(opened: Any) -> None:
    """On answers and errors alike; and they reach the record."""

    async def main() -> None:
        async with opened() as house:
            more = "X-Correlation-Id: c-1\r\nX-Traceability-Id: t-1\r\n"
            for body in (RECORD, b"{"):
                headers = (await house.ask(post(body, more=more))).headers
                assert (headers["x-correlation-id"], headers["x-traceability-id"]) == ("c-1", "t-1")
            assert house.kafka.records[0].headers == [("X-Traceability-Id", b"t-1"), ("X-Correlation-Id", b"c-1")]

    asyncio.run(main())


@pytest.mark.parametrize("identity", ["a b", "\u00e9", "x" * 201, ""])
def test_an_id_that_is_none_is_replaced(opened: Any, identity: str) -> None:
    """Spaces, other alphabets and long texts do not get into logs and records."""

    async def main() -> None:
        async with opened() as house:
            request = post(RECORD, more="X-Correlation-Id: ?\r\n").replace(b"?", identity.encode("latin-1"))
            assert len((await house.ask(request)).headers["x-correlation-id"]) == 22

    asyncio.run(main())


def test_a_defect_is_one_error_body_without_a_trace(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The log has the trace under the answer's id; the client does not."""

    async def main() -> None:
        async with opened() as house:
            house.kafka.failure = ZeroDivisionError("inner secret")
            answer = await house.ask(post(RECORD))
            assert (answer.status, answer.json["code"]) == (500, "ERR10010")
            assert "secret" not in answer.body.decode()

    asyncio.run(main())
    assert "ZeroDivisionError" in caplog.text


def test_an_error_that_passes_says_when_to_come_again(opened: Any) -> None:
    """Retry-After, in seconds."""

    async def main() -> None:
        async with opened() as house:
            house.kafka.failure = errors.ProducerQueueFull()
            answer = await house.ask(post(RECORD))
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")

    asyncio.run(main())


def test_one_connection_serves_many_requests_also_after_errors(opened: Any) -> None:
    """Keep-alive and pipelining; a refused body does not shift the next request."""

    async def main() -> None:
        async with opened() as house:
            reader, writer = await house.connect()
            writer.write(post(RECORD) + post(b"{") + post(RECORD, None) + post(RECORD))
            writer.write(b"GET /live HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
            text = await asyncio.wait_for(reader.read(), 60)
            assert re.findall(rb"HTTP/1\.1 (\d+)", text) == [b"200", b"400", b"400", b"200", b"200"]

    asyncio.run(main())


def test_connections_over_the_limit_are_told_so(opened: Any) -> None:
    """Health answers still."""

    async def main() -> None:
        async with opened(max_connections=1) as house:
            await house.connect()
            answer = await house.ask(post(RECORD))
            assert (answer.status, answer.json["code"]) == (503, "ERR40031")
            assert answer.headers["connection"] == "close"
            assert (await house.get("/live")).status == 200

    asyncio.run(main())


def test_far_over_the_limit_nobody_is_let_in(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever opens connections and says nothing would use up the descriptors of the process."""
    monkeypatch.setattr("headrace.web.server._SPARE_CONNECTIONS", 1)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))

    async def main() -> None:
        async with opened(max_connections=1) as house:
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
            pairs = [await house.connect() for _ in range(3)]
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(pairs[2][0].read(), 60) == b""
            assert len(house.web._server.server_state.connections) == 2
            pairs[0][1].close()
            pairs[1][1].write(b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await house.read(pairs[1][0])).status == 200

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
