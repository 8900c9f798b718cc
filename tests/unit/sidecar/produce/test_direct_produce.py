"""Produce requests that are served on their connection or by a task: a client cannot distinguish them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

from headrace.config.http import SecurityConfig
from headrace.http.application import Application
from headrace.runtime import Deadline, SystemClock
from tests.raw_server import until
from tests.running_server import OpenServer, RunningServer

RECORD = b'{"records":[{"key":"k","value":{"n":1}}]}'
SECURITY = {"mode": "token", "principals": {"me": {"token": "0123456789abcdef", "scopes": ["kafka:w"]}}}
BEARER = "Authorization: Bearer 0123456789abcdef\r\n"


def post(body: bytes = RECORD, more: str = "", topic: str = "t", version: str = "1.1") -> bytes:
    head = f"POST /producers/{topic} HTTP/{version}\r\nHost: h\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{more}\r\n".encode() + body


def chunked(request: bytes) -> bytes:
    """Return the same request in a form that a task serves."""
    head, _, body = request.partition(b"\r\n\r\n")
    head = re.sub(rb"Content-Length: \d+", b"Transfer-Encoding: chunked", head)
    return head + b"\r\n\r\n" + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The statuses of responses without a task."""
    statuses: list[int] = []
    loaded: list[Any] = []
    load, end = Application.load, Application._end

    async def load_recorded(self: Application, request: Any) -> bool:
        loaded.append(request)
        return await load(self, request)

    def end_recorded(self: Application, request: Any, response: Any) -> None:
        if request not in loaded:
            statuses.append(response.status)
        end(self, request, response)

    monkeypatch.setattr(Application, "load", load_recorded)
    monkeypatch.setattr(Application, "_end", end_recorded)
    return statuses


async def text_of(server: Any, request: bytes) -> bytes:
    """Return a response's bytes but for its date."""
    reader, writer = await server.connect()
    writer.write(request)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    body = await asyncio.wait_for(reader.readexactly(int(re.findall(rb"content-length: (\d+)", head)[0])), 60)
    writer.close()
    return re.sub(rb"date: [^\r]*", b"date", head) + body


def raw(body: bytes, more: str = "", kind: str = "image/png", topic: str = "t") -> bytes:
    return post(body, more, topic).replace(b"application/json", kind.encode(), 1)


FAILING = ("load", "do", "respond")
IDS = "X-Correlation-Id: c-1\r\nX-Traceability-Id: t-1\r\n"
FORMATS = b'{"keyFormat":"STRING","valueFormat":0,"records":[{"key":"","value":"YQ=="},{"value":null}]}'
SAME = [
    (post(more=IDS), 200),
    (post(FORMATS, IDS), 200),
    (post(b'{"records":[{"value":1,"headers":{"a":null},"correlationId":"r","partition":2,"timestamp":5}]}', IDS), 200),
    (post(b"{", IDS), 400),
    (post(b'{"records":[{"value":1,"partition":3}]}', IDS), 404),
    (post(b'{"valueFormat":"yaml","records":[{"value":1}]}', IDS), 400),
    (post(b'{"valueFormat":"avro","records":[{"value":1}]}', IDS), 0),
    (raw(b"1", IDS + "X-Headrace-Key: k\r\nX-Headrace-Header-A: 1\r\nX-Headrace-Partition: 2\r\n"), 200),
    (raw(b"1", IDS + "traceparent: 00-http\r\nX-Headrace-Header-Traceparent: 00-own\r\n"), 200),
    (raw(b"1", IDS + "X-Headrace-Keys: k\r\n"), 400),
    (raw(b"1", IDS, topic="missing"), 0),
    (post(RECORD, IDS, "missing"), 0),
    (post(RECORD, IDS, "new"), 0),
    (post(RECORD, IDS + "Origin: http://evil.example\r\n"), 0),
]


async def test_both_paths_answer_and_write_the_same_bytes(server: RunningServer, direct: list[int]) -> None:
    """Good and bad; without a task what is usual."""
    for request, expected in SAME:
        direct.clear()
        response = await text_of(server, request)
        assert direct == ([expected] if expected else []), request
        written, server.kafka.producer.records = server.kafka.producer.records, []
        server.kafka.empty()
        assert await text_of(server, chunked(request)) == response
        assert direct == ([expected] if expected else []), request
        assert server.kafka.producer.records == written
        server.kafka.producer.records = []


async def test_a_known_token_is_enough_and_limits_hold(opened: OpenServer, direct: list[int]) -> None:
    """One request at once and then 429; who is not known, or may not, is told so by the application."""
    async with opened(security={**SECURITY, "max_in_flight": 1}) as server:
        server.kafka.producer.hold()
        first = asyncio.ensure_future(server.ask(post(more=BEARER)))
        await server.kafka.producer.taken.wait()
        assert (await server.ask(post(more=BEARER))).status == 429
        server.kafka.producer.release()
        assert (await first).status == 200
        assert (await server.ask(post(more=BEARER))).status == 200
        assert direct == [429, 200, 200]
        assert (await server.ask(post(more=BEARER, topic="_internal"))).status == 403
        assert (await server.ask(post())).status == 401
        assert (await server.ask(post(more=BEARER.replace("0", "1")))).status == 401
        assert direct == [429, 200, 200]


async def test_a_request_that_was_loaded_counts_until_its_response(opened: OpenServer) -> None:
    """For the limit of its caller and for a drain, although its task has ended; a client that half-closed gets it."""
    async with opened(security={**SECURITY, "max_in_flight": 1}) as server:
        server.kafka.producer.hold()
        reader, writer = await server.connect()
        writer.write(chunked(post(more=BEARER)))
        await server.kafka.producer.taken.wait()
        await until(lambda: not any(task.get_name() == "http/request" for task in asyncio.all_tasks()))
        assert (await server.ask(post(more=BEARER))).status == 429
        drained = asyncio.ensure_future(server.web.drain(Deadline(SystemClock(), 60)))
        writer.write_eof()
        await asyncio.sleep(0)
        assert not drained.done()
        server.kafka.producer.release()
        assert (await server.read(reader)).status == 200
        await drained
        assert server.web._application._authenticator.in_flight._counts == {}


async def test_the_same_head_again_is_the_same_request(opened: OpenServer) -> None:
    """With another body, in two pieces, and behind bytes of an earlier request; its token is judged each time."""
    async with opened(security=SECURITY) as server:
        reader, writer = await server.connect()
        connections: Any = server.web.shared.connections
        (connection,) = connections
        unreadable, usual = post(b"x" * len(RECORD), BEARER), post(more=BEARER)

        async def statuses(*pieces: bytes) -> list[int]:
            for piece in pieces:
                seen = connection._parser.received_bytes
                writer.write(piece)
                await until(lambda: connection._parser.received_bytes > seen)  # noqa: B023 it is awaited
            return [(await server.read(reader)).status for _ in range(b"".join(pieces).count(b"POST "))]

        for pieces in ([usual], [usual], [usual.replace(b'"k"', b'"l"')], [unreadable], [usual[:-5], usual[-5:]]):
            assert await statuses(*pieces) == [400 if pieces == [unreadable] else 200]
        assert [record.key for record in server.kafka.producer.records] == [b"k", b"k", b"l", b"k"]
        for token, status in (("another-token-of-16", 401), ("0123456789abcdef", 200)):
            known = {**SECURITY, "principals": {"me": {"token": token, "scopes": ["kafka:w"]}}}
            server.web._application._authenticator.change(SecurityConfig.model_validate(known))
            assert await statuses(usual) == [status]
        behind = unreadable[-5:] + usual
        assert await statuses(unreadable[:-5], behind) == [400, 200]
        assert await statuses(behind) == [400]
        assert len(server.kafka.producer.records) == 6


@pytest.mark.parametrize(
    ("method", "form"), [("needs", bytes), ("do", bytes), ("respond", bytes), *((one, chunked) for one in FAILING)]
)
async def test_a_defect_releases_the_request(
    opened: OpenServer, monkeypatch: pytest.MonkeyPatch, method: str, form: Callable[[bytes], bytes]
) -> None:
    """The caller has no request in flight afterwards, whichever step has the defect."""

    def fail(*_: Any) -> None:
        raise RuntimeError

    monkeypatch.setattr(f"headrace.sidecar.produce.produce.ProduceService.{method}", fail)
    async with opened(security=SECURITY) as server:
        assert (await server.ask(form(post(more=BEARER)))).status == 500
        assert server.web._application._authenticator.in_flight._counts == {}
        await server.web.drain(Deadline(SystemClock(), 60))


@pytest.mark.parametrize(
    ("request_bytes", "audited"),
    [
        (post(b"{"), ("t", "ERR10015")),
        (post(b'{"records":[{"value":1,"partition":3}]}'), ("t", "ERR40007")),
        (post(topic="missing"), ("missing", "ERR40006")),
        (chunked(post(topic="missing")), ("missing", "ERR40006")),
        (post(b'{"topics":[{"topic":"missing","records":[{"value":1}]}]}').replace(b"/producers/t", b"/transactions"),
         ("missing", "ERR40006")),
        (post(b"[").replace(b"/producers/t", b"/transactions"), ("", "ERR11004")),
        (post(b"v", topic="missing").replace(b"application/json", b"text/plain"), ("missing", "ERR40006")),
        (post(b'{"value":1}\n{\n', topic="t").replace(b"application/json", b"application/x-ndjson"),
         ("t", "ERR11004", 1)),
    ],
)  # fmt: skip
@pytest.mark.uvloop
async def test_a_produce_request_that_is_not_sent_is_audited_once(
    server: RunningServer, request_bytes: bytes, audited: tuple[Any, ...]
) -> None:
    """Whatever its kind: with its topic, if it has one, and the code it is answered with."""

    reader, writer = await server.connect()
    writer.write(request_bytes.replace(b"Host: h", b"Host: h\r\nConnection: close"))
    await asyncio.wait_for(reader.read(), 60)
    writer.close()
    assert [(topic, error.code, *count) for topic, error, *count in server.events.unsent] == [audited]
