"""The HTTP trigger of a function: requests to real workers, what they answer, and what ends a request otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from headrace.config.http import HttpConfig, PrincipalConfig, SecurityConfig
from headrace.errors import KafkaUnavailable, PortTaken, WorkerLost
from headrace.functions.load import load_function
from headrace.functions.triggers.http_requests import FunctionRequests
from headrace.functions.triggers.http_trigger import HttpTrigger
from headrace.http.application import Application
from headrace.http.auth import Authenticator
from headrace.http.server import WebService
from headrace.runtime import Deadline
from headrace.runtime.telemetry.logs import JsonFormatter
from headrace.runtime.telemetry.metrics import Metrics
from tests.function_workers import Running, Write
from tests.running_server import Response
from yaml_table import table

TOKEN = "a-token-of-some-length"
OPEN = SecurityConfig()


class Listening(Running):
    """A function with an HTTP trigger that listens."""

    def __init__(self, folder: Path, security: SecurityConfig = OPEN, port: int = 0) -> None:
        spec = load_function(folder)
        trigger = spec.triggers[-1]
        assert isinstance(trigger, HttpTrigger)
        super().__init__(spec, trigger)
        own = HttpConfig(port=port, max_body_bytes=trigger.max_body_bytes)
        router = FunctionRequests(self.service, trigger, self.destination, own)
        authenticator = Authenticator(security, self.clock) if security.mode != "none" else None
        self.web = WebService(own, Application(own, router, Metrics(), authenticator), name=router.name)

    async def ask(self, method: str, target: str, body: bytes = b"", **headers: str) -> Response:
        """Send one request on a connection of its own, and read its response to the end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", int(self.web.url.rpartition(":")[2]))
        named = {"host": "localhost", "content-length": str(len(body)), "connection": "close", **headers}
        head = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in named.items())
        writer.write(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + body)
        async with asyncio.timeout(60):
            received = await reader.read()
        writer.close()
        first, _, rest = received.partition(b"\r\n")
        lines, _, content = rest.partition(b"\r\n\r\n")
        found = dict(line.decode("latin-1").split(": ", 1) for line in lines.split(b"\r\n"))
        return Response(int(first.split()[1]), {name.lower(): value for name, value in found.items()}, content)


@contextlib.asynccontextmanager
async def listening(folder: Path, security: SecurityConfig = OPEN) -> AsyncIterator[Listening]:
    """Start a function and its listener; stop both at the end."""
    function = Listening(folder, security)
    await function.service.start()
    await function.web.start()
    try:
        await function.ready()
        yield function
    finally:
        await function.web.stop()
        await function.service.drain(Deadline(function.clock, 60))
        await function.service.stop()


@pytest.fixture
def write(write_function: Write) -> Write:
    """A factory of functions with an HTTP trigger: code, then its attributes, keys of the trigger, and of the spec."""

    def make(code: str, trigger: Any = None, spec: Any = None, **attributes: Any) -> Path:
        kafka = {"kind": "kafka", "attributes": {"topics": ["flights"], "consumerGroup": "g"}}
        web = {"kind": "http", **(trigger or {}), "attributes": attributes}
        return write_function(code, spec={"triggers": {"kafka": kafka, "web": web}, **(spec or {})})

    return make


EVENT = """
    def handler(context, event):
        names = ("method", "path", "url", "content_type", "fields", "body", "size", "id", "key", "topic")
        found = {name: getattr(event, name) for name in names}
        found["body"] = repr(event.body)
        return {**found, "kind": event.trigger.kind, "name": event.trigger.name, "own": event.headers.get("X-Own"),
                "any_case": event.get_header("x-oWN"), "context": context.trigger.kind, "when": str(event.timestamp)}
"""


async def test_an_event_has_what_the_request_has(write: Write) -> None:
    """By Nuclio's names; JSON is decoded if the content type is exactly that, and stays as it is if it is none."""
    async with listening(write(EVENT)) as function:
        response = await function.ask("PUT", "/a%20b?x=1&x=2&y=", b"\xff", x_own="one", x_correlation_id="me-1")
        assert (response.status, response.headers["content-type"]) == (200, "application/json")
        found = response.json
        assert found.pop("when") > "2020"
        assert found == table(__file__, "event")
        assert response.headers["x-correlation-id"] == "me-1"
        for kind, sent, body in (
            ("application/json", b'{"a": 1}', "{'a': 1}"),
            ("application/json", b"no json", "b'no json'"),
            ("application/json; charset=utf-8", b"{}", "b'{}'"),
            ("text/plain", b"{}", "b'{}'"),
        ):
            found = (await function.ask("POST", "/", sent, content_type=kind)).json
            assert (found["body"], found["size"], found["content_type"]) == (body, len(sent), kind)
            assert len(found["id"]) == 22


RETURNS = """
    class Odd:
        def __str__(self):
            return "odd"

    def handler(context, event):
        return eval(event.body.decode())
"""
RESPONSES: list[tuple[str, int, str, str]] = table(__file__, "responses")
NO_RESPONSES: list[str] = table(__file__, "no_responses")


@pytest.mark.parametrize("is_async", [False, True])
async def test_the_response_follows_the_return_rules(write: Write, is_async: bool) -> None:
    """Text, JSON or bytes; status and headers of a response; and a failure is 500 without its words."""
    code = RETURNS.replace("def handler", "async def handler") if is_async else RETURNS
    async with listening(write(code)) as function:
        for sent, status, body, kind in RESPONSES:
            response = await function.ask("POST", "/", sent.encode())
            assert (response.status, response.body.decode(), response.headers["content-type"]) == (
                status,
                body,
                kind,
            ), sent
        sent = "context.Response({'X-A': 5, 'Content-Length': 1, 'x-nuclio-stream-no-ack': True}, 'body')"
        response = await function.ask("POST", "/", sent.encode())
        assert (response.headers["x-a"], response.headers["content-length"], response.body) == ("5", "4", b"body")
        assert "x-nuclio-stream-no-ack" not in response.headers
        response = await function.ask("POST", "/", b"context.Response(body='x', status_code=204)")
        assert (response.status, response.body, "content-length" in response.headers) == (204, b"", False)
        response = await function.ask("HEAD", "/", b"'four'")
        assert (response.status, response.body, response.headers["content-length"]) == (200, b"", "4")
        for sent in NO_RESPONSES:
            response = await function.ask("POST", "/", sent.encode())
            found = response.json
            assert (response.status, found["code"], found["statusCode"]) == (500, "ERR40023", 500), sent
            assert b"secret" not in response.body and b"Traceback" not in response.body
        handled = function.service.metrics.handled["web"]
        assert (handled["success"], handled["failure"]) == (len(RESPONSES) - 2 + 3, 2 + len(NO_RESPONSES))
        assert function.service.restarts == 0


EMITS = """
    def handler(context, event):
        context.emit("out", "k", event.body)
        if event.path == "/raise":
            raise ValueError
        return int(event.path[1:]), "done"
"""


async def test_what_is_emitted_is_written_before_the_response(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    """Only of a call that has succeeded; if Kafka does not take it, the response is 503."""
    async with listening(write(EMITS)) as function:
        assert (await function.ask("POST", "/400", b"v")).status == 400
        assert (await function.ask("POST", "/raise", b"v", x_correlation_id="visit-7")).status == 500
        [failed] = [record for record in caplog.records if "raised" in record.getMessage()]
        assert "the handler raised ValueError in request visit-7\nTraceback" in failed.getMessage()
        assert json.loads(JsonFormatter().format(failed))["event_id"] == "visit-7"
        assert function.written == []
        assert (await function.ask("POST", "/201", b"v")).status == 201
        assert [(each.topic, each.key, each.value) for each in function.written] == [("out", b"k", b"v")]

        async def refuse(records: Any) -> Any:
            raise KafkaUnavailable("no broker answers")

        function.produce = refuse
        response = await function.ask("POST", "/201", b"v")
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert "outputs to out are not acknowledged" in response.json["description"]


TYPED = table(__file__, "typed")


async def test_a_body_that_does_not_fit_the_type_is_400(write: Write) -> None:
    """The response names the field, and no value."""
    kafka = {"kind": "kafka", "attributes": {"topics": ["t"], "consumerGroup": "g", "valueFormat": "json"}}
    spec = {"triggers": {"kafka": kafka, "web": {"kind": "http"}}}
    async with listening(write(TYPED, spec=spec)) as function:
        assert (await function.ask("POST", "/", b'{"id": 7}')).body == b"7 9"
        for body in (b'{"id": "secret"}', b"secret"):
            response = await function.ask("POST", "/", body, content_type="application/json")
            assert response.status == 400
            assert b"secret" not in response.body
        assert b"$.id" in (await function.ask("POST", "/", b'{"id": ""}')).body


async def test_the_end_of_a_worker_is_502_and_a_hang_504(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is not repeated, and the response has none of the worker's words."""
    async with listening(write("def handler(context, event):\n    return 'up'")) as function:
        for error, status in (("", 502), ("timeout", 504)):

            async def lose(*_: Any, error: str = error) -> Any:
                raise WorkerLost("worker 0 ended; it wrote last:\nsecret", begun=1, error=error)

            with monkeypatch.context() as patch:
                patch.setattr(function.service, "serve", lose)
                response = await function.ask("POST", "/")
            found = response.json
            assert (response.status, found["statusCode"], found["code"]) == (status, status, "ERR40023")
            assert found["metadata"]["retriable"] is False
            assert b"secret" not in response.body
            assert (await function.ask("GET", "/")).body == b"up"


WAITS = """
    import pathlib, time
    def handler(context, event):
        pathlib.Path(event.path[1:]).touch()
        while not pathlib.Path("go").exists():
            time.sleep(0.005)
        return "done"
"""


@pytest.mark.parametrize(("limit", "wait_ms"), [("time", 200), ("no wait", 0), ("memory", 600_000)])
async def test_a_request_that_cannot_wait_for_a_worker_is_503(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, wait_ms: int
) -> None:
    """After its time, or at once if bodies that wait have too much memory; one alone is always taken, and answered.

    A worker that is idle needs no wait.
    """
    if limit == "memory":
        monkeypatch.setattr("headrace.functions.triggers.http_requests._MOST_WAITING_BYTES", 1000)
    async with listening(write(WAITS, {"workerAvailabilityTimeoutMilliseconds": wait_ms})) as function:
        first = asyncio.ensure_future(function.ask("POST", "/first", b"x" * 2000))
        await function.until((tmp_path / "first").exists)
        late = await asyncio.gather(*(function.ask("POST", "/late", b"x") for _ in range(3)))
        assert [(response.status, response.json["statusCode"]) for response in late] == [(503, 503)] * 3
        assert [response.headers["retry-after"] for response in late] == ["1"] * 3
        (tmp_path / "go").touch()
        assert (await first).body == b"done"
        assert not (tmp_path / "late").exists()
        assert [(await function.ask("GET", "/next")).status for _ in range(20)] == [200] * 20


async def test_limits_and_callers_are_those_of_the_product(write: Write) -> None:
    """A large body is 413, another site 403, no token 401, another scope 403; health is open; no token reaches code."""
    principals = {
        "may": PrincipalConfig(token=TOKEN, scopes=["kafka:w"]),  # type: ignore[arg-type]
        "sees": PrincipalConfig(token=TOKEN * 2, scopes=["metrics"]),  # type: ignore[arg-type]
        "calls": PrincipalConfig(token=TOKEN * 3, scopes=["call:fn.*"]),  # type: ignore[arg-type]
        "other": PrincipalConfig(token=TOKEN * 4, scopes=["kafka:w", "call:other.*"]),  # type: ignore[arg-type]
    }
    code = "def handler(context, event):\n    return sorted(event.headers)[0] + str(len(event.body))"
    folder = write(code, maxRequestBodySize=100)
    async with listening(folder, security=SecurityConfig(mode="token", principals=principals)) as function:
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert (await function.ask("POST", "/", b"x" * 100, **bearer)).body == b"Connection100"
        assert (await function.ask("POST", "/", b"x" * 101, **bearer)).status == 413
        assert (await function.ask("GET", "/")).status == 401
        for times, status in ((2, 403), (3, 200), (4, 403)):
            assert (await function.ask("GET", "/", authorization=f"Bearer {TOKEN * times}")).status == status
        assert (await function.ask("GET", "/__internal/health")).status == 200
        assert (await function.ask("GET", "/", host="evil.example", **bearer)).status == 403
        assert (await function.ask("GET", "/", sec_fetch_site="cross-site", **bearer)).status == 403
        assert (await function.ask("GET", "/", content_encoding="gzip", **bearer)).status == 200
        port = int(function.web.url.rpartition(":")[2])
        with pytest.raises(PortTaken, match=r"change the port of fn\.web"):
            Listening(folder, port=port).web.claim()
