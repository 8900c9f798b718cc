"""Handlers in real worker processes."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from headrace import framing
from headrace.delivery.outcomes import ACK
from headrace.errors import DestinationUnavailable, RegistryUnavailable
from headrace.formats.avro import AvroCodec
from headrace.formats.plain import header_of
from headrace.records import OutgoingRecord
from tests.function_workers import Run, Write
from yaml_table import table

FLIGHT = {"type": "record", "name": "Flight", "fields": [{"name": "carrier", "type": "string"}]}


def framed(schema_id: int, value: dict[str, Any]) -> bytes:
    return header_of(schema_id) + AvroCodec(json.dumps(FLIGHT)).encode(json.dumps(value).encode())


async def test_a_nuclio_handler_runs_unmodified(write_function: Write, running: Run) -> None:
    """`init_context`, `user_data`, `nuclio_sdk`, every event field, environment, Response with headers."""
    code = """
        import os
        import nuclio
        import nuclio_sdk
        from nuclio import QualifiedOffset

        def init_context(context):
            context.user_data.greeting = os.environ["GREETING"]

        def handler(context: nuclio_sdk.Context, event: nuclio_sdk.Event):
            seen = [event.topic, event.shard_id, event.num_shards, event.offset, event.id, event.timestamp_ms,
                    event.key.decode(), event.size, event.headers["h"].decode(), event.trigger.kind,
                    context.trigger_name, context.worker_id, os.environ["NUCLIO_FUNCTION_NAME"],
                    os.environ["NUCLIO_FUNCTION_VERSION"], list(QualifiedOffset.from_event(event)), event.path,
                    str(event.timestamp), event.get_header("H").decode(), event.get_header("none"),
                    event.content_type, event.method, event.fields, event.last_in_batch]
            return context.Response(
                headers={"greeting": context.user_data.greeting}, body={"body": event.body.decode(), "seen": seen}
            )
    """
    folder = write_function(code, spec={"env": [{"name": "GREETING", "value": "hello"}]}, outputTopic="out")
    async with running(folder) as function:
        outcomes = await function.deliver(b"a", b"b", first=7, read_headers=lambda: [("h", b"0"), ("h", b"1")])
        assert outcomes == [ACK, ACK]
        first, second = function.written
        assert (first.topic, first.key, first.headers) == ("out", b"key", [("greeting", b"hello")])
        assert json.loads(second.value) == {"body": "b", "seen": table(__file__, "seen")}


TEXTS = """
    def handler(context, event):
        names = ["topic", "path", "id", "content_type", "method", "type_version", "headers", "fields"]
        names += ["body", "shard_id"]
        context.logger.info("seen")
        seen = [getattr(event, name) for name in names] + [event.trigger.kind, event.trigger.name]
        return context.Response(event.headers, str(seen).encode())
"""


@pytest.mark.parametrize("word", ["no", "FALSE", "in the process", "yes"])
async def test_texts_of_events_are_bytes_without_decoding(
    write_function: Write, running: Run, word: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`NUCLIO_PYTHON_DECODE_EVENT_STRINGS` of `spec.env` or of the process; outputs and log lines are texts still.

    Nuclio knows four words only; otherwise they are texts.
    """
    spec = {"env": [{"name": "NUCLIO_PYTHON_DECODE_EVENT_STRINGS", "value": word}]}
    if word == "in the process":
        spec = {}
        monkeypatch.setenv("NUCLIO_PYTHON_DECODE_EVENT_STRINGS", "no")
    caplog.set_level(logging.INFO, "headrace")
    of: Any = str if word == "yes" else str.encode
    texts = ("flights", "flights", "flights-3-0", "", "", "")
    async with running(write_function(TEXTS, spec=spec, outputTopic="out")) as function:
        assert await function.deliver(b"v", read_headers=lambda: [("h", b"1")]) == [ACK]
        [output] = function.written
        assert output.headers == [("h", b"1")]
        seen = [*map(of, texts), {of("h"): b"1"}, {}, b"v", 3, of("kafka-cluster"), of("kafka")]
        assert output.value.decode() == str(seen)
        await function.until(lambda: "event_id='flights-3-0'" in caplog.text)


@pytest.mark.parametrize("code", table(__file__, "handlers_of_each_kind_run"))
async def test_handlers_of_each_kind_run(write_function: Write, running: Run, code: str) -> None:
    """Async, plain, a partial and an object, with the `init_context` of the module that defines the handler."""
    async with running(write_function(code, outputTopic="out")) as function:
        assert await function.deliver(b"a", b"b") == [ACK, ACK]
        assert [record.value for record in function.written] == [b"ran", b"ran"]
        assert function.service.metrics.allocations == {"success_after_wait": 1}


@pytest.mark.parametrize("ordering", ["none", "partition"])
async def test_a_result_that_cannot_be_sent_fails_its_own_record(
    write_function: Write, running: Run, monkeypatch: pytest.MonkeyPatch, ordering: str
) -> None:
    """Half an emoji, as cut JSON has it; more than a response holds. What does not fit is called again."""
    monkeypatch.setattr(framing, "MAX_FRAME_BYTES", 4000)
    code = """
        import enum
        class Topic(enum.StrEnum):
            out = "out"
        class Text(bytes): ...
        HALF = "Ann \\ud83d"
        def handler(context, event):
            if event.body.isdigit():
                return b"x" * int(event.body)
            if event.body == b"own":
                return context.emit(Topic.out, value=Text(b"own"), headers={"a": Text(b"b")})
            return {b"reason": (400, HALF), b"name": context.Response({HALF: 1}, "b"), b"body": HALF}[event.body]
    """
    async with running(write_function(code, outputTopic="out", ordering=ordering)) as function:
        sent, errors = [b"3000", b"5000", b"3001"], ["", "RecordTooLarge", "" if ordering == "none" else "not begun"]
        replies = await function.deliver(*sent)
        assert [reply.error for reply in replies] == errors and "cannot be sent: a frame of" in replies[1].reason
        written = [3000, 3001] if ordering == "none" else [3000]
        assert [len(record.value) for record in function.written] == written
        assert [reply.error for reply in await function.deliver(b"3000", b"3002", b"own", first=3)] == [""] * 3
        assert function.written[-1] == OutgoingRecord("out", b"key", b"own", [("a", b"b")])
        for name, error in [
            (b"reason", "status 400"),
            (b"name", "UnicodeEncodeError"),
            (b"body", "UnicodeEncodeError"),
        ]:
            [reply] = await function.deliver(name, first=9)
            assert reply.error == error and (reply.reason == "Ann ?" or "'\\ud83d'" in reply.reason)
        assert function.service.restarts == 0 and function.in_flight() == 0


@pytest.mark.parametrize("prefix", ["", "async "])
@pytest.mark.parametrize(("own", "stops"), table(__file__, "nothing_is_begun_after_a_failure_that_is_retried_in_order"))
async def test_nothing_is_begun_after_a_failure_that_is_retried_in_order(
    write_function: Write, running: Run, prefix: str, own: dict[str, Any], stops: bool
) -> None:
    """A frame stops there, and the others of its delivery are released; not after the last attempt."""
    code = f"""
        {prefix}def handler(context, event):
            context.emit("seen", value=event.body)
            if event.body == b"raise":
                raise ValueError("no seat")
    """
    async with running(write_function(code, **own)) as function:
        replies = await function.deliver(b"a", b"raise", b"b", b"raise", b"c")
        errors = ["", "ValueError", "not begun", "not begun", "not begun"] if stops else ["", *["ValueError", ""] * 2]
        assert [reply.error for reply in replies] == errors
        assert [each.value for each in function.written] == ([b"a"] if stops else [b"a", b"b", b"c"])
        assert [reply.error for reply in await function.deliver(b"d", b"e", first=9)] == ["", ""]


async def test_a_registry_that_is_down_holds_the_delivery_back(write_function: Write, running: Run) -> None:
    """No attempt is used up, and the delivery resumes."""
    async with running(write_function("def handler(c, e): pass", valueFormat="avro")) as function:
        function.schemas = {7: RegistryUnavailable("no response")}
        with pytest.raises(DestinationUnavailable, match="schema 7 cannot be read: no response"):
            await function.deliver(framed(7, {"carrier": "UA"}))
        function.schemas = {7: FLIGHT}
        assert await function.deliver(framed(7, {"carrier": "UA"})) == [ACK]


@pytest.mark.parametrize(("code", "reason"), table(__file__, "readiness_names_a_worker_that_does_not_come_up"))
async def test_readiness_names_a_worker_that_does_not_come_up(
    write_function: Write, running: Run, code: str, reason: str
) -> None:
    """And deliveries are refused with the same reason instead of waiting for ever."""
    async with running(write_function(code)) as function:
        assert function.service.readiness().reason == "no worker is up yet"
        await function.until(lambda: "failed to start" in function.service.readiness().reason)
        assert function.service.readiness().reason.startswith("worker 0 failed to start")
        assert reason in function.service.readiness().reason
        with pytest.raises(DestinationUnavailable) as refused:
            await function.deliver(b"a")
        assert reason in refused.value.description
        assert function.service.metrics.allocations == {"error_timeout": 1}


async def test_a_function_that_could_not_start_recovers_by_itself(write_function: Write, running: Run) -> None:
    """The worker is tried again, so what init_context waits for may come later."""
    code = """
        import pathlib
        def init_context(context):
            pathlib.Path("there").read_text()
        def handler(context, event): pass
    """
    folder = write_function(code)
    async with running(folder) as function:
        await function.until(lambda: "failed to start" in function.service.readiness().reason)
        (folder / "there").write_text("")
        await function.ready()
        assert await function.deliver(b"a") == [ACK]


async def test_the_time_limit_of_an_event_does_not_count_the_wait_at_hand(write_function: Write, running: Run) -> None:
    """A frame that waits longer than `eventTimeout` for short events is not late."""
    code = """
        import time
        def handler(context, event):
            time.sleep(0.1)
    """
    async with running(write_function(code, spec={"eventTimeout": "500ms"})) as function:
        await function.ready()
        first = function.begin(*[b"a"] * 6, partition=0)
        second = function.begin(*[b"a"] * 2, partition=1)
        await function.until(lambda: first and second)
        assert (first, second, function.service.restarts) == ([[ACK] * 6], [[ACK] * 2], 0)
