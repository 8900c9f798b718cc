"""A handler that is called in this process, and one that answers a reactive consumer's requests."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from yaml_table import table

from headrace.cli.main import main
from headrace.functions.backend import FunctionBackend
from tests.function_workers import Run, Write

MOST = 1_048_576

HANDLER = table(__file__, "handler")


def call(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> Any:
    """Run `headrace function test`, check its exit code, and return what it prints."""
    sys.modules.pop("main", None)
    with pytest.raises(SystemExit) as ended:
        main(("function", "test", *words))
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == code, printed.err
    return printed


def test_a_handler_is_called_in_the_foreground(write_function: Write, capsys: pytest.CaptureFixture[str]) -> None:
    """Its end, outputs and log lines are printed; a plain handler may run an event loop of its own."""
    write_function(HANDLER, outputTopic="out")
    done = call(capsys, "--value", "ä", "--key", "k")
    lines = ["output: seen key=k headers=[] none", "output: out key=k headers=[] ä", "succeeded"]
    assert done.out.splitlines() == lines
    assert "info called worker_id='0' thing=5 event_id='flights-0-0'" in done.err
    assert call(capsys, "--value", "raise", code=1).out == "failed: ValueError: no\n"
    assert call(capsys, "--value", "refuse", code=1).out == "failed: status 422: bad\n"
    found = json.loads(call(capsys, "--value", "ä", "--output", "json").out)
    assert (found["ok"], found["outputs"][1]["value"]) == (True, "ä")
    assert "--record is flights: write TOPIC:PARTITION:OFFSET" in call(capsys, "--record", "flights", code=1).err


async def ask(backend: FunctionBackend, body: bytes, method: str = "POST", unread: bool = False) -> tuple[int, Any]:
    """Send a request in two parts; with `unread` the second one never comes."""
    sent: list[Any] = []
    parts = (
        [{"body": body, "more_body": True}] if unread else [{"body": body[:5], "more_body": True}, {"body": body[5:]}]
    )

    async def receive() -> Any:
        return parts.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await backend({"method": method}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


def request(*values: Any, **fields: Any) -> bytes:
    entries = [
        {"topic": "flights", "partition": 3, "offset": n, "timestamp": 5, "deliveryId": f"g:flights:3:{n}", **fields}
        for n, value in enumerate(values)
    ]
    return json.dumps([e | ({} if v is None else {"value": v}) for e, v in zip(entries, values, strict=True)]).encode()


async def test_a_backend_answers_per_record(write_function: Write, running: Run) -> None:
    """Values and keys are the bytes that Kafka has; the consumer's own header is not the record's."""
    code = HANDLER.replace('"seen", event.key, event.headers.get("h", b"none")', '"seen", None, str(event.headers)')
    async with running(write_function(code, outputTopic="out", ordering="none")) as function:
        await function.ready()
        backend = FunctionBackend(function.destination, ("string", "binary"), lambda: "", MOST)
        headers = {"h": "ä", "X-Correlation-Id": "g:flights:3:0"}
        found = await ask(backend, request("Z28=", "cmFpc2U=", None, "cmVmdXNl", key="k", headers=headers))
        assert found[0] == 200
        assert [entry["processed"] for entry in found[1]] == [True, False, True, False]
        assert found[1][1]["stacktrace"].endswith("ValueError: no")
        assert found[1][3]["stacktrace"] == "status 422: bad"
        assert [each.value for each in function.written if each.topic == "out"] == [b"go"]
        assert function.written[0].key == b"k"
        assert function.written[0].value == str({"h": "ä".encode()}).encode()
        assert await ask(backend, b"", "GET") == (200, {"ready": True, "reason": ""})


async def test_a_backend_says_what_no_attempt_can_help(write_function: Write, running: Run) -> None:
    """What does not fit the handler's type; an exception may pass."""
    code = """
        from dataclasses import dataclass
        from nuclio_sdk import Event

        @dataclass
        class Order:
            id: str

        def handler(context, event: Event[Order]):
            if event.body.id == "raise":
                raise ValueError
    """
    async with running(write_function(code, valueFormat="json")) as function:
        backend = FunctionBackend(function.destination, ("binary", "json"), lambda: "", MOST)
        status, found = await ask(backend, request({"id": "a"}, {"id": 7}, {"id": "raise"}))
        assert status == 200
        assert [entry.get("permanent") for entry in found] == [None, True, False]


@pytest.mark.parametrize(
    "body", [b"{}", b"[{]", b'[{"topic": 1}]', request("no base64"), request({"a": 1}), b"\xff\xff"]
)
async def test_a_request_that_does_not_fit_is_sent_again(write_function: Write, running: Run, body: bytes) -> None:
    """Status 503: the settings are wrong, and no record becomes a dead letter for that."""
    async with running(write_function(HANDLER)) as function:
        backend = FunctionBackend(function.destination, ("binary", "binary"), lambda: "no worker", MOST)
        status, answer = await ask(backend, body)
        assert status == 503
        assert "set backend.mode: results" in answer["error"]
        assert await ask(backend, b"[]") == (200, [])
        assert (await ask(backend, b"", "GET"))[0] == 503


async def test_headers_in_bulk_and_not_utf_8_reach_the_handler(write_function: Write, running: Run) -> None:
    """And an output may have as many; null bodies and headers are None."""
    code = """
        def handler(context, event):
            assert event.body is None and event.headers["n"] is None and event.size == 0
            context.emit("out", value=None, headers=event.headers)
            return {"body": [object(), float("nan"), {1: b"x"}, (1, None)]}
    """
    headers: list[Any] = [(f"h{n}", b"\xff\xfe%d" % n) for n in range(1000)] + [("n", None)]
    async with running(write_function(code, outputTopic="out", ordering="none")) as function:
        (reply,) = await function.deliver(None, read_headers=lambda: headers)
        assert not reply.error, reply
        first, second = function.written
        assert (first.value, first.headers) == (None, headers)
        assert json.loads(second.value)["body"][1] == "NaN"


async def test_a_body_above_the_limit_is_refused(write_function: Write, running: Run) -> None:
    """Its rest is not read; one of exactly the limit is served."""
    async with running(write_function(HANDLER)) as function:
        body = request("YQ==")
        backend = FunctionBackend(function.destination, ("binary", "binary"), lambda: "", len(body))
        assert (await ask(backend, body))[0] == 200
        status, found = await ask(backend, body + b" ")
        assert status == 413
        why = f"the body is larger than {len(body)} bytes: lower batch.max_bytes of the consumer, or raise "
        assert found["error"] == why + "http.max_body_bytes of the function"
        assert (await ask(backend, b"x" * 2000, unread=True))[0] == 413
